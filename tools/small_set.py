"""Every kernel for GPUs once, on small inputs, against the oracle where it is attention: what compute-sanitizer runs.

PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python tools/small_set.py
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

import quire
from quire.bench.batches import Batch, random_batch, relative_error
from quire.definition import AttentionSpec

BF16 = torch.bfloat16
LAYERS: tuple[dict[str, Any], ...] = (
    {},
    {"window_left": 20, "logits_soft_cap": 5.0},
    {"kv_dtype": torch.float8_e4m3fn},
    {"pos_encoding": "ROPE_LLAMA"},
    {"batch_invariant": True},
)


def prefill(batch: Batch, invariant: bool) -> torch.Tensor:
    spec = batch.spec
    wrapper = quire.BatchPrefillWithPagedKVCacheWrapper(torch.empty(0, device="cuda"), batch_invariant=invariant)
    wrapper.plan(
        batch.qo.indptr.cuda(),
        batch.kv.indptr.cuda(),
        batch.kv.indices.cuda(),
        batch.kv.last_page_len.cuda(),
        spec.num_qo_heads,
        spec.num_kv_heads,
        spec.head_dim_qk,
        batch.kv.page_size,
        causal=True,
        q_data_type=spec.q_dtype,
        kv_data_type=spec.kv_dtype,
        window_left=spec.window_left,
        logits_soft_cap=spec.logits_soft_cap,
        pos_encoding_mode=spec.pos_encoding,
    )
    out = wrapper.run(batch.q.cuda(), (batch.k.cuda(), batch.v.cuda()))
    assert isinstance(out, torch.Tensor)
    return out


def attention() -> None:
    for changes in LAYERS:
        spec = AttentionSpec(num_qo_heads=8, num_kv_heads=2, head_dim_qk=64, q_dtype=BF16, **changes)
        for q_lens, kv_lens in (([1, 1, 1], [700, 1, 90]), ([1, 200, 33], [65, 300, 33])):
            batch = random_batch(spec, q_lens, kv_lens, 16)
            error = relative_error(prefill(batch, spec.batch_invariant).cpu(), batch.exact()[0])
            print(f"{changes} {q_lens}: {error:.1e}")
            assert error < 4e-3


def decode() -> None:
    """Requests that share programs, and programs that share one, with all ways that the Hopper family reads keys."""
    for dim, kv_dtype in ((64, BF16), (128, BF16), (128, torch.float8_e4m3fn)):
        spec = AttentionSpec(num_qo_heads=8, num_kv_heads=2, head_dim_qk=dim, q_dtype=BF16, kv_dtype=kv_dtype)
        for kv_lens in ([700, 1, 90], [9000]):
            batch = random_batch(spec, [1] * len(kv_lens), kv_lens, 16, device="cuda")
            wrapper = quire.BatchDecodeWithPagedKVCacheWrapper(torch.empty(0, device="cuda"))
            table = (batch.kv.indptr, batch.kv.indices, batch.kv.last_page_len)
            wrapper.plan(*table, 8, 2, dim, 16, q_data_type=BF16, kv_data_type=kv_dtype)
            out = wrapper.run(batch.q, (batch.k, batch.v))
            assert isinstance(out, torch.Tensor)
            error = relative_error(out, batch.exact()[0])
            print(f"{wrapper.backend} {dim} {kv_dtype} {kv_lens}: {error:.1e}")
            assert error < 4e-3


def latent() -> None:
    spec = AttentionSpec(num_qo_heads=80, num_kv_heads=1, head_dim_qk=576, head_dim_vo=512, q_dtype=BF16)
    for kv_lens in ([700, 1, 90], [9000]):
        batch = random_batch(spec, [1] * len(kv_lens), kv_lens, 16, device="cuda")
        batch = replace(batch, v=batch.k[..., :512])
        wrapper = quire.BatchMLAPagedAttentionWrapper(torch.empty(0, device="cuda"))
        table = (batch.qo.indptr, batch.kv.indptr, batch.kv.indices, batch.kv.lengths())
        wrapper.plan(*table, 80, 512, 64, 16, True, spec.sm_scale, BF16, BF16)
        out = wrapper.run(query=batch.q, kv_cache=batch.k.squeeze(2))
        assert isinstance(out, torch.Tensor)
        error = relative_error(out, batch.exact()[0])
        print(f"{wrapper.backend} latent {kv_lens}: {error:.1e}")
        assert error < 4e-3


def others() -> None:
    tokens = torch.arange(30, dtype=torch.int32, device="cuda")
    k_cache, v_cache = torch.zeros(2, 8, 16, 2, 64, dtype=BF16, device="cuda")
    key, value = torch.randn(2, 30, 2, 64, dtype=BF16, device="cuda")
    pages, indptr = torch.arange(8, dtype=torch.int32, device="cuda"), tokens[:2] * 8
    last = torch.full((1,), 16, dtype=torch.int32, device="cuda")
    quire.append_paged_kv_cache(key, value, tokens * 0, tokens, (k_cache, v_cache), pages, indptr, last)
    assert torch.equal(k_cache.flatten(0, 1)[:30], key)
    quire.apply_rope_pos_ids_inplace(key, value, tokens)
    states, sums = torch.randn(3, 5, 8, 64, device="cuda"), torch.randn(3, 5, 8, device="cuda")
    quire.merge_states(states, sums)
    quire.merge_state_in_place(states[0], sums[0], states[1], sums[1])
    quire.packbits(torch.rand(1000, device="cuda") < 0.5)
    quire.segment_packbits(torch.rand(30, device="cuda") < 0.5, tokens[[0, 13, 29]])


if __name__ == "__main__":
    torch.manual_seed(torch.seed() % (1 << 31))
    attention()
    decode()
    latent()
    others()
    torch.cuda.synchronize()
    print("done")
