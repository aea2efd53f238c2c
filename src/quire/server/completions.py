"""/v1/completions: completions of prompts."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from quire.engine import Completion
from quire.server.answers import Whole, answer, finite
from quire.server.documents import TextCompletion, completed
from quire.server.errors import bad
from quire.server.protocol import CompletionRequest
from quire.server.service import Service

router = APIRouter()
_MAX_TOKENS = 16  # of OpenAI's interface, where a request does not say


@router.post("/v1/completions", responses=completed(TextCompletion))
async def completions(body: CompletionRequest, request: Request) -> Response:
    """Complete a prompt, or several."""
    service: Service = request.app.state.service
    service.check_model(body.model)
    if body.echo and body.logprobs is not None:
        raise bad("echo", "echo with logprobs is not supported: log-probabilities of prompts are not computed")
    if body.logprobs is not None or body.echo:
        service.tokenizer  # noqa: B018 - tokens are reported as text
    most = body.max_tokens
    if most is None:
        most = min(_MAX_TOKENS, service.limits.max_tokens or _MAX_TOKENS)
    params = body.params(service.limits, most, body.logprobs)
    given = body.prompts()
    if len(given) * len(params) > service.room:
        raise bad("prompt", f"prompt has {len(given)} elements: this server holds {service.room} completions at most")
    await service.prepare(params[0], body.form_field)
    prompts = list(await asyncio.gather(*(service.encode(p, f"prompt {i}") for i, p in enumerate(given))))
    generation = service.start(prompts, params, "prompt")  # which refuses what are not tokens
    echoes = [""] * len(prompts)
    if body.echo:
        echoes = [p if isinstance(p, str) else service.tokenizer.decode(p) for p in given]
    form = _Form(service, [echo for echo in echoes for _ in params], body.logprobs)
    return await answer(request, generation, form, bool(body.stream), body.includes_usage)


class _Form:
    """Text completions.

    Args:
        service: has the model's name and tokens' text.
        echoes: the text before each completion.
        logprobs: likeliest tokens to report; None: no report.
    """

    chunk_object = "text_completion"

    def __init__(self, service: Service, echoes: list[str], logprobs: int | None) -> None:
        self._service, self._echoes, self._logprobs = service, echoes, logprobs
        self._offsets = [len(echo) for echo in echoes]
        self._begun: set[int] = set()
        self.head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": service.now(),
            "model": service.name,
        }

    def choice(self, index: int, whole: Whole) -> dict[str, Any]:
        return {
            "index": index,
            "text": self._echoes[index] + whole.text,
            "logprobs": self._report(index, whole.token_ids, whole.logprobs),
            "finish_reason": whole.finish_reason,
        }

    def chunk(self, index: int, part: Completion) -> dict[str, Any]:
        text = part.text if index in self._begun else self._echoes[index] + part.text
        self._begun.add(index)
        report = self._report(index, part.token_ids, part.logprobs)
        return {"index": index, "text": text, "logprobs": report, "finish_reason": part.finish_reason}

    def _report(self, index: int, tokens: list[int], logprobs: Any) -> dict[str, Any] | None:
        if self._logprobs is None:
            return None
        texts, offsets, top = [], [], []
        for token, report in zip(tokens, logprobs or [], strict=True):
            texts.append(self._service.token_text(token))
            offsets.append(self._offsets[index])
            self._offsets[index] += len(texts[-1])
            likeliest: dict[str, float] = {}
            for other, value in report.items():  # the likeliest first; several tokens may have the same text
                likeliest.setdefault(self._service.token_text(other), finite(value))
            top.append(likeliest)
        chosen = [finite(report[token]) for token, report in zip(tokens, logprobs or [], strict=True)]
        return {"tokens": texts, "token_logprobs": chosen, "top_logprobs": top, "text_offset": offsets}
