"""Checks of a runner before requests arrive: its logits are those of Transformers, whatever chunks and other requests a
step has. Models that would run wrongly are refused.
"""

from __future__ import annotations

import warnings
from array import array
from collections.abc import Sequence
from itertools import takewhile

import torch
from torch import Tensor

from quire.engine.batch import Chunk
from quire.engine.params import LIBRARY_DEFAULTS, SamplingParams
from quire.engine.probe import check_positions
from quire.engine.request import Request
from quire.engine.runner import Runner
from quire.engine.sampler import Sampler

# A part of a request that a step computes: its index, and the first and the last token, which is not included.
_Part = tuple[int, int, int]
# Errors of logits that rounding may cause: that of 16-bit or 8-bit elements in many layers, and that of 16-bit elements
# in one to six layers, which was 0.01 where it was measured.
ROUNDING, ROUNDING_OF_FEW_LAYERS = 0.2, 0.05


def check_runner(runner: Runner, random_weights: bool = False) -> None:
    """Compute a few tokens of two requests in shared steps, in chunks and one by one, and compare the logits with those
    of Transformers' attention.

    Args:
        runner: computes the steps.
        random_weights: whether the model's weights are random. Deep mixtures of experts with such weights amplify the
            rounding of 16-bit elements until logits differ by half of their size from those of the same code in
            float32, so that differences are warned of, unless elements have 32 bits.

    Raises:
        ValueError: no kernel family, or not the requested one, supports a layer; or the logits of a request depend on
            chunks or on other requests, in their bits if they must not.
    """
    # Rounding to 16 bits routes a token to other experts where two are nearly as good, and all tokens after it see
    # that: up to 1.5% of random models differ for given tokens. A wrong model is wrong for any tokens.
    model, attempts = runner.model, 1 if runner.kv_dtype == torch.float32 else 5
    reasons = list(takewhile(bool, (_difference(runner, seed) for seed in range(attempts))))
    if len(reasons) == attempts:
        reason = reasons[0]
        if runner.kv_dtype.itemsize == 1:
            reason += ", or its keys and values do not fit an fp8 cache with these scales (`quire calibrate`)"
        message = f"its logits are not those of Transformers: {reason}"
        if not random_weights or attempts == 1:
            raise ValueError(f"{model.folder} can't be run: {message}")
        message = f"{model.folder} has random weights, which may amplify rounding: {message}"
        warnings.warn(message, RuntimeWarning, stacklevel=4)
    check_positions(model)
    if runner.adapters is not None and _adapters_differ(runner):
        what = "logits in a step with adapters differ from those in a step without, for a request that has none"
        raise ValueError(f"{model.folder} can't be run with max_adapters: {what}")
    if runner.batch_invariant and _varies(runner):
        size, threads = f"{model.width} tokens", f"{torch.get_num_threads()} threads"
        what = f"its logits depend on the other requests of a step, of {size} and with {threads}"
        raise ValueError(f"{model.folder} can't be run with batch_invariant: {what}")


def profile(runner: Runner, num_tokens: int, num_seqs: int) -> None:
    """Compute a step of the largest size: `num_tokens` tokens of `num_seqs` requests that all sample, or fewer if the
    cache has no room for them.
    """
    num_seqs = max(1, min(num_seqs, num_tokens, runner.num_pages))
    pages = runner.num_pages // num_seqs
    length = min(-(-num_tokens // num_seqs), runner.model.context, pages * runner.page_size)
    pages = -(-length // runner.page_size)
    chunks = [probe_chunk(runner, [0] * length, b * pages, 0, length) for b in range(num_seqs)]
    if runner.adapters is not None:
        _give_slots(chunks)
    logits = runner.run(chunks)
    params = SamplingParams(temperature=1.0).over(LIBRARY_DEFAULTS)
    requests = [_probe_request([0], params) for _ in range(num_seqs)]
    Sampler(runner.model.device, num_seqs).launch(logits, requests).wait()


def probe_chunk(runner: Runner, tokens: list[int], first_page: int, start: int, end: int) -> Chunk:
    """Tokens start to end of a request that has the pages from `first_page` on."""
    request = _probe_request(tokens[:end], SamplingParams())
    request.pages = array("i", range(first_page, first_page + -(-end // runner.page_size)))
    return Chunk(request, start, end - start, samples=True)


def _give_slots(chunks: Sequence[Chunk]) -> None:
    """Let chunks be computed as if their requests had an adapter, which adds nothing as long as none has been copied to
    the device.
    """
    for chunk in chunks:
        chunk.request.slot = 0


def _adapters_differ(runner: Runner) -> bool:
    """Whether the logits of a request differ between a step without adapters and a step with an adapter that adds
    nothing.
    """
    size = min(5, runner.model.context, runner.num_pages * runner.page_size)
    first = runner.model.vocab_size // 3
    tokens = [(first + 11 * i * i) % runner.model.vocab_size for i in range(size)]
    plain, adapted = (probe_chunk(runner, tokens, 0, 0, size) for _ in range(2))
    expected = runner.run([plain])
    _give_slots([adapted])
    return logits_differ(runner.run([adapted]), expected, exact=runner.kv_dtype == torch.float32)


def _probe_request(tokens: list[int], params: SamplingParams) -> Request:
    return Request(tokens, params, None, frozenset(), lambda update: None)


def _difference(runner: Runner, seed: int) -> str:
    """Why logits differ from Transformers' for tokens that all depend on `seed`; "" if they do not."""
    model, batch = runner.model, min(2, runner.num_pages)
    pages = runner.num_pages // batch
    n = min(7, model.context, pages * runner.page_size)
    # Special tokens have the lowest or the highest ids.
    first = model.vocab_size // 3
    rows = [[first + (11 - 2 * seed) * i * i + 5 * seed + 3 * b for i in range(n)] for b in range(batch)]
    tokens = [[token % model.vocab_size for token in row] for row in rows]
    # This raises if no kernel family supports a layer.
    runner.run([probe_chunk(runner, tokens[0], 0, 0, 1)])
    expected = model.transformers_logits(torch.tensor(tokens, device=model.device))

    def differ(steps: Sequence[Sequence[_Part]]) -> list[bool]:
        """For each part of the steps, whether the logits of its last token differ."""
        differing = []
        for step in filter(None, steps):
            chunks = [probe_chunk(runner, tokens[b], b * pages, start, end) for b, start, end in step]
            differing += [
                logits_differ(row, expected[b, end - 1], exact=runner.kv_dtype == torch.float32)
                for row, (b, _, end) in zip(runner.run(chunks), step, strict=True)
            ]
        return differing

    differing = differ(_steps(n, batch))
    # Rounding may route a token or two to other experts.
    if sum(differing) <= len(differing) // 3:
        return ""
    whole = [(b, 0, n) for b in range(batch)]
    if any(differ([[request] for request in whole])):
        return "its attention is not what it asks the attention function for"
    if any(differ([whole])):
        return "requests of a step change each other, since it ignores position_ids or mixes neighbouring tokens"
    return "a request that is computed in several steps does not become what it is in one"


def _steps(n: int, batch: int) -> list[list[_Part]]:
    """Three steps that compute n tokens of one or two requests. Of n = 7 tokens, request 0 computes 3, 2 and 2; request
    1 computes 5, 1 and 1, that is, it decodes. Request 1 comes first in the second step.
    """
    cuts = [(0, 0), (-(-3 * n // 7), max(1, n - 2)), (-(-5 * n // 7), max(1, n - 1)), (n, n)]
    orders = [range(batch), range(batch)[::-1], range(batch)]
    return [
        [(b, start[b], end[b]) for b in order if start[b] < end[b]]
        for start, end, order in zip(cuts, cuts[1:], orders, strict=False)
    ]


def _varies(runner: Runner) -> bool:
    """Whether the logits of a request depend, by a bit, on a request before it in the step, or on its chunks."""
    pages, width = runner.num_pages // 2, runner.model.width or 0
    vocab = runner.model.vocab_size
    longest = min(runner.model.context, pages * runner.page_size)
    n = min(17, longest, width // 2)
    if n < 2:
        return False
    # How many tokens come before the request in the step: few, and so many that it is in the middle or at the end.
    before = {min(count, longest, width - n) for count in (1, n // 2, n, width // 3, width // 2, width)}
    tokens = [[(vocab // 3 + 7 * i * i + b) % vocab for i in range(max(before))] for b in range(2)]
    whole = probe_chunk(runner, tokens[0][:n], 0, 0, n)
    alone = runner.run([whole])
    others = [probe_chunk(runner, tokens[1], pages, 0, count) for count in before]
    found = [runner.run([other, whole])[1:] for other in others]
    runner.run([probe_chunk(runner, tokens[0], 0, 0, n - 1)])
    found.append(runner.run([probe_chunk(runner, tokens[0], 0, n - 1, n)]))
    return not all(torch.equal(alone.nan_to_num(), logits.nan_to_num()) for logits in found)


def logits_differ(logits: Tensor, expected: Tensor, exact: bool, rounding: float = ROUNDING) -> bool:
    """Whether logits differ from Transformers' by more than the part `rounding` of their norm, or 1e-3 if `exact`;
    False if Transformers' are not finite.
    """
    expected = expected.float()
    error, size = (logits.float() - expected).norm(), (expected - expected.mean()).norm()
    return bool(expected.isfinite().all()) and not bool(error <= (1e-3 if exact else rounding) * size)
