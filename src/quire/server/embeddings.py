"""/v1/embeddings: embeddings of texts."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Sequence

import numpy as np
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from quire.engine import Embedding, EmbeddingParams, SamplingParams
from quire.engine.model_info import AdapterInfo
from quire.server.bodies import JsonRoute
from quire.server.encoding import encode, in_thread
from quire.server.errors import bad, invalid
from quire.server.protocol import EmbeddingsRequest
from quire.server.responses import while_connected
from quire.server.schemas import EmbeddingList
from quire.server.service import Service, check_end
from quire.server.unsupported import refuse

router = APIRouter(route_class=JsonRoute)
# Prompts that are tokenized at once.
_SLICE = 64


@router.post("/v1/embeddings", response_model=EmbeddingList)
async def embeddings(body: EmbeddingsRequest, request: Request) -> Response:
    """Compute the embedding of a text, or of several."""
    service: Service = request.app.state.service
    service.check_model(body.model)
    refuse(body.model_extra or {})
    given, max_inputs = body.prompts(), service.limits.max_inputs
    if len(given) > max_inputs:
        raise bad("input", f"input has {len(given)} elements: this server allows {max_inputs} at most")
    try:
        params = EmbeddingParams(normalize=body.normalize, dimensions=body.dimensions)
        cut = SamplingParams(max_tokens=0, truncate_prompt_tokens=body.truncate_prompt_tokens)
    except ValueError as error:
        raise invalid(error) from None
    names = [f"input {i}" for i in range(len(given))] if len(given) > 1 else ["input"]
    prompts = await _encoded(service, given, names, cut)
    for prompt, name in zip(prompts, names, strict=True):
        service.check_length(name, prompt, None, 0, "input")
    adapter = service.check_model(body.model)
    computed = await _embedded(_Batch(service, prompts, params, adapter), request)
    if computed is None:
        # The client has disconnected, so this is not read.
        return Response(status_code=499)
    model = service.name if adapter is None else adapter.name
    content = await in_thread(_content, model, computed, body.encoding_format == "base64")
    return Response(content, media_type="application/json")


async def _encoded(
    service: Service, given: Sequence[str | list[int]], names: Sequence[str], cut: SamplingParams
) -> list[list[int]]:
    """The tokens of prompts, which are cut as `cut` says. Those of a slice are tokenized at once: tasks for all prompts
    would hold the event loop for too long.
    """
    cuts, prompts = cut.truncate_prompt_tokens is not None, []
    for start in range(0, len(given), _SLICE):
        part = slice(start, start + _SLICE)
        tasks = (service.encode(p, name, cuts, "input") for p, name in zip(given[part], names[part], strict=True))
        prompts += [cut.truncated(tokens, service.max_len) for tokens in await asyncio.gather(*tasks)]
    return prompts


async def _embedded(batch: _Batch, request: Request) -> list[Embedding] | None:
    """The embeddings of a batch, which is closed then; None if the client leaves before."""
    try:
        return await while_connected(request.receive, batch.wait())
    finally:
        batch.close()


class _Batch:
    """The embeddings of one HTTP request, which the engine works on until `close`. It counts as no more completions
    than run at once: its prompts take turns with the requests of others.
    """

    def __init__(
        self, service: Service, prompts: list[list[int]], params: EmbeddingParams, adapter: AdapterInfo | None
    ) -> None:
        self._service, self._arrival = service, time.perf_counter()
        self._adapter = adapter
        self._weight, self._left = min(len(prompts), service.engine.info.max_num_seqs), len(prompts)
        self._results: dict[int, Embedding] = {}
        self._ended = asyncio.Event()
        service.check_room(self._weight)
        try:
            name = None if adapter is None else adapter.name
            self._cancel = service.engine.start_embedding(prompts, params, self._add, name)
        except ValueError as error:
            raise invalid(error, "input") from None
        service.count_running(self._weight)

    async def wait(self) -> list[Embedding]:
        """All embeddings, in the order of their prompts; an ApiError if one fails."""
        await self._ended.wait()
        done = [self._results[i] for i in range(len(self._results))]
        for each in done:
            check_end(each)
        return done

    def close(self) -> None:
        """Cancel those that have not ended."""
        if self._left:
            self._cancel()

    def _add(self, index: int, embedding: Embedding) -> None:
        metrics = self._service.metrics
        metrics.ended[embedding.finish_reason].inc()
        metrics.prompt.observe(len(embedding.prompt_token_ids))
        metrics.whole.observe(time.perf_counter() - self._arrival)
        if self._adapter is not None:
            metrics.adapters.add(self._adapter, len(embedding.prompt_token_ids), 0)
        self._results[index] = embedding
        self._left -= 1
        if not self._left:
            self._service.count_running(-self._weight)
            self._ended.set()


def _content(model: str, computed: list[Embedding], is_base64: bool) -> bytes:
    """The body of the answer. Embeddings are written one by one, since nothing else in the process runs while one call
    of the JSON encoder does.
    """
    tokens = sum(len(each.prompt_token_ids) for each in computed)
    data = (
        f'{{"object":"embedding","index":{i},"embedding":{_written(each.values, is_base64)}}}'
        for i, each in enumerate(computed)
    )
    head = f'{{"object":"list","model":{encode(model)},"data":['
    return f'{head}{",".join(data)}],"usage":{{"prompt_tokens":{tokens},"total_tokens":{tokens}}}}}'.encode()


def _written(values: np.ndarray, is_base64: bool) -> str:
    """An embedding in JSON."""
    if is_base64:
        return f'"{base64.b64encode(values.astype("<f4").tobytes()).decode()}"'
    return encode(values.tolist())
