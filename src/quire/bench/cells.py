"""Cells of a benchmark table: an operation, a layer and a batch, parsed from a name.

    decode gqa4 p16 8x2k            8 requests of 2,048 tokens, 32 query heads over 8 KV heads, pages of 16
    decode mha p1 fp16 16x4k        32 over 32 heads
    decode 28:4 d64 64 mixed 256k   28 query heads over 4, head_dim 64; 64 random lengths that add up to 262,144
    decode mla128 p64 64x4k         128 query heads over a latent cache of 512 + 64 elements (MLA)
    prefill ragged 8x512            8 prompts of 512, keys and values stored one after another
    prefill p16 4x512@16k           4 chunks of 512 new tokens at the end of 16,384
    prefill 60x1@4k+4x500@4k        a mixed step: 60 requests decode one token each, 4 add chunks of 500
    prefill 64x4@4k device          64 requests of 4 drafted tokens, all tables on the device

Defaults: gqa4, head_dim 128, pages of 16, bf16. Each property may be named at most once.

Prefill is planned as engines plan it, with `qo_indptr` on the host, from which `plan` learns the most query tokens of a
request, and page tables on the device. The word `device` puts `qo_indptr` on the device, too: `plan`, which never waits
for the device, then has no lengths. Tables of decode and of MLA are on the device in any case.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import torch

from quire.bench.batches import Batch, random_batch
from quire.definition.spec import AttentionSpec, attention_spec

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp8": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
}
# A group is a number of requests, and the new tokens and the keys of each.
Group = tuple[int, int, int]
_HEADS = {"mha": (32, 32), "gqa4": (32, 8), "gqa8": (64, 8)}


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell.

    Attributes:
        batch, q_len, kv_len: requests, and the new tokens and the keys of each; of `mixed` lengths, kv_len counts the
            keys of all requests together.
        more: further groups of requests, of other lengths.
        device_tables: whether qo_indptr of prefill is on the device.
    """

    operation: str
    batch: int
    kv_len: int
    q_len: int = 1
    num_qo_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 16
    dtype: str = "bf16"
    latent: bool = False
    mixed: bool = False
    ragged: bool = False
    more: tuple[Group, ...] = ()
    device_tables: bool = False

    @classmethod
    def parse(cls, text: str) -> Cell:
        """The cell that a name describes.

        Raises:
            ValueError: naming the word that is unknown or repeated, or what is impossible.
        """
        words = text.split()
        if not words or words[0] not in ("decode", "prefill"):
            raise ValueError(f"cell {text!r}: it must begin with decode or prefill")
        values: dict[str, Any] = {}
        for word in words[1:]:
            found = _fields(word, "batch" in values)
            if found is None:
                raise ValueError(f"cell {text!r}: {word!r} is not understood")
            if values.keys() & found.keys():
                raise ValueError(f"cell {text!r}: {word!r} repeats or contradicts a word before it")
            values |= found
        chunk = values.pop("q_len", None)
        if not values.get("batch") or not values.get("kv_len") or values.get("mixed", False) != (chunk is None):
            raise ValueError(f"cell {text!r}: how many requests, and how long? (8x2k, 64 mixed 256k)")
        if words[0] == "prefill" and chunk is not None:
            values["q_len"] = chunk
        try:
            cell = cls(words[0], **values)
            cell._check(chunk)
            # AttentionSpec validates heads and sizes.
            cell.spec  # noqa: B018
        except ValueError as error:
            raise ValueError(f"cell {text!r}: {error}") from None
        return cell

    def _check(self, chunk: int | None) -> None:
        """Refuse impossible combinations; `chunk` is the 512 of 4x512@16k, and None for mixed lengths."""
        if self.latent and self.ragged:
            raise ValueError("a latent cache is in pages")
        if self.operation == "prefill" and chunk is None:
            raise ValueError("mixed lengths are those of requests that decode")
        if self.operation == "decode" and chunk not in (None, self.kv_len):
            raise ValueError("a chunk of new tokens @ all of them is a prefill")
        if self.operation == "decode" and self.more:
            raise ValueError("requests of several kinds are a prefill")
        if self.device_tables and (self.operation == "decode" or self.latent):
            raise ValueError("tables of decode and of MLA are on the device in any case")
        for batch, q_len, kv_len in self.groups:
            if batch < 1:
                raise ValueError(f"{batch} requests: there must be one")
            if not 1 <= q_len <= kv_len:
                raise ValueError(f"{q_len} new tokens of {kv_len}: there must be one, and no more than all")
        if self.mixed and self.kv_len < self.batch:
            raise ValueError(f"{self.kv_len} tokens are too few for {self.batch} requests")
        for name, value in (("tokens", self.tokens), ("page_size", self.page_size)):
            if not 1 <= value < 2**31:
                raise ValueError(f"{name} = {value}: it must be positive, and below 2**31")

    @property
    def groups(self) -> tuple[Group, ...]:
        """All groups of requests, in their order in the batch."""
        return ((self.batch, self.q_len, self.kv_len), *self.more)

    @property
    def whole(self) -> bool:
        """Whether all requests are whole prompts of one length, as attention over dense tensors needs them."""
        return self.operation == "prefill" and not self.more and self.q_len == self.kv_len

    @property
    def tokens(self) -> int:
        """Tokens of all requests together."""
        return self.kv_len if self.mixed else sum(batch * kv_len for batch, _, kv_len in self.groups)

    @property
    def q_lens(self) -> list[int]:
        """New tokens of each request."""
        return [q_len for batch, q_len, _ in self.groups for _ in range(batch)]

    @property
    def kv_lens(self) -> list[int]:
        """Key tokens of each request; mixed lengths are random, lognormal, and add up to `kv_len`."""
        if not self.mixed:
            return [kv_len for batch, _, kv_len in self.groups for _ in range(batch)]
        shares = torch.distributions.LogNormal(0.0, 1.0).sample((self.batch,))
        lengths = (shares / shares.sum() * (self.kv_len - self.batch)).long() + 1
        lengths[lengths.argmax()] += self.kv_len - lengths.sum()
        return lengths.tolist()

    @property
    def spec(self) -> AttentionSpec:
        """The cell's attention layer."""
        kv_dtype = DTYPES[self.dtype]
        return attention_spec(
            num_qo_heads=self.num_qo_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim_qk=self.head_dim,
            head_dim_vo=512 if self.latent else self.head_dim,
            q_dtype=kv_dtype if kv_dtype.itemsize > 1 else torch.bfloat16,
            kv_dtype=kv_dtype,
        )

    def make(self, device: torch.device | str = "cpu") -> Batch:
        """A random batch for the cell."""
        batch = random_batch(self.spec, self.q_lens, self.kv_lens, self.page_size, device=device)
        return replace(batch, v=batch.k[..., :512]) if self.latent else batch

    def kv_bytes(self, batch: Batch) -> int:
        """Bytes of K and V that attention must read once."""
        spec = batch.spec
        elements = spec.head_dim_qk if self.latent else spec.head_dim_qk + spec.head_dim_vo
        count = int(batch.kv.lengths().sum()) * spec.num_kv_heads * elements
        return count * spec.kv_dtype.itemsize

    def flops(self, batch: Batch) -> int:
        """Floating-point operations of both products under a causal mask, two per multiply-add."""
        q_lens, kv_lens = batch.qo.lengths().long(), batch.kv.lengths().long()
        pairs = int((q_lens * (kv_lens - q_lens) + q_lens * (q_lens + 1) // 2).sum())
        return 2 * batch.spec.num_qo_heads * (batch.spec.head_dim_qk + batch.spec.head_dim_vo) * pairs


def _fields(word: str, has_batch: bool) -> dict[str, Any] | None:
    """The fields of a cell that a word of its name sets; None if the word is unknown.

    The first number without letters counts requests, the second one tokens.
    """
    if word in _HEADS:
        return {"num_qo_heads": _HEADS[word][0], "num_kv_heads": _HEADS[word][1]}
    if word in DTYPES:
        return {"dtype": word}
    if word in ("ragged", "mixed"):
        return {word: True}
    if word == "device":
        return {"device_tables": True}
    if found := re.fullmatch(r"(\d+):(\d+)", word):
        return {"num_qo_heads": int(found[1]), "num_kv_heads": int(found[2])}
    if found := re.fullmatch(r"mla(\d+)", word):
        return {"num_qo_heads": int(found[1]), "num_kv_heads": 1, "head_dim": 576, "latent": True}
    if found := re.fullmatch(r"([dp])(\d+)", word):
        return {"head_dim" if found[1] == "d" else "page_size": int(found[2])}
    groups = [_group(part) for part in word.split("+")]
    if None not in groups:
        (batch, q_len, kv_len), *more = groups  # type: ignore[misc]
        return {"batch": batch, "q_len": q_len, "kv_len": kv_len} | ({"more": tuple(more)} if more else {})
    if re.fullmatch(r"\d+k?", word):
        return {"kv_len" if has_batch else "batch": _tokens(word)}
    return None


def _group(text: str) -> Group | None:
    """The requests that 4x512@16k or 8x2k counts; None for anything else."""
    found = re.fullmatch(r"(\d+)x(\d+k?)(?:@(\d+k?))?", text)
    return (int(found[1]), _tokens(found[2]), _tokens(found[3] or found[2])) if found else None


def _tokens(text: str) -> int:
    return int(text[:-1]) * 1024 if text.endswith("k") else int(text)
