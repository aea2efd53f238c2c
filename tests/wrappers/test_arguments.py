"""What every public call says of an argument that is no tensor, or one of another dtype, or that overlaps itself."""

from __future__ import annotations

import re
from inspect import signature

import numpy as np
import pytest
import torch
from torch import Tensor

import quire
from helpers.public_calls import F32, KV_HEADS, PAGE, PublicCall, all_calls, cache, decoder, ints, layer, rows, tables
from quire.cache import copy_blocks, swap_blocks
from quire.kernels import torch_internals
from quire.wrappers.planner import Planner


def other_dtype(x: Tensor) -> Tensor:
    """x in a dtype that no function accepts in its place."""
    return x.float() if x.dtype in (torch.int32, torch.int64, torch.bool) else x.to(torch.int32)


CHANGES = {
    "None": lambda x: None,
    "a list": lambda x: x.float().tolist(),
    "an array": lambda x: x.float().numpy(),
    "another dtype": other_dtype,
}


def changed(given, change):
    """Arguments in whose place something else stands: a tensor, or tensors in a pair or a list, first all, then one."""
    if isinstance(given, Tensor):
        return [change(given)]
    if isinstance(given, (tuple, list)) and all(isinstance(x, Tensor) for x in given):
        one = [type(given)([*given[:-1], change(given[-1])])]
        return [*one, type(given)(change(x) for x in given)]
    return []


def complaint(call: PublicCall, arguments) -> str | None:
    """What is wrong with how a call refuses them, if anything."""
    try:
        call.function(**arguments)
    except (ValueError, TypeError) as error:
        return str(error)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize("kind", CHANGES)
def test_calls_with_a_changed_tensor_refuse_it_by_name(kind):
    wrong = []
    for name, call in all_calls().items():
        for arg, given in call.given.items():
            if (kind == "None" and arg in call.optional) or (kind == "another dtype" and arg in call.any_dtype):
                continue
            called = rf"{arg}|{call.inner.get(arg, arg)}" if kind == "another dtype" else arg
            for bad in changed(given, CHANGES[kind]):
                said = complaint(call, {**call.given, arg: bad})
                refused = re.match(r"\w*Error: ", said) is None and said != "no error"
                if not refused or not re.search(rf"\b({called})\b", said):
                    wrong.append(f"{name}({arg}): {said}")
    assert not wrong, "\n" + "\n".join(wrong)


def test_calls_with_fitting_arguments_raise_nothing():
    for name, call in all_calls().items():
        try:
            call.function(**call.given)
        except Exception as error:
            raise AssertionError(name) from error


def message(call, *args, **options) -> str:
    with pytest.raises(ValueError, match=" ") as error:
        call(*args, **options)
    return str(error.value)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_empty_indptr_is_refused(device):
    """An empty indptr is refused even on a device whose contents nothing reads."""
    none = torch.empty(0, dtype=torch.int32, device=device)
    empty = torch.empty(0, device=device)
    decode = quire.BatchDecodeWithPagedKVCacheWrapper(empty)
    assert message(decode.plan, none, none, none, 4, 2, 64, 16).startswith(
        "indptr is empty: it must have batch size + 1"
    )
    prefill = quire.BatchPrefillWithPagedKVCacheWrapper(empty)
    assert "qo_indptr has 0 entries: 1 are needed" in message(prefill.plan, none, none, none, none, 4, 2, 64, 16)
    zero = torch.zeros(1, dtype=torch.int32, device=device)
    assert message(prefill.plan, zero, none, none, none, 4, 2, 64, 16).startswith("paged_kv_indptr is empty")
    ragged = quire.BatchPrefillWithRaggedKVCacheWrapper(empty)
    assert message(ragged.plan, none, none, 4, 2, 64).startswith("qo_indptr is empty")
    assert message(quire.get_seq_lens, none, none, 16).startswith("kv_indptr is empty")
    assert message(quire.get_batch_indices_positions, none, none, 3).startswith("append_indptr is empty")


@pytest.mark.parametrize("scale", ["1", [1.0], np.ones(1), 1j], ids=["text", "list", "array", "complex"])
def test_scale_that_is_no_number_nor_tensor_is_refused_by_name(scale):
    calls = all_calls()
    for name in ("decode.run", "prefill.run", "ragged.run", "batch.run", "single_prefill", "sparse.run", "pod.run"):
        call = calls[name]
        known = {x for x in signature(call.function).parameters if re.fullmatch(r"[qkv]_scale|scale_[qkv]|o_scale", x)}
        assert known
        for arg in known:
            said = complaint(call, {**call.given, arg: scale})
            assert re.search(rf"\b({arg}|{arg[-1]}_scale)\b = .* is not supported", said), (name, arg, said)
    given = {**calls["decode.run"].given, "k_scale": np.float32(0.5)}
    calls["decode.run"].function(**given)


def overlapping(x: Tensor):
    """X in memory that several elements share: the tokens, the heads, or a part of them."""
    storage = torch.zeros(x.numel(), dtype=x.dtype)
    steps = list(x.contiguous().stride())
    yield storage.as_strided(x.shape, [0, *steps[1:]])
    if x.ndim > 2:
        yield storage.as_strided(x.shape, [steps[0], 0, *steps[2:]])
    yield storage.as_strided(x.shape, [max(steps[0] - steps[-2], 1), *steps[1:]])


WRITTEN = {
    "decode.run": ("out", "lse"), "prefill.run": ("out", "lse"), "ragged.run": ("out", "lse"),
    "batch.run": ("out", "lse"), "mla.run": ("out", "lse"), "sparse.run": ("out", "lse"),
    "merge_state_in_place": ("v", "s"), "apply_rope_inplace": ("q", "k"), "apply_rope_pos_ids_inplace": ("q", "k"),
    "apply_rope_with_cos_sin_cache_inplace": ("query", "key"), "append_paged_mla_kv_cache": ("ckv_cache", "kpe_cache"),
    "swap_blocks": ("dst_kv_cache",),
}  # fmt: skip


def test_output_whose_elements_overlap_is_refused():
    calls = all_calls()
    for name, args in WRITTEN.items():
        call = calls[name]
        for arg in args:
            for bad in overlapping(call.given[arg]):
                said = complaint(call, {**call.given, arg: bad})
                assert re.search(rf"\b{arg} has strides \[.*\]: .* overlap", said), (name, arg, bad.stride(), said)
    for name, arg in (("append_paged_kv_cache", "paged_kv_cache"), ("store", "cache")):
        call, (k, v) = calls[name], cache("cpu")
        for bad in overlapping(k):
            for pair in ((bad, v), (k, bad)):
                assert "overlap" in complaint(call, {**call.given, arg: pair}), (name, bad.stride())


def test_run_into_a_strided_out_equals_run_into_a_contiguous_one():
    """Slices and transposes of larger memory, and single rows with whatever strides."""
    call = all_calls()["decode.run"]
    expected = call.function(**{**call.given, "out": None}).clone()
    spare = torch.empty(4, 9, 3, 40)
    for out in (spare[::2, 1:5, 1, :16], spare[:, :2, 2, 8:24].transpose(0, 1)):
        call.function(**{**call.given, "out": out})
        torch.testing.assert_close(out, expected)
    q = call.given["q"][:1]
    wrapper = quire.BatchDecodeWithPagedKVCacheWrapper(torch.empty(0))
    wrapper.plan(ints(0, 2), ints(2, 0), ints(3), **layer())
    out = torch.empty(4, 16)[None].as_strided((1, 4, 16), (0, 16, 1))
    wrapper.run(q, call.given["paged_kv_cache"], out=out)
    torch.testing.assert_close(out, wrapper.run(q, call.given["paged_kv_cache"]))


def test_append_with_a_repeated_sequence_is_refused():
    pool = quire.PagedKVCache(1, KV_HEADS, 16, PAGE, 4, data_type=F32)
    for _ in range(2):
        pool.begin_forward(2)
    key = rows(4, KV_HEADS, "cpu")
    before = pool.data.clone()
    assert "sequences = [1, 1] names sequence 1 twice" in message(pool.append, 0, key, key, [1, 1])
    assert torch.equal(pool.data, before)
    pool.append(0, key, key, [1, 0])


def test_copy_blocks_with_a_repeated_target_page_is_refused():
    caches = [rows(4, PAGE, "cpu")]
    before = caches[0].clone()
    for to in (torch.tensor([[0, 1], [2, 1]]), torch.tensor([[0, 3], [1, 2], [2, 3]])):
        assert f"src_to_dists goes to page {int(to[-1, 1])} more than once" in message(copy_blocks, caches, to)
        assert "src_to_dst goes to page" in message(swap_blocks, caches[0], caches[0], to)
    assert torch.equal(caches[0], before)


def test_repeated_run_with_a_wrong_argument_is_refused(monkeypatch):
    """What looks at a run before its checks leaves the wrong ones to these."""
    wrapper = decoder("cpu")
    monkeypatch.setattr(Planner, "_keeps_launches", lambda wrapper: True)
    monkeypatch.setattr(torch_internals, "current_device", lambda: None)
    q, pages = rows(2, 4, "cpu"), cache("cpu")
    wrapper.run(q, pages)
    for arg in ("out", "lse", "sinks"):
        for bad in ([1.0], np.ones(4), "x"):
            assert message(wrapper.run, q, pages, **{arg: bad}).startswith(f"{arg} is a ")
    for arg in ("q_scale", "k_scale", "v_scale"):
        for bad in ([1.0], np.ones(4), "x"):
            assert message(wrapper.run, q, pages, **{arg: bad}).startswith(f"{arg} = ")
    with pytest.raises(ValueError, match=r"paged_kv_cache is a tuple of Tensor, NoneType"):
        wrapper.run(q, (pages[0], None))


def test_graph_wrapper_with_a_wrong_table_is_refused_by_name():
    buffers = [torch.zeros(n, dtype=torch.int32) for n in (3, 8, 2)]
    wrapper = quire.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(torch.empty(0), *buffers)
    wrapper.plan(**tables("cpu"), **layer())
    for name, x in tables("cpu").items():
        for bad in (x.tolist(), x.numpy(), x.float(), None):
            assert message(wrapper.plan, **{**tables("cpu"), name: bad}, **layer()).startswith(f"{name} is ")
