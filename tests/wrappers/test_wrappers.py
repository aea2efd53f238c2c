"""Arguments and attributes of wrappers: layers given again, no window as None, equal arguments, captured runs."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import quire as flashinfer
from quire.bench.batches import random_batch, relative_error
from quire.definition import AttentionSpec, PageTable, RaggedLayout, attention_spec, oracle
from quire.kernels import registry
from quire.wrappers.base import AttentionWrapper

F32 = torch.float32
HEADS = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim_qk": 64}


class Decode:
    """A wrapper of decode, its batch, and what it should compute."""

    q_lens = (1, 1, 1)
    fixed = {}  # noqa: RUF012
    make = flashinfer.BatchDecodeWithPagedKVCacheWrapper

    def __init__(self):
        self.spec = attention_spec(**HEADS, q_dtype=F32, **self.fixed)
        self.batch = random_batch(self.spec, self.q_lens, [30, 7, 40], 16)
        self.wrapper = self.make(torch.empty(0))

    @property
    def tensors(self):
        return self.batch.q, (self.batch.k, self.batch.v)

    def tables(self):
        return self.batch.kv.indptr, self.batch.kv.indices, self.batch.kv.last_page_len

    def plan(self, **layer):
        given = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 64, "page_size": 16, "q_data_type": F32}
        self.wrapper.plan(*self.tables(), **{**given, **self.fixed, **layer})

    def close(self, out, **layer):
        batch = self.batch
        exact, _ = oracle.attend_batch(batch.q, batch.k, batch.v, batch.qo, batch.kv, self.spec.replace(**layer))
        assert relative_error(out, exact) < 2e-6


class Prefill(Decode):
    q_lens = (5, 1, 40)
    fixed = {"causal": True}  # noqa: RUF012
    make = flashinfer.BatchPrefillWithPagedKVCacheWrapper

    def tables(self):
        return self.batch.qo.indptr, *super().tables()

    def plan(self, **layer):
        layer = {("head_dim_qk" if name == "head_dim" else name): x for name, x in layer.items()}
        given = {**HEADS, "page_size": 16, "q_data_type": F32}
        self.wrapper.plan(*self.tables(), **{**given, **self.fixed, **layer})


class Ragged(Prefill):
    q_lens = (30, 7, 40)
    make = flashinfer.BatchPrefillWithRaggedKVCacheWrapper

    def __init__(self):
        super().__init__()
        self.rows = RaggedLayout(self.batch.qo.indptr)
        self.k, self.v = torch.randn(2, len(self.batch.q), 2, 64)

    @property
    def tensors(self):
        return self.batch.q, self.k, self.v

    def plan(self, **layer):
        layer = {("head_dim_qk" if name == "head_dim" else name): x for name, x in layer.items()}
        given = {**HEADS, "q_data_type": F32, **self.fixed, **layer}
        self.wrapper.plan(self.rows.indptr, self.rows.indptr, **given)

    def close(self, out, **layer):
        table, pages = PageTable.from_ragged(self.rows, len(self.k)), (self.k[:, None], self.v[:, None])
        exact, _ = oracle.attend_batch(self.batch.q, *pages, self.rows, table, self.spec.replace(**layer))
        assert relative_error(out, exact) < 2e-6


KINDS = pytest.mark.parametrize("kind", [Decode, Prefill, Ragged])
NAMES = ("causal", "window_left", "logits_soft_cap", "sm_scale", "pos_encoding_mode", "rope_scale", "rope_theta")


def attributes(wrapper):
    return {name: getattr(wrapper, f"_{name}") for name in NAMES}


@KINDS
def test_run_with_return_lse_by_position_returns_the_lse(kind):
    case = kind()
    case.plan()
    out, lse = case.wrapper.run(*case.tensors, 1.0, 1.0, 1.0, True)
    case.close(out)
    assert torch.equal(lse, case.wrapper.run(*case.tensors, return_lse=True)[1])


@KINDS
def test_wrapper_attributes_after_forward_are_those_of_the_last_layer(kind):
    """Engines read them where FlashInfer keeps what was planned, and the deprecated forward gives it again."""
    case = kind()
    case.plan(window_left=9, logits_soft_cap=4.0, sm_scale=0.25)
    decodes = kind is Decode
    planned = {
        "causal": True, "window_left": 9, "logits_soft_cap": 4.0, "sm_scale": 0.25, "pos_encoding_mode": "NONE",
        "rope_scale": 1.0, "rope_theta": 1e4,
    }  # fmt: skip
    assert attributes(case.wrapper) == planned
    neutral = {"causal": decodes, "window_left": -1, "logits_soft_cap": 0.0, "sm_scale": 1 / math.sqrt(64)}
    given = {"window_left": 3, "sm_scale": 0.5, "pos_encoding_mode": "ROPE_LLAMA", "rope_theta": 500.0}
    for options in ({}, {**given, "rope_scale": 2.0}, {"logits_soft_cap": 2.0}, {"window_left": None}):
        options = options if decodes or not options else {"causal": True, **options}
        expected = {**planned, **neutral, **{name: x for name, x in options.items() if x is not None}}
        layer = {("pos_encoding" if name == "pos_encoding_mode" else name): x for name, x in expected.items()}
        case.close(case.wrapper.forward(*case.tensors, **options), **layer)
        assert attributes(case.wrapper) == expected
        case.close(case.wrapper.run(*case.tensors), **layer)  # as FlashInfer's, later runs are of that layer
    case.plan(window_left=9, logits_soft_cap=4.0, sm_scale=0.25)
    assert attributes(case.wrapper) == planned


@KINDS
def test_forward_with_the_planned_layer_keeps_the_plan(kind):
    case = kind()
    case.plan(window_left=5)
    plan = case.wrapper.planned
    case.wrapper.forward(*case.tensors, **case.fixed, window_left=5)
    assert case.wrapper.planned is plan
    case.wrapper.forward(*case.tensors, **case.fixed, window_left=6)
    assert case.wrapper.planned is not plan


@KINDS
def test_window_of_none_is_no_window(kind):
    """None means no window, as models' sliding_window does, even after a layer that had one."""
    case = kind()
    for window in (None, 4, None):
        case.plan(window_left=window)
        case.close(case.wrapper.run(*case.tensors), window_left=-1 if window is None else window)
        case.close(case.wrapper.run(*case.tensors, window_left=None), window_left=-1 if window is None else window)
        assert case.wrapper._window_left == (-1 if window is None else window)
        case.close(case.wrapper.forward(*case.tensors, **case.fixed, window_left=None))


def test_window_of_none_in_other_operations_is_no_window():
    case = Decode()
    case.plan(window_left=None, shared_prefix=True)
    flashinfer.fast_decode_plan(
        case.wrapper, *case.tables(), 4, 2, 64, 16, window_left=None, q_data_type=F32, kv_data_type=F32
    )
    case.close(case.wrapper.run(*case.tensors))
    q, k, v = torch.randn(5, 4, 64), *torch.randn(2, 9, 2, 64)
    for causal in (True, False):
        given = {"causal": causal, "return_lse": True}
        every = flashinfer.single_prefill_with_kv_cache(q, k, v, **given)
        torch.testing.assert_close(flashinfer.single_prefill_with_kv_cache(q, k, v, window_left=None, **given), every)
        traced = torch.compile(flashinfer.single_prefill_with_kv_cache, fullgraph=True, backend="eager")
        torch.testing.assert_close(traced(q, k, v, window_left=None, **given), every)
    every = flashinfer.single_decode_with_kv_cache(q[0], k, v)
    assert torch.equal(flashinfer.single_decode_with_kv_cache(q[0], k, v, window_left=None), every)
    cascade, prefill = flashinfer.MultiLevelCascadeAttentionWrapper(1, torch.empty(0)), Prefill()
    levels = [[x] for x in prefill.tables()]
    cascade.plan(*levels, 4, 2, 64, 16, causal=True, window_left=None, q_data_type=F32)
    prefill.close(cascade.run(*prefill.tensors))


@pytest.mark.parametrize("name", ["num_qo_heads", "num_kv_heads", "head_dim", "head_dim_vo", "window_left"])
@KINDS
def test_plan_with_a_number_of_another_type_that_equals_the_last_is_refused(kind, name):
    """Plans of a layer are kept, and found by arguments that are equal."""
    given = {"num_qo_heads": 1, "num_kv_heads": 1, "head_dim": 64, "head_dim_vo": 64, "window_left": 1}
    for other in (float, np.int64, np.float32, bool):
        case = kind()
        case.plan(**given)
        if other is bool and given[name] != 1:
            continue
        shown = "head_dim_qk" if name == "head_dim" else name
        with pytest.raises(ValueError, match=f"{shown} = "):
            case.plan(**{**given, name: other(given[name])})
        if name == "window_left":
            case = kind()
            case.plan()
            case.wrapper.run(*case.tensors, window_left=1)
            with pytest.raises(ValueError, match="window_left = "):
                case.wrapper.run(*case.tensors, window_left=other(1))


@pytest.mark.parametrize("value", [[4], {}, "4", None, torch.tensor(4)])
@KINDS
def test_plan_with_a_value_that_is_no_number_is_refused_by_name(kind, value):
    case = kind()
    for name in ("num_qo_heads", "window_left", "sm_scale", "rope_theta"):
        if value is None and name != "num_qo_heads":
            continue  # the default
        with pytest.raises(ValueError, match=f"{name} = "):
            case.plan(**{name: value})


def test_equal_layers_of_other_types_have_equal_text_and_hash():
    """Whichever was made first: numbers of NumPy's, ints for floats, and what is true."""
    python = attention_spec(**HEADS, causal=True, sm_scale=2.0, logits_soft_cap=1.0, slopes=(1.0, 0.0, 1.0, 2.0))
    numpy = {"causal": np.True_, "sm_scale": np.float32(2), "logits_soft_cap": True}
    other = attention_spec(**HEADS, **numpy, slopes=(1, False, np.float64(1), 2), window_left=None)
    assert (other, other.text, hash(other)) == (python, python.text, hash(python))
    assert AttentionSpec.parse(other.text) == python
    assert type(other.mask.causal) is bool
    for name in ("sm_scale", "logits_soft_cap", "slopes"):
        assert type(getattr(other, name)) is type(getattr(python, name))


def test_single_prefill_with_another_dtype_of_values_names_no_plan():
    q, k = torch.randn(5, 4, 64), torch.randn(9, 2, 64)
    for given in ((q, k, k.half()), (q, k, k.to(torch.float8_e4m3fn))):
        with pytest.raises(ValueError, match=r"v is torch\.float.*: it must be torch\.float32$"):
            flashinfer.single_prefill_with_kv_cache(*given)


@KINDS
def test_reset_workspace_buffer_without_a_buffer_is_refused(kind):
    case = kind()
    for name, given in (("float", (None, torch.empty(16))), ("int", (torch.empty(16), None))):
        with pytest.raises(ValueError, match=f"{name}_workspace_buffer = None is not supported"):
            case.wrapper.reset_workspace_buffer(*given)


@KINDS
def test_forget_cuda_graph_allows_plans_again(kind, monkeypatch):
    """Capture is made up here, and real in tests/face/test_gpu.py."""
    capturing = False
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    case = kind()
    case.plan()
    case.wrapper._capture._gpu = True
    for _ in range(2):
        capturing = True
        case.wrapper.run(*case.tensors)
        capturing = False
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"captured in a CUDA graph.*or call forget_cuda_graph\(\)"):
                case.plan(window_left=3)
        case.close(case.wrapper.run(*case.tensors))
        case.wrapper.forget_cuda_graph()
        case.plan(window_left=3)
        case.close(case.wrapper.run(*case.tensors), window_left=3)
        case.plan()


@pytest.mark.parametrize("kind", [Prefill, Ragged])
def test_plan_of_a_prefill_wrapper_reads_the_given_tables_themselves(kind):
    """So that a graph may be replayed after later plans if the caller keeps them, see `forget_cuda_graph`."""
    case = kind()
    for window in (5, 5, 7):
        case.plan(window_left=window)
        plan = case.wrapper.planned
        given = (case.rows.indptr, case.rows.indptr) if kind is Ragged else case.tables()
        for held, own in zip((plan.qo.indptr, *plan.kv.tables), given, strict=True):
            assert held.data_ptr() == own.data_ptr()


@pytest.mark.parametrize(
    "outer",
    [
        lambda: flashinfer.BatchAttention(device="cpu"),
        lambda: flashinfer.BlockSparseAttentionWrapper(torch.empty(0)),
        lambda: flashinfer.VariableBlockSparseAttentionWrapper(torch.empty(0)),
        lambda: flashinfer.MultiLevelCascadeAttentionWrapper(3),
        flashinfer.BatchDecodeWithSharedPrefixPagedKVCacheWrapper,
        flashinfer.BatchPrefillWithSharedPrefixPagedKVCacheWrapper,
        flashinfer.PODWithPagedKVCacheWrapper,
        flashinfer.BatchPODWithPagedKVCacheWrapper,
    ],
)
def test_forget_cuda_graph_of_an_outer_wrapper_forgets_those_of_inner_ones(outer):
    outer = outer()
    inner = [x for x in vars(outer).values() if isinstance(x, AttentionWrapper)] or outer._batch_prefill_wrappers
    for wrapper in inner:
        wrapper._capture.captured = True
    outer.forget_cuda_graph()
    for wrapper in inner:
        wrapper._capture.begin_plan("a wrapper")


@KINDS
def test_run_asks_for_a_family_only_where_it_changes_the_planned_layer(kind, monkeypatch):
    asked, choose = [], registry.choose

    def counted(spec, *given):
        asked.append(spec)
        return choose(spec, *given)

    monkeypatch.setattr(registry, "choose", counted)
    case = kind()
    case.plan()
    assert case.wrapper.planned.family is registry.family("cpu")
    assert asked == [case.wrapper.planned.spec]
    asked.clear()
    case.close(case.wrapper.run(*case.tensors))
    assert not asked
    case.close(case.wrapper.run(*case.tensors, window_left=3), window_left=3)
    assert asked == [case.wrapper.planned.spec.replace(window_left=3)]


def test_run_is_computed_by_the_planned_family(monkeypatch):
    """Whatever the registry would answer by now."""
    case = Decode()
    case.plan()
    monkeypatch.setattr(registry, "choose", lambda *given: pytest.fail("the plan has a family"))
    attended = []
    family = case.wrapper.planned.family
    monkeypatch.setattr(type(family), "attend", lambda self, call, out, lse: attended.append(out.zero_()))
    assert case.wrapper.run(*case.tensors).eq(0).all()
    assert len(attended) == 1


@KINDS
def test_int_workspace_of_another_wrapper_is_used_from_then_on(kind):
    first, second = kind(), kind()
    first.plan()
    buffer = torch.full((64,), 7, dtype=torch.uint8)
    first.wrapper._int_workspace_buffer = buffer
    assert buffer.count_nonzero() == 0
    second.wrapper._int_workspace_buffer = first.wrapper._int_workspace_buffer
    assert second.wrapper._int_workspace_buffer is first.wrapper._int_workspace_buffer is buffer
    assert first.wrapper.planned.int_workspace.data_ptr() == buffer.data_ptr()
    second.plan()
    for case in (first, second):
        case.close(case.wrapper.run(*case.tensors))
    with pytest.raises(ValueError, match="int_workspace_buffer = '8 bytes' is not supported: at least 16 bytes"):
        first.wrapper._int_workspace_buffer = buffer[:8]
    with pytest.raises(ValueError, match=r"int_workspace_buffer\.device = 'meta'"):
        first.wrapper._int_workspace_buffer = buffer.to("meta")


@KINDS
def test_backend_that_is_assigned_computes_the_next_plan(kind):
    case = kind()
    case.plan()
    assert case.wrapper.backend == "cpu"
    case.wrapper._backend = "reference"
    assert (case.wrapper._backend, case.wrapper.backend) == ("reference", "cpu")
    case.plan()
    assert case.wrapper.backend == "reference"
    case.wrapper._backend = "fa2"
    case.plan()
    assert case.wrapper.backend == "cpu"
    with pytest.raises(ValueError, match="backend = 'fa9' is unknown"):
        case.wrapper._backend = "fa9"
