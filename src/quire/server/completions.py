"""/v1/completions: completions of prompts."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from quire.engine import Completion
from quire.server.bodies import JsonRoute
from quire.server.errors import bad
from quire.server.protocol import CompletionRequest
from quire.server.responses import answer
from quire.server.schemas import TextCompletion, completed
from quire.server.service import Generation, Service
from quire.server.tokens import Echo, Offsets, by_name, echo, finite, id_name, limited, prompt_report

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/completions", responses=completed(TextCompletion))
async def completions(body: CompletionRequest, request: Request) -> Response:
    """Complete a prompt, or several."""
    service: Service = request.app.state.service
    service.check_model(body.model)
    if body.logprobs is not None or body.prompt_logprobs is not None or body.echo:
        # Tokens are reported as text, which the property refuses without a tokenizer.
        service.tokenizer  # noqa: B018
    # Echoes have the prompt's log-probabilities.
    scored = [body.prompt_logprobs, body.logprobs if body.echo else None]
    most_scored = max((count for count in scored if count is not None), default=None)
    params = body.params(service.limits, body.logprobs, most_scored)
    given = body.prompts()
    # With one prompt, n is too large, and `start` reports that.
    if len(given) > 1 and len(given) * len(params) > service.capacity:
        raise bad(
            "prompt", f"prompt has {len(given)} elements: this server holds {service.capacity} completions at most"
        )
    await service.prepare(params[0], body.form_field)
    cuts = params[0].truncate_prompt_tokens is not None
    whole = await asyncio.gather(*(service.encode(p, f"prompt {i}", any_length=cuts) for i, p in enumerate(given)))
    prompts = [params[0].truncated(tokens, service.max_len) for tokens in whole]
    # `start` refuses token ids that the model does not have.
    generation = service.start(prompts, params, "prompt", body.requested_tokens, body.model)
    uncut = [
        p if isinstance(p, str) and len(w) == len(t) else None for p, w, t in zip(given, whole, prompts, strict=True)
    ]
    try:
        echoes = await asyncio.to_thread(_echoes, service, body, uncut, prompts) if body.echo else []
    except BaseException:
        generation.close()
        raise
    return await answer(request, generation, _CompletionFormatter(service, generation, body, echoes), body)


def _echoes(service: Service, body: CompletionRequest, texts: list[str | None], prompts: list[list[int]]) -> list[Echo]:
    """The echo of each prompt, and of the text that it was, if it was one."""
    wanted = body.logprobs is not None
    pairs = zip(texts, prompts, strict=True)
    return [echo(service.tokenizer, service.token_bytes, text, prompt, wanted) for text, prompt in pairs]


class _CompletionFormatter:
    """Text completions.

    Args:
        service: has the model's name and tokens' texts.
        generation: the completions.
        body: says what is reported.
        echoes: of the prompts; empty: the texts do not begin with them.
    """

    chunk_object = "text_completion"

    def __init__(self, service: Service, generation: Generation, body: CompletionRequest, echoes: list[Echo]) -> None:
        self._service, self._body = service, body
        samples = generation.count // len(generation.prompts)
        self._echoes = [each for each in echoes or [Echo("", [])] * len(generation.prompts) for _ in range(samples)]
        self._name = id_name if body.return_tokens_as_token_ids else service.token_name
        # The number of characters of each text that have been sent.
        self._sent = [len(each.text) for each in self._echoes]
        self._offsets: list[Offsets] = []
        if body.logprobs is not None:
            starts = zip((p for p in generation.prompts for _ in range(samples)), self._sent, strict=True)
            given = service.tokenizer, service.token_bytes
            self._offsets = [Offsets(*given, prompt, start) for prompt, start in starts]
        self.head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": service.now(),
            "model": generation.model,
        }

    def choice(self, index: int, whole: Completion) -> dict[str, Any]:
        made = self.chunk(index, whole, first=True)
        if self._body.prompt_logprobs is not None:
            made["prompt_logprobs"] = prompt_report(whole, self._body.prompt_logprobs, self._service.token_name)
        return made

    def chunk(self, index: int, part: Completion, first: bool) -> dict[str, Any]:
        self._sent[index] += len(part.text)
        made = {
            "index": index,
            "text": self._echoes[index].text * first + part.text,
            "logprobs": self._report(index, part, first),
            "finish_reason": part.finish_reason,
        }
        if self._body.return_token_ids:
            made["token_ids"] = part.token_ids
            if first:
                made["prompt_token_ids"] = part.prompt_token_ids
        return made

    def beside(self, part: Completion, whole: bool) -> dict[str, Any]:
        return {}

    def _report(self, index: int, part: Completion, first: bool) -> dict[str, Any] | None:
        """The log-probabilities of a part's tokens, and before the first one of those of an echoed prompt."""
        count = self._body.logprobs
        if count is None:
            return None
        tokens, reports = part.token_ids, list[dict[int, float] | None](part.logprobs or ())
        offsets = [self._offsets[index](token) for token in tokens]
        # A stop string may have taken the text of the last tokens.
        if part.finish_reason is not None:
            offsets = [min(offset, self._sent[index]) for offset in offsets]
        if first and self._body.echo and part.prompt_logprobs is not None:
            tokens, reports = part.prompt_token_ids + tokens, part.prompt_logprobs + reports
            offsets = self._echoes[index].offsets + offsets
        reported = list(zip(tokens, reports, strict=True))
        return {
            "tokens": [self._name(token) for token in tokens],
            "token_logprobs": [None if report is None else finite(report[token]) for token, report in reported],
            "top_logprobs": (self._top(token, report, count) for token, report in reported),
            "text_offset": offsets,
        }

    def _top(self, token: int, report: Mapping[int, float] | None, count: int) -> dict[str, float] | None:
        """The element of "top_logprobs" for a token."""
        if report is None:
            return None
        return {k: finite(value) for k, value in by_name(limited(report, count, token), token, self._name).items()}
