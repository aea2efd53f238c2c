"""Runs that are repeated without the checks of the first, and plans that differ from the last in their tables alone."""

from __future__ import annotations

from inspect import signature

import numpy as np
import pytest
import torch

import quire
from helpers.page_tables import empty_table
from quire.definition.pages import LengthTable, RaggedLayout
from quire.kernels import registry, torch_internals
from quire.wrappers.plan import longest_request
from quire.wrappers.planner import Planner
from quire.wrappers.workspace import Workspace


@pytest.fixture
def computed(monkeypatch):
    """The tables of (runs computed with all checks, runs replayed). Wrappers are patched to replay without a GPU."""
    first, again = [], []

    def attend(call, *given, **overrides):
        first.append(call.kv)
        return lambda addresses, stream: again.append(call.kv) or True

    monkeypatch.setattr("quire.wrappers.plan.attend", attend)
    monkeypatch.setattr(Planner, "_keeps_launches", lambda wrapper: True)
    monkeypatch.setattr(registry, "choose", lambda *given: registry.family("cpu"))
    monkeypatch.setattr(torch_internals, "current_device", lambda: None)
    monkeypatch.setattr(torch_internals, "current_raw_stream", lambda index: 0)
    return first, again


def test_run_equal_to_an_earlier_one_of_its_plan_is_repeated(computed):
    """A layer's first run of each plan is computed; those of later layers, and of other windows, are repeated."""
    wrapper = quire.BatchDecodeWithPagedKVCacheWrapper(torch.empty(0, device="meta"))
    bf16, first, again = torch.bfloat16, *computed
    q = torch.empty(2, 4, 64, dtype=bf16, device="meta")
    cache = torch.empty(9, 2, 16, 2, 64, dtype=bf16, device="meta")

    def plan(entries, **changes):
        table = empty_table(entries, "meta")
        wrapper.plan(table.indptr, table.indices, table.last_page_len, 4, 2, 64, 16, q_data_type=bf16, **changes)

    def runs():
        first.clear(), again.clear()
        for options in ({}, {"return_lse": True}, {"window_left": 7}) * 2:
            wrapper.run(q, cache, **options)
        assert all(x is wrapper.planned.kv for x in first + again)
        return len(first), len(again)

    for entries, layer in ((8, {}), (12, {}), (12, {"window_left": 5})):
        plan(entries, **layer)
        assert runs() == (3, 3)
        assert runs() == (0, 6)
    earlier = wrapper.planned
    wrapper.reset_workspace_buffer(torch.empty(0, device="meta"), torch.empty(16, dtype=torch.uint8, device="meta"))
    assert runs() == (3, 3), "launches read the memory that they were made with"
    wrapper.planned = earlier
    assert runs() == (0, 6), "and belong to a plan"


def test_run_with_many_different_arguments_keeps_few_launches(computed):
    wrapper = quire.BatchDecodeWithPagedKVCacheWrapper(torch.empty(0, device="meta"))
    table = empty_table(8, "meta")
    wrapper.plan(table.indptr, table.indices, table.last_page_len, 1, 1, 64, 16, q_data_type=torch.float32)
    q, cache = torch.empty(2, 1, 64, device="meta"), torch.empty(9, 2, 16, 1, 64, device="meta")
    for i in range(100):
        wrapper.run(q, cache, sm_scale=1.0 + i)
        wrapper.run(q, cache, sm_scale=1.0 + i)
    assert [len(x) for x in computed] == [100, 100]
    assert len(wrapper.planned.launches) < 100


@pytest.mark.parametrize("kind", [float, np.int64, bool])
def test_argument_of_another_type_that_equals_the_last_is_checked(kind, computed):
    """Neither as a plan's, nor as a run's."""
    wrapper, table = quire.BatchDecodeWithPagedKVCacheWrapper(torch.empty(0, device="meta")), empty_table(8, "meta")
    q, cache = torch.empty(2, 1, 64, device="meta"), torch.empty(9, 2, 16, 1, 64, device="meta")
    given = {"num_qo_heads": 1, "num_kv_heads": 1, "head_dim": 64, "page_size": 16, "window_left": 1}
    given |= {"q_len_per_req": 1, "q_data_type": torch.float32}
    tables = (table.indptr, table.indices, table.last_page_len)
    for name in ("num_qo_heads", "num_kv_heads", "head_dim", "page_size", "window_left", "q_len_per_req"):
        if kind is bool and name in ("head_dim", "page_size"):
            continue  # True is neither
        wrapper.plan(*tables, **given)
        with pytest.raises(ValueError, match=name):
            wrapper.plan(*tables, **{**given, name: kind(given[name])})
    wrapper.plan(*tables, **given)
    first, again = computed
    for _ in range(2):
        for window in (1, kind(1)):
            wrapper.run(q, cache, window_left=window)
    assert (len(first), len(again)) == (2, 2), "kernels' own layers are checked below, once for each"
    latent = quire.mla.BatchMLAPagedAttentionWrapper(torch.empty(0, device="meta"))
    numbers = {"num_heads": 1, "head_dim_ckv": 512, "head_dim_kpe": 64, "page_size": 1}
    options = {"causal": True, "sm_scale": 0.1, "q_data_type": torch.float32, "kv_data_type": torch.float32}
    rows = torch.empty(3, dtype=torch.int32, device="meta")
    for name in numbers:
        latent.plan(rows, rows, rows, rows[1:], **numbers, **options)
        if kind is not bool or numbers[name] == 1:
            with pytest.raises(ValueError, match=f"{name} = |num_qo_heads = |head_dim_.. = "):
                latent.plan(rows, rows, rows, rows[1:], **{**numbers, name: kind(numbers[name])}, **options)


class Decode:
    """A wrapper over tables without memory, and arguments that make another layer."""

    make = quire.BatchDecodeWithPagedKVCacheWrapper
    given = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 64, "page_size": 16}  # noqa: RUF012
    layer = {  # noqa: RUF012
        "num_qo_heads": 8, "num_kv_heads": 1, "head_dim": 128, "page_size": 8, "pos_encoding_mode": "ALIBI",
        "window_left": 5, "logits_soft_cap": 3.0, "q_data_type": "float16", "kv_data_type": "float8_e5m2",
        "o_data_type": "float32", "data_type": "float8_e4m3fn", "sm_scale": 0.5, "rope_scale": 2.0, "rope_theta": 5e5,
        "fixed_split_size": 512, "disable_split_kv": True, "q_len_per_req": 2, "head_dim_vo": 32, "window_right": 1,
        "is_causal": False, "alibi_slopes": [0.5, 0.25, 0.125, 0.0625],
    }  # fmt: skip
    rest = ("indptr", "indices", "last_page_len", "block_tables", "seq_lens", "non_blocking", "shared_prefix")

    def __init__(self):
        self.outer = self.make(torch.empty(0, device="meta"))
        self.wrapper = self.outer

    def tables(self, entries, batch_size):
        sizes = (batch_size + 1, entries, batch_size)
        return [torch.empty(n, dtype=torch.int32, device="meta") for n in sizes]

    def plan(self, entries=8, batch_size=2, **layer):
        """Plan new tables; return the layer, of which a plan that does all its work makes its own."""
        self.planned = self.tables(entries, batch_size)
        self.outer.plan(*self.planned, **{**self.given, "q_data_type": "bfloat16", **layer})
        return self.wrapper.planned.layer


class Prefill(Decode):
    make = quire.BatchPrefillWithPagedKVCacheWrapper
    given = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim_qk": 64, "page_size": 16}  # noqa: RUF012
    layer = {  # noqa: RUF012
        **{name: x for name, x in Decode.layer.items() if name not in ("head_dim", "data_type", "q_len_per_req")},
        "head_dim_qk": 128, "causal": True,
    }  # fmt: skip
    del layer["is_causal"]
    # Masks and items are not compared, since plans that have one do all their work.
    rest = (
        "qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len", "custom_mask",
        "packed_custom_mask", "use_fp16_qk_reduction", "non_blocking", "prefix_len_ptr", "token_pos_in_items_ptr",
        "token_pos_in_items_len", "max_item_len_ptr", "seq_lens", "seq_lens_q", "block_tables",
        "max_token_per_sequence", "max_sequence_kv",
    )  # fmt: skip

    def tables(self, entries, batch_size):
        return [torch.empty(batch_size + 1, dtype=torch.int32, device="meta"), *super().tables(entries, batch_size)]


class Ragged(Prefill):
    make = quire.BatchPrefillWithRaggedKVCacheWrapper
    given = {name: x for name, x in Prefill.given.items() if name != "page_size"}  # noqa: RUF012
    layer = {name: x for name, x in Prefill.layer.items() if name != "page_size"}  # noqa: RUF012
    paged = {"block_tables", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len"}  # noqa: RUF012
    rest = (*(set(Prefill.rest) - paged), "kv_indptr", "v_indptr", "o_indptr")

    def tables(self, entries, batch_size):
        return super().tables(entries, batch_size)[:2]


class Mixed(Prefill):
    given = {**Prefill.given, "head_dim_vo": 64, "kv_data_type": "float8_e4m3fn"}  # noqa: RUF012
    layer = {
        name: Prefill.layer[name]
        for name in ("num_qo_heads", "num_kv_heads", "head_dim_qk", "head_dim_vo", "page_size", "causal", "sm_scale")
    } | {"logits_soft_cap": 3.0, "q_data_type": "float16", "kv_data_type": "float8_e5m2"}
    rest = ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr", "use_profiler")

    def __init__(self):
        self.outer = quire.BatchAttention(device="meta")
        self.wrapper = self.outer._wrapper


ALL, PREFILLS = (Decode, Prefill, Ragged, Mixed), pytest.mark.parametrize("kind", [Prefill, Ragged, Mixed])


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in ALL for name in kind.layer])
def test_plan_with_one_changed_layer_argument_makes_another_layer(kind, name, computed):
    case = kind()
    assert {*kind.layer, *kind.rest} == set(signature(case.outer.plan).parameters)
    given = {"pos_encoding_mode": "ALIBI"} if name == "alibi_slopes" else {}
    layer = case.plan(**given)
    assert case.plan(**given) is layer
    if kind is Decode and name == "window_right":
        with pytest.raises(ValueError, match="window_right is not supported"):
            case.plan(**given, window_right=1)
    else:
        assert case.plan(**{**given, name: kind.layer[name]}) is not layer


@PREFILLS
def test_plan_of_a_prefill_with_an_equal_layer_reads_its_own_tables(kind, computed):
    """Its own tables, whatever their sizes, by the names under which engines know them."""
    case = kind()
    layer = case.plan()
    for sizes in ((12, 2), (12, 5), (7, 1), (9, 0)):
        assert case.plan(*sizes) is layer
        rows, *keys = case.planned
        plan, names = case.wrapper.planned, ("_qo_indptr_buf", *case.wrapper._kv_buffers)
        assert plan.qo.indptr is rows
        kept = (plan.kv.indptr,) if kind is Ragged else (plan.kv.indptr, plan.kv.indices, plan.kv.per_request)
        assert all(x is y for x, y in zip(kept, keys, strict=True))
        assert all(getattr(case.wrapper, name) is x for name, x in zip(names, case.planned, strict=True))
    assert isinstance(plan.kv, LengthTable) == (kind is Mixed)
    assert plan.kv.batch_size == plan.qo.batch_size == 0


@PREFILLS
def test_plan_with_tables_of_different_requests_is_refused(kind, computed):
    """By a plan like the last one as by the first."""
    far = torch.empty(4, dtype=torch.int32, device="meta")
    for wrong in (
        None,
        [0, 1, 2],
        far,
        far[:3].float(),
        far[:3].view(3, 1),
        torch.tensor([0, 3, 2], dtype=torch.int32),
    ):
        case = kind()
        for first in (True, False):
            rows, *keys = case.tables(8, 2)
            with pytest.raises(ValueError, match="indptr"):
                case.outer.plan(wrong, *keys, **case.given)
            if first:
                case.outer.plan(rows, *keys, **case.given)
    empty = torch.empty(0, dtype=torch.int32, device="meta")
    with pytest.raises(ValueError, match="indptr"):
        case.outer.plan(empty, empty, *keys[1:], **case.given)


def test_plan_with_another_longest_request_chooses_family_and_workspace_again(computed, monkeypatch):
    """It takes the workspace that it needs, and is of the kernel family that can compute it."""
    asked = []

    def choose(spec, device, backend, max_q_len):
        asked.append(max_q_len)
        return registry.family("cpu")

    monkeypatch.setattr(registry, "choose", choose)
    monkeypatch.setattr("quire.wrappers.plan._float_workspace_size", lambda family, spec, device, most, *_: most * 16)
    case = Prefill()
    layer = case.plan(max_token_per_sequence=1)
    for most in (1, 1, 8, 8, 3, None, 2, 0):
        asked.clear()
        before, given = case.wrapper.planned, {} if most is None else {"max_token_per_sequence": most}
        assert case.plan(**given) is layer
        plan = case.wrapper.planned
        assert plan.max_q_len == (most or 0)
        assert asked == ([] if plan.max_q_len == before.max_q_len else [plan.max_q_len])
        assert (0 if plan.float_workspace is None else plan.float_workspace.nbytes) >= plan.max_q_len * 16
    for most, wrong in ((1, True), (8, 8.0), (8, -1), (8, "8")):
        case.plan(max_token_per_sequence=most)
        with pytest.raises(ValueError, match="max_token_per_sequence = "):
            case.plan(max_token_per_sequence=wrong)
        assert case.wrapper.planned.max_q_len == most


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_longest_request_of_rows_on_the_host_is_computed(dtype):
    """Unless graphs are to be replayed with others, or kernels do not ask."""
    offsets, cuda = torch.tensor([0, 3, 3, 10, 11], dtype=dtype), torch.device("cuda")
    rows = RaggedLayout(offsets)
    assert longest_request(rows, None, False, cuda) == 7
    assert longest_request(rows, 9, False, cuda) == 9
    assert longest_request(RaggedLayout(offsets[:1]), None, False, cuda) == 0
    for given, graph, device in ((None, True, "cuda"), (None, False, "cpu"), (9, True, "cuda"), (2, False, "cpu")):
        assert longest_request(rows, given, graph, torch.device(device)) == (given or 0)
    assert longest_request(RaggedLayout(offsets.to("meta")), None, False, cuda) == 0
    with pytest.raises(ValueError, match=r"max_token_per_sequence = 6 is not supported: an integer, no less than 7"):
        longest_request(rows, 6, False, cuda)


@PREFILLS
def test_plan_with_tables_on_the_host_copies_them_and_chooses_a_family(kind, computed, monkeypatch):
    """Rows, or all tables, checked and copied to the device; the kernel family is chosen for their longest request."""
    asked, family = [], registry.family("cpu")
    monkeypatch.setattr(registry, "choose", lambda spec, device, backend, most: asked.append(most) or family)
    case, batch_size = kind(), 2
    layer, names = case.plan(), ("_qo_indptr_buf", *case.wrapper._kv_buffers)
    assert asked == [0]
    for q_lens, all_on_host in (([5, 7], False), ([7, 1], False), ([7, 7], True), ([3, 0], True), ([0, 3], False)):
        asked.clear()
        rows, *keys = case.tables(8, batch_size)
        rows = torch.tensor([0, *q_lens]).cumsum(0).int()
        if all_on_host and kind is not Mixed:  # whose lengths on the host are compared with the pages first
            keys = [torch.zeros(x.shape, dtype=torch.int32) for x in keys]
        before = case.wrapper.planned.max_q_len
        case.outer.plan(rows, *keys, **{**case.given, "q_data_type": "bfloat16"})
        plan = case.wrapper.planned
        assert plan.max_q_len == max(q_lens)
        assert plan.layer is layer
        assert asked == ([] if plan.max_q_len == before else [plan.max_q_len])
        held = [plan.qo.indptr, *plan.kv.tables]
        assert all(x.device.type == "meta" for x in held)
        assert [x.shape for x in held] == [x.shape for x in (rows, *keys)]
        assert all(getattr(case.wrapper, name) is x for name, x in zip(names, held, strict=True))
        for wrong, message in (
            (torch.tensor([0, 5, 4]), " falls at request 1, from 5 to 4"),
            (rows - 1, r"\[0\] = -1"),
        ):
            with pytest.raises(ValueError, match="indptr" + message):
                case.outer.plan(wrong.int(), *keys, **{**case.given, "q_data_type": "bfloat16"})
            assert case.wrapper.planned is plan
    device_rows = case.tables(8, batch_size)
    case.outer.plan(*device_rows, **{**case.given, "q_data_type": "bfloat16"})
    assert case.wrapper.planned.max_q_len == 0, "nothing is known of rows on a device"


@PREFILLS
def test_run_of_a_prefill_is_repeated_within_its_plan(kind, computed):
    case, (first, again) = kind(), computed
    k = torch.empty(9, 16, 2, 64, dtype=torch.float8_e4m3fn if kind is Mixed else torch.bfloat16, device="meta")
    cache = (k.flatten(0, 1), k.flatten(0, 1)) if kind is Ragged else ((k, k),)
    for plan in ({}, {"entries": 12}, {"batch_size": 3}):
        first.clear(), again.clear()
        case.plan(**plan)
        for tokens in (6, 6, 7, 6):
            case.outer.run(torch.empty(tokens, 4, 64, dtype=torch.bfloat16, device="meta"), *cache)
        assert all(x is case.wrapper.planned.kv for x in first + again)
        assert (len(first), len(again)) == (2, 2)


@pytest.mark.parametrize("kind", [Prefill, Ragged])
def test_plan_with_masks_or_items_is_not_a_refresh(kind, monkeypatch):
    """And what follows them is, too."""
    monkeypatch.setattr(registry, "choose", lambda *given: registry.family("cpu"))
    case = kind()
    masks = {"packed_custom_mask": torch.empty(9, dtype=torch.uint8, device="meta")}
    items = {"prefix_len_ptr": torch.empty(2, device="meta"), "token_pos_in_items_ptr": torch.empty(8, device="meta")}
    monkeypatch.setattr("quire.wrappers.prefill.PackedMask.from_packed", lambda bits, *lengths: bits)
    monkeypatch.setattr("quire.wrappers.prefill.Items", lambda *given: given)
    for given, causal in (({}, False), (masks, False), ({}, True), (items, True), (masks, False), ({}, False)):
        assert (case.plan(causal=causal if not given else given is masks, **given) is None) == bool(given)
        plan = case.wrapper.planned
        assert (plan.spec.mask.custom_mask, plan.spec.mask.items) == (given is masks, given is items)
        assert (plan.mask is not None, plan.items is not None) == (given is masks, given is items)
        assert plan.spec.mask.causal == causal


def test_run_over_a_latent_cache_is_repeated_within_its_plan(computed):
    wrapper = quire.mla.BatchMLAPagedAttentionWrapper(torch.empty(0, device="meta"))
    bf16, first, again = torch.bfloat16, *computed
    q, q_pe = (torch.empty(2, 4, dim, dtype=bf16, device="meta") for dim in (512, 64))
    cache = [torch.empty(9, 16, dim, dtype=bf16, device="meta") for dim in (512, 64)]
    rows = torch.empty(3, dtype=torch.int32, device="meta")
    for entries in (8, 12):
        table, lengths = empty_table(entries, "meta"), torch.empty(2, dtype=torch.int32, device="meta")
        first.clear(), again.clear()
        wrapper.plan(rows, table.indptr, table.indices, lengths, 4, 512, 64, 16, True, 0.1, bf16, bf16)
        for _ in range(3):
            wrapper.run(q, q_pe, *cache)
        assert (len(first), len(again)) == (1, 2)
        assert all(x is wrapper.planned.kv for x in first + again)


def test_memory_of_earlier_plans_stays_allocated():
    """A captured graph of an earlier plan may still use it, whether later plans need none or more."""
    workspace = Workspace(None, torch.device("cpu"))
    first, _ = workspace.take(64, 0)
    assert workspace.take(0, 0)[0] is None
    assert workspace.take(64, 0)[0] is first
    more, _ = workspace.take(128, 0)
    assert more is not first
    assert any(x is first for x in workspace.outgrown)
    assert workspace.take(64, 0)[0] is more
