"""Sampling of tokens from logits or probabilities, and what comes before and after it.

Names, parameters and meanings are those of `flashinfer.sampling`; `sample`, for the whole batch of an engine, is
Quire's own. Only `check_nan=True` waits for a device. Everything may be captured in CUDA graphs, in which
parameters can change between replays if they are tensors. docs/sampling.md says how tokens are chosen and what a seed
promises.

Tokens of equal probability are kept or dropped together: top-k keeps a token if fewer than k have a higher probability,
top-p if the probabilities above its own add up to less than p, min-p if its probability is at least min_p times the
highest. The most likely tokens are always kept, and tokens without probability are never drawn.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from quire.definition.checks import check
from quire.definition.tensors import check_optional, check_tensor, check_tensors
from quire.kernels.sampling import penalise_logits, report_logprobs, sample_rows, transform_rows, verify_drafts
from quire.wrappers.sampling_checks import INTS, check_rows, parameter, random_state

__all__ = [
    "Logprobs",
    "Penalties",
    "Sampled",
    "chain_speculative_sampling",
    "min_p_sampling_from_probs",
    "sample",
    "sampling_from_logits",
    "sampling_from_probs",
    "softmax",
    "token_logprobs",
    "top_k_mask_logits",
    "top_k_renorm_prob",
    "top_k_renorm_probs",
    "top_k_sampling_from_probs",
    "top_k_top_p_sampling_from_logits",
    "top_k_top_p_sampling_from_probs",
    "top_p_renorm_prob",
    "top_p_renorm_probs",
    "top_p_sampling_from_probs",
]


class Sampled(NamedTuple):
    """What `sample` returns.

    Attributes:
        tokens: int32 [rows]; 0 in rows that are not valid.
        valid: bool [rows]: False if a row has NaN or +inf, or only -inf.
        logprobs, top_tokens, top_logprobs: as in `Logprobs`; None if they were not requested.
    """

    tokens: Tensor
    valid: Tensor
    logprobs: Tensor | None = None
    top_tokens: Tensor | None = None
    top_logprobs: Tensor | None = None


class Logprobs(NamedTuple):
    """What `token_logprobs` returns.

    Attributes:
        logprobs: float32 [rows], of the tokens.
        top_tokens, top_logprobs: int32 and float32 [rows, num_logprobs], the most likely tokens in descending order,
            equal ones in the order of the vocabulary; -1 and -inf where no token is left.
    """

    logprobs: Tensor
    top_tokens: Tensor
    top_logprobs: Tensor


@dataclass(frozen=True)
class Penalties:
    """Penalties of tokens that occurred, from the lists of tokens that an engine keeps on the device.

    Attributes:
        tokens: int32 or int64 [slots, max_len], prompts followed by outputs, any strides with the last one 1.
        prompt_lens, lens: int32 or int64 [rows], the tokens of a row's prompt, and of its prompt and output together.
        slots: int32 or int64 [rows], each row's list; None: row i has list i. Rows whose list does not
            exist are not penalised.
        repetition: divides positive logits, and multiplies negative ones, of tokens in prompt or output.
        presence: subtracted from logits of tokens in the output.
        frequency: subtracted from logits of tokens in the output, once for each occurrence.
            Each is a number or a tensor with one per row.
    """

    tokens: Tensor
    prompt_lens: Tensor
    lens: Tensor
    slots: Tensor | None = None
    repetition: float | Tensor = 1.0
    presence: float | Tensor = 0.0
    frequency: float | Tensor = 0.0

    def apply(self, logits: Tensor) -> Tensor:
        """Penalised float32 logits [rows, vocab]; finite ones stay finite."""
        check_rows(logits, "logits")
        rows, device = len(logits), logits.device
        check_optional(tokens=self.tokens, prompt_lens=self.prompt_lens, lens=self.lens, slots=self.slots)
        shapes = {"tokens": (None, None), "prompt_lens": (rows,), "lens": (rows,), "slots": (rows,)}
        for name, shape in shapes.items():
            x = getattr(self, name)
            if x is not None:
                check(x.dtype in INTS, f"{name}.dtype", x.dtype, "torch.int32 or torch.int64")
                check_tensor(x, name, shape, x.dtype, device)
        names = ("repetition", "presence", "frequency")
        r, p, f = (parameter(getattr(self, name), name, rows, device) for name in names)
        check(r[1] > 0, "repetition", r[1], "a positive number")
        out = torch.empty(logits.shape, dtype=torch.float32, device=device)
        lists = self.tokens, self.slots, self.prompt_lens, self.lens
        penalise_logits(out, logits, *lists, r[0], p[0], f[0], r[1], p[1], f[1])
        return out


def _draw(
    x: Tensor,
    name: str,
    indices: Tensor | None,
    generator: torch.Generator | None,
    check_nan: bool,
    seed: int | Tensor | None,
    offset: int | Tensor | None,
    *,
    top_k: int | Tensor | None = None,
    top_p: float | Tensor = 1.0,
    min_p: float | Tensor = 0.0,
    order: str = "joint",
) -> tuple[Tensor, Tensor]:
    """Tokens, int32 or of indices' dtype, and valid."""
    check(order in ("top_k_first", "joint"), "filter_apply_order", order, "top_k_first or joint")
    check_rows(x, name)
    rows, device = len(x), x.device
    outputs = len(x)
    check_optional(indices=indices)
    if indices is not None:
        check(indices.dtype in INTS, "indices.dtype", indices.dtype, "torch.int32 or torch.int64")
        check_tensor(indices, "indices", (None,), indices.dtype, device)
        outputs = len(indices)
        if device.type == "cpu" and outputs and not torch.compiler.is_compiling():
            low, high = (int(i) for i in indices.aminmax())
            check(low >= 0 and high < rows, "indices", f"values from {low} to {high}", lambda: f"0 to {rows - 1}")
    if check_nan and bool(x.isnan().any()):
        raise ValueError(f"{name} contains NaN")
    if check_nan and name == "logits" and top_k is not None and not bool(x.amax(-1).isfinite().all()):
        raise ValueError("the softmax of logits contains NaN")
    k = (None, 0) if top_k is None else parameter(top_k, "top_k", rows, device, 1, whole=True)
    p, m = parameter(top_p, "top_p", rows, device, 0), parameter(min_p, "min_p", rows, device, 0)
    seeds, offsets, first, second = random_state(seed, offset, generator, outputs, device)
    tokens = torch.empty(outputs, dtype=torch.int32 if indices is None else indices.dtype, device=device)
    valid = torch.empty(outputs, dtype=torch.bool, device=device)
    tensors, values = (None, k[0], p[0], m[0], seeds, offsets), (1.0, int(k[1]), p[1], m[1], first, second)
    sample_rows(tokens, valid, x, indices, *tensors, *values, name == "logits", order == "joint", False)
    return tokens, valid


def softmax(logits: Tensor, temperature: float | Tensor | None = None, enable_pdl: bool | None = None) -> Tensor:
    """Probabilities of logits, divided by a temperature.

    Args:
        logits: float32, bfloat16 or float16 [rows, vocab], any strides with the last one 1.
        temperature: a number, a tensor with one per row, or None for 1. At 0, the most likely tokens share everything.
        enable_pdl: accepted, without effect.

    Returns:
        float32 [rows, vocab]; NaN in rows with NaN or +inf, or only -inf.

    Raises:
        ValueError: an argument that does not fit; in grad mode, logits that require grad.
    """
    check_rows(logits, "logits")
    temperatures = parameter(1.0 if temperature is None else temperature, "temperature", len(logits), logits.device, 0)
    out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    transform_rows(out, logits, temperatures[0], None, None, temperatures[1], 0, 1.0, "softmax")
    return out


def sampling_from_logits(
    logits: Tensor, indices: Tensor | None = None, deterministic: bool = True,
    generator: torch.Generator | None = None, check_nan: bool = False, seed: int | Tensor | None = None,
    offset: int | Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Draw tokens from the softmax of logits, float32, bfloat16 or float16 [rows, vocab]; see `sampling_from_probs`."""
    return _draw(logits, "logits", indices, generator, check_nan, seed, offset)[0]


def sampling_from_probs(
    probs: Tensor, indices: Tensor | None = None, deterministic: bool = True,
    generator: torch.Generator | None = None, check_nan: bool = False, seed: int | Tensor | None = None,
    offset: int | Tensor | None = None, return_valid: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Draw tokens from probabilities.

    Args:
        probs: float32, bfloat16 or float16 [rows, vocab], any strides with the last one 1. They need not sum to 1.
        indices: int32 or int64 [outputs], the row that each output is drawn from; None: its own. Parameters are given
            per row, seeds per output. On a GPU, an output whose row does not exist is not valid.
        deterministic: accepted; results are always deterministic.
        generator: draws the seed, on the device, if there is none; None: torch's default generator.
        check_nan: raise an error if there is a NaN, which waits for the device.
        seed, offset: an integer, or an int64 or uint64 tensor [1] or [outputs]. With a seed of its own, an output
            depends on its row, parameters, seed and offset alone, wherever it is in a batch. Outputs that share a seed
            draw different numbers. Calls with the same seed need different offsets, which count from 0 if None.
        return_valid: return (tokens, valid).

    Returns:
        Tokens, int32 or of indices' dtype [outputs]. With return_valid also bool [outputs]: False, and the token 0,
        where a row has NaN or inf, or no probability above 0.

    Raises:
        ValueError: an argument that does not fit; in grad mode, probs that require grad.
    """
    drawn = _draw(probs, "probs", indices, generator, check_nan, seed, offset)
    return drawn if return_valid else drawn[0]


def top_p_sampling_from_probs(
    probs: Tensor, top_p: float | Tensor, indices: Tensor | None = None, deterministic: bool = True,
    generator: torch.Generator | None = None, check_nan: bool = False, seed: int | Tensor | None = None,
    offset: int | Tensor | None = None, return_valid: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """`sampling_from_probs` of tokens for which the probabilities above their own add up to less than top_p.

    top_p: a number, or a tensor [rows]; from 1 on, all tokens are kept.
    """
    drawn = _draw(probs, "probs", indices, generator, check_nan, seed, offset, top_p=top_p)
    return drawn if return_valid else drawn[0]


def top_k_sampling_from_probs(
    probs: Tensor, top_k: int | Tensor, indices: Tensor | None = None, deterministic: bool = True,
    generator: torch.Generator | None = None, check_nan: bool = False, seed: int | Tensor | None = None,
    offset: int | Tensor | None = None, return_valid: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """`sampling_from_probs` of tokens for which fewer than top_k have a higher probability.

    top_k: an integer from 1 on, or an int32 or int64 tensor [rows], where less than 1 means all tokens.
    """
    drawn = _draw(probs, "probs", indices, generator, check_nan, seed, offset, top_k=top_k)
    return drawn if return_valid else drawn[0]


def min_p_sampling_from_probs(
    probs: Tensor, min_p: float | Tensor, indices: Tensor | None = None, deterministic: bool = True,
    generator: torch.Generator | None = None, check_nan: bool = False, seed: int | Tensor | None = None,
    offset: int | Tensor | None = None, return_valid: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """`sampling_from_probs` of the tokens at least min_p times as likely as the most likely.

    min_p: a number, or a floating-point tensor [rows].
    """
    drawn = _draw(probs, "probs", indices, generator, check_nan, seed, offset, min_p=min_p)
    return drawn if return_valid else drawn[0]


def top_k_top_p_sampling_from_probs(
    probs: Tensor, top_k: int | Tensor, top_p: float | Tensor, indices: Tensor | None = None,
    filter_apply_order: str = "top_k_first", deterministic: bool = True, generator: torch.Generator | None = None,
    check_nan: bool = False, seed: int | Tensor | None = None, offset: int | Tensor | None = None,
    return_valid: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """`sampling_from_probs` of the tokens that top-k and top-p keep.

    filter_apply_order: "top_k_first": top_p is a fraction of the probability that top-k keeps. "joint": of 1, as
    in `top_p_sampling_from_probs`. top_k and top_p: as there, and in `top_k_sampling_from_probs`.
    """
    filters = {"top_k": top_k, "top_p": top_p, "order": filter_apply_order}
    drawn = _draw(probs, "probs", indices, generator, check_nan, seed, offset, **filters)  # type: ignore[arg-type]
    return drawn if return_valid else drawn[0]


def top_k_top_p_sampling_from_logits(
    logits: Tensor, top_k: int | Tensor, top_p: float | Tensor, indices: Tensor | None = None,
    filter_apply_order: str = "top_k_first", deterministic: bool = True, generator: torch.Generator | None = None,
    check_nan: bool = False, seed: int | Tensor | None = None, offset: int | Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`top_k_top_p_sampling_from_probs` of the softmax of logits, which is not stored, and which check_nan checks."""
    filters = {"top_k": top_k, "top_p": top_p, "order": filter_apply_order}
    return _draw(logits, "logits", indices, generator, check_nan, seed, offset, **filters)[0]  # type: ignore[arg-type]


def top_p_renorm_probs(probs: Tensor, top_p: float | Tensor, is_deterministic: bool = False) -> Tensor:
    """Probabilities of the tokens that top-p keeps, divided by their sum; 0 for the others.

    Args:
        probs: float32, bfloat16 or float16 [rows, vocab], any strides with the last one 1.
        top_p: as in `top_p_sampling_from_probs`.
        is_deterministic: accepted; results are always deterministic.

    Returns:
        [rows, vocab], of probs' dtype.

    Raises:
        ValueError: an argument that does not fit; in grad mode, probs that require grad.
    """
    check_rows(probs, "probs")
    p, out = parameter(top_p, "top_p", len(probs), probs.device, 0), torch.empty_like(probs)
    transform_rows(out, probs, None, None, p[0], 1.0, 0, p[1], "probs")
    return out


def _top_k(x: Tensor, name: str, top_k: int | Tensor, kind: str) -> Tensor:
    check_rows(x, name)
    k, out = parameter(top_k, "top_k", len(x), x.device, 1, whole=True), torch.empty_like(x)
    transform_rows(out, x, None, k[0], None, 1.0, int(k[1]), 1.0, kind)
    return out


def top_k_renorm_probs(probs: Tensor, top_k: int | Tensor, is_deterministic: bool = False) -> Tensor:
    """`top_p_renorm_probs` with the tokens that top-k keeps; top_k: as in `top_k_sampling_from_probs`."""
    return _top_k(probs, "probs", top_k, "probs")


def top_k_mask_logits(logits: Tensor, top_k: int | Tensor) -> Tensor:
    """The logits of the tokens that top-k keeps, and -inf for the others, as a tensor of the logits' shape and dtype.
    Rows with NaN or +inf stay as they are. top_k: as in `top_k_sampling_from_probs`.
    """
    return _top_k(logits, "logits", top_k, "mask")


# FlashInfer's older names are kept for their callers.
top_p_renorm_prob, top_k_renorm_prob = top_p_renorm_probs, top_k_renorm_probs


def chain_speculative_sampling(
    draft_probs: Tensor, draft_token_ids: Tensor, target_probs: Tensor,
    maybe_output_accepted_token_num: Tensor | None = None, maybe_output_emitted_draft_token_num: Tensor | None = None,
    deterministic: bool = True, generator: torch.Generator | None = None, seed: int | Tensor | None = None,
    offset: int | Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Verify drafted tokens, so that tokens are distributed as the target's (Chen et al., 2023, arXiv:2302.01318).

    A drafted token is accepted with probability ``min(1, target / draft)``. The first one that is not is replaced by
    one drawn from ``max(target - draft, 0)``; if all are accepted, another one is drawn from the target.

    Args:
        draft_probs: float32, bfloat16 or float16 [rows, n, vocab], the distributions that the draft was drawn from.
        draft_token_ids: int32 or int64 [rows, n]. Tokens outside of the vocabulary are not accepted.
        target_probs: [rows, n + 1, vocab], of draft_probs' dtype.
        maybe_output_accepted_token_num, maybe_output_emitted_draft_token_num: int32 or int64 [rows], to which the
            counts are added; None: new ones.
        deterministic, generator, seed, offset: as in `sampling_from_probs`, with one seed per row.

    Returns:
        Tokens, of draft_token_ids' dtype [rows, n + 1], with -1 after the last; how many drafted tokens are accepted,
        if each is considered alone; how many of them are emitted, before the first that is not accepted. Where the
        target has NaN or no probability at all, the last token is -1, too.

    Raises:
        ValueError: an argument that does not fit; in grad mode, probabilities that require grad.
    """
    check_rows(draft_probs, "draft_probs", 3)
    check_rows(target_probs, "target_probs", 3)
    (rows, count, vocab), device = draft_probs.shape, draft_probs.device
    check_tensor(target_probs, "target_probs", (rows, count + 1, vocab), draft_probs.dtype, device)
    check_tensors(draft_token_ids=draft_token_ids)
    check(draft_token_ids.dtype in INTS, "draft_token_ids.dtype", draft_token_ids.dtype, "torch.int32 or torch.int64")
    check_tensor(draft_token_ids, "draft_token_ids", (rows, count), draft_token_ids.dtype, device)
    counts: list[Tensor] = []
    for name, given in (
        ("maybe_output_accepted_token_num", maybe_output_accepted_token_num),
        ("maybe_output_emitted_draft_token_num", maybe_output_emitted_draft_token_num),
    ):
        check_optional(**{name: given})
        if given is None:
            given = torch.zeros(rows, dtype=torch.int32, device=device)
        check(given.dtype in INTS, f"{name}.dtype", given.dtype, "torch.int32 or torch.int64")
        check_tensor(given, name, (rows,), given.dtype, device)
        counts.append(given)
    seeds, offsets, first, second = random_state(seed, offset, generator, rows, device)
    out = torch.empty(rows, count + 1, dtype=draft_token_ids.dtype, device=device)
    verify_drafts(out, counts[0], counts[1], draft_probs, draft_token_ids, target_probs, seeds, offsets, first, second)
    return out, counts[0], counts[1]


def sample(
    logits: Tensor,
    temperature: float | Tensor = 1.0,
    top_k: int | Tensor | None = None,
    top_p: float | Tensor = 1.0,
    min_p: float | Tensor = 0.0,
    *,
    seed: int | Tensor | None = None,
    offset: int | Tensor | None = None,
    generator: torch.Generator | None = None,
    penalties: Penalties | None = None,
    num_logprobs: int | None = None,
) -> Sampled:
    """The next tokens of an engine's batch: greedy and sampled rows, penalties and log-probabilities in one call.

    Penalties come first, then the temperature, top-k, top-p of what top-k keeps, and min-p. To capture the call in a
    CUDA graph, give what changes as tensors.

    Args:
        logits: float32, bfloat16 or float16 [rows, vocab], any strides with the last one 1.
        temperature: a number or a tensor [rows]; 0: the first of the most likely tokens.
        top_k: an integer from 1 on, an int32 or int64 tensor [rows], where less than 1 means all tokens, or None.
        top_p, min_p: a number or a tensor [rows].
        seed, offset, generator: as in `sampling_from_probs`, with one seed per row. An engine gives a request one seed,
            and as the offset the number of its tokens so far.
        penalties: see `Penalties`; None: none, which saves a copy of the logits.
        num_logprobs: how many of the most likely tokens to report, and log-probabilities, of the logits before
            penalties and temperature; 0: only those of the tokens drawn; None: none.

    Raises:
        ValueError: an argument that does not fit; in grad mode, logits that require grad.
    """
    check_rows(logits, "logits")
    rows, device = len(logits), logits.device
    t = parameter(temperature, "temperature", rows, device, 0)
    k = (None, 0) if top_k is None else parameter(top_k, "top_k", rows, device, 1, whole=True)
    p, m = parameter(top_p, "top_p", rows, device, 0), parameter(min_p, "min_p", rows, device, 0)
    seeds, offsets, first, second = random_state(seed, offset, generator, rows, device)
    tokens = torch.empty(rows, dtype=torch.int32, device=device)
    valid = torch.empty(rows, dtype=torch.bool, device=device)
    x = logits if penalties is None else penalties.apply(logits)
    tensors, values = (t[0], k[0], p[0], m[0], seeds, offsets), (t[1], int(k[1]), p[1], m[1], first, second)
    sample_rows(tokens, valid, x, None, *tensors, *values, True, False, True)
    return Sampled(tokens, valid, *(() if num_logprobs is None else token_logprobs(logits, tokens, num_logprobs)))


def token_logprobs(logits: Tensor, tokens: Tensor, num_logprobs: int = 0) -> Logprobs:
    """Log-probabilities of given tokens, and of the most likely ones.

    Args:
        logits: float32, bfloat16 or float16 [rows, vocab], any strides with the last one 1.
        tokens: int32 or int64 [rows], from 0 to vocab - 1.
        num_logprobs: how many of the most likely tokens to report.

    Raises:
        ValueError: an argument that does not fit; in grad mode, logits that require grad.
    """
    check_rows(logits, "logits")
    rows, vocab, device = *logits.shape, logits.device
    check_tensors(tokens=tokens)
    check(tokens.dtype in INTS, "tokens.dtype", tokens.dtype, "torch.int32 or torch.int64")
    check_tensor(tokens, "tokens", (rows,), tokens.dtype, device)
    fits = isinstance(num_logprobs, int) and 0 <= num_logprobs <= vocab
    check(fits, "num_logprobs", num_logprobs, lambda: f"0 to vocab = {vocab}")
    logprobs, top_logprobs = (logits.new_empty(s, dtype=torch.float32) for s in (rows, (rows, num_logprobs)))
    top_tokens = logits.new_empty((rows, num_logprobs), dtype=torch.int32)
    report_logprobs(logprobs, top_tokens, top_logprobs, logits, tokens)
    return Logprobs(logprobs, top_tokens, top_logprobs)
