"""/v1/completions: completions of prompts."""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import replace
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
    if body.logprobs is not None or body.echo:
        service.tokenizer  # noqa: B018 - tokens are reported as text
    most = body.max_tokens
    if most is None:
        most = min(_MAX_TOKENS, service.limits.max_tokens or _MAX_TOKENS)
    params = body.params(service.limits, most, body.logprobs)
    if body.echo:  # log-probabilities are those of all tokens of the text
        params = [replace(p, prompt_logprobs=body.logprobs) for p in params]
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
        self._ends = [len(echo) for echo in echoes]  # where the reported tokens of each text end
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
            "logprobs": self._report(index, whole, first=True),
            "finish_reason": whole.finish_reason,
        }

    def chunk(self, index: int, part: Completion) -> dict[str, Any]:
        first = index not in self._begun
        self._begun.add(index)
        text, report = self._echoes[index] * first + part.text, self._report(index, part, first)
        return {"index": index, "text": text, "logprobs": report, "finish_reason": part.finish_reason}

    def _report(self, index: int, part: Whole | Completion, first: bool) -> dict[str, Any] | None:
        """The log-probabilities of a part's tokens, and before the first one of those of an echoed prompt."""
        if self._logprobs is None:
            return None
        tokens, reports = part.token_ids, list[dict[int, float] | None](part.logprobs or ())
        if first and part.prompt_logprobs is not None:
            tokens, reports = part.prompt_token_ids + tokens, part.prompt_logprobs + reports
            self._ends[index] = 0
        texts, offsets, chosen, top = [], [], [], []
        for token, report in zip(tokens, reports, strict=True):
            texts.append(self._service.token_text(token))
            offsets.append(self._ends[index])
            self._ends[index] += len(texts[-1])
            chosen.append(None if report is None else finite(report[token]))
            top.append(None if report is None else self._likeliest(report))
        return {"tokens": texts, "token_logprobs": chosen, "top_logprobs": top, "text_offset": offsets}

    def _likeliest(self, report: dict[int, float]) -> dict[str, float]:
        likeliest: dict[str, float] = {}
        for token, value in report.items():  # the likeliest first; several tokens may have the same text
            likeliest.setdefault(self._service.token_text(token), finite(value))
        return likeliest
