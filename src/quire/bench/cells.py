"""What is timed: cells of a table, named in a small language.

    decode gqa4 p16 8x2k            8 requests of 2,048 tokens, 32 query heads over 8 KV heads, pages of 16
    decode mha p1 fp16 16x4k        32 over 32 heads
    decode 28:4 d64 64 mixed 256k   28 query heads over 4, head_dim 64; 64 random lengths that add up to 262,144
    decode mla128 p64 64x4k         128 query heads over a latent cache of 512 + 64 elements (MLA)
    prefill ragged 8x512            8 prompts of 512, keys and values stored one after another
    prefill p16 4x512@16k           4 chunks of 512 new tokens at the end of 16,384

Defaults: gqa4, head_dim 128, pages of 16, bf16.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

import torch

from quire.attention.spec import AttentionSpec
from quire.bench.batches import Batch, random_batch

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp8": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
}
_HEADS = {"mha": (32, 32), "gqa4": (32, 8), "gqa8": (64, 8)}


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell: an operation, a layer's shape and a batch."""

    operation: str
    batch: int
    kv_len: int  # of a request; for mixed lengths, of all
    q_len: int = 1
    num_qo_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 16
    dtype: str = "bf16"
    latent: bool = False
    mixed: bool = False
    ragged: bool = False
    shape: str = field(default="", compare=False)  # the words for batch and length

    @classmethod
    def parse(cls, text: str) -> Cell:
        """A cell from its name; ValueError says what is not understood."""
        words = text.split()
        if not words or words[0] not in ("decode", "prefill"):
            raise ValueError(f"cell {text!r}: it must begin with decode or prefill")
        cell = cls(words[0], 0, 0)
        for word in words[1:]:
            cell = cell._with(word, text)
        if cell.latent and (cell.ragged or cell.num_kv_heads != 1 or cell.head_dim != 576):
            raise ValueError(f"cell {text!r}: a latent cache is in pages, and has one head of 512 + 64 elements")
        if not cell.batch or not cell.kv_len:
            raise ValueError(f"cell {text!r}: how many requests, and how long? (8x2k, 64 mixed 256k)")
        return cell

    @property
    def tokens(self) -> int:
        """Tokens of all requests together."""
        return self.kv_len if self.mixed else self.batch * self.kv_len

    def _with(self, word: str, text: str) -> Cell:
        """This cell with one more word of its name."""
        if word in _HEADS:
            return replace(self, num_qo_heads=_HEADS[word][0], num_kv_heads=_HEADS[word][1])
        if word in DTYPES:
            return replace(self, dtype=word)
        if word == "ragged":
            return replace(self, ragged=True)
        if found := re.fullmatch(r"(\d+):(\d+)", word):
            return replace(self, num_qo_heads=int(found[1]), num_kv_heads=int(found[2]))
        if found := re.fullmatch(r"mla(\d+)", word):
            return replace(self, num_qo_heads=int(found[1]), num_kv_heads=1, head_dim=576, latent=True)
        if found := re.fullmatch(r"d(\d+)", word):
            return replace(self, head_dim=int(found[1]))
        if found := re.fullmatch(r"p(\d+)", word):
            return replace(self, page_size=int(found[1]))
        sized = replace(self, shape=f"{self.shape} {word}".strip())
        if word == "mixed":
            return replace(sized, mixed=True)
        if found := re.fullmatch(r"(\d+)x(\d+k?)(?:@(\d+k?))?", word):
            length = _tokens(found[2])
            total = _tokens(found[3]) if found[3] else length
            return replace(sized, batch=int(found[1]), q_len=length if self.operation == "prefill" else 1, kv_len=total)
        if found := re.fullmatch(r"\d+k?", word):
            return replace(sized, kv_len=_tokens(word)) if self.batch else replace(sized, batch=_tokens(word))
        raise ValueError(f"cell {text!r}: {word!r} is not understood")

    @property
    def kv_lens(self) -> list[int]:
        if not self.mixed:
            return [self.kv_len] * self.batch
        shares = torch.distributions.LogNormal(0.0, 1.0).sample((self.batch,))
        lengths = (shares / shares.sum() * self.kv_len).long().clamp(min=1)
        lengths[lengths.argmax()] += self.kv_len - lengths.sum()
        return lengths.tolist()

    def make(self, device: torch.device | str = "cpu") -> Batch:
        """Random data for the cell."""
        kv_dtype = DTYPES[self.dtype]
        spec = AttentionSpec(
            num_qo_heads=self.num_qo_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim_qk=self.head_dim,
            head_dim_vo=512 if self.latent else self.head_dim,
            q_dtype=kv_dtype if kv_dtype.itemsize > 1 else torch.bfloat16,
            kv_dtype=kv_dtype,
        )
        batch = random_batch(spec, [self.q_len] * self.batch, self.kv_lens, self.page_size, device=device)
        return replace(batch, v=batch.k[..., :512]) if self.latent else batch

    def kv_bytes(self, batch: Batch) -> int:
        """Bytes of K and V that attention has to read."""
        spec = batch.spec
        each = spec.head_dim_qk if self.latent else spec.head_dim_qk + spec.head_dim_vo
        numbers = int(batch.kv.lengths().sum()) * spec.num_kv_heads * each
        return numbers * spec.kv_dtype.itemsize

    def flops(self, batch: Batch) -> int:
        """4 * heads * head_dim for each (query, visible key)."""
        q_lens, kv_lens = batch.qo.lengths().long(), batch.kv.lengths().long()
        pairs = int((q_lens * (kv_lens - q_lens) + q_lens * (q_lens + 1) // 2).sum())
        return 2 * batch.spec.num_qo_heads * (batch.spec.head_dim_qk + batch.spec.head_dim_vo) * pairs


def _tokens(text: str) -> int:
    return int(text[:-1]) * 1024 if text.endswith("k") else int(text)
