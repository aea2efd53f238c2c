"""LoRAX's states: random schedules against the oracle, and contexts that keep to themselves."""

from __future__ import annotations

import asyncio
import threading
from array import array

import pytest
import torch

from quire.backends import lorax
from quire.bench.batches import Batch, random_batch, relative_error
from quire.definition import PageTable, RaggedLayout, attention_spec, oracle
from quire.steps import StepTables, store

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
BOUND = {torch.float32: 2e-6, torch.bfloat16: 3e-3, torch.float16: 5e-4}


@pytest.fixture(params=DEVICES)
def device(request):
    return torch.device(request.param)


def random_layer(rng, dtype=torch.float32):
    kv_heads = rng.choice((1, 2))
    window = rng.choice((-1, 0, 7, 40))
    heads = kv_heads * rng.choice((1, 2, 5))
    return attention_spec(
        num_qo_heads=heads, num_kv_heads=kv_heads, head_dim_qk=32, q_dtype=dtype, window_left=window or -1
    ), window


def layer_arguments(spec, window):
    heads = {"num_heads": spec.num_qo_heads, "num_kv_heads": spec.num_kv_heads, "head_size": spec.head_dim_qk}
    return {**heads, "window_left": window}


def paged_arguments(batch: Batch, window):
    given = {"block_tables": batch.kv.indices, "input_lengths": batch.kv.lengths(), "page_size": batch.kv.page_size}
    return {**layer_arguments(batch.spec, window), **given, "dtype": batch.spec.q_dtype}


def check(out, batch):
    assert relative_error(out, batch.exact()[0]) < BOUND[batch.spec.q_dtype]


def random_lengths(rng, most=5):
    return [rng.choice((1, 2, 16, 17, rng.randint(1, 120))) for _ in range(rng.randint(1, most))]


class Engine:
    """Requests and their pages in one cache, whose free slots are NaN; each step is checked against the oracle."""

    def __init__(self, device, page_size, dtype, rng):
        self.spec, self.window = random_layer(rng, dtype)
        self.device, self.page_size, self.rng = device, page_size, rng
        self.pool, heads = 400 // page_size, (self.spec.num_qo_heads, self.spec.num_kv_heads)
        shape = (2, self.pool, page_size, heads[1], self.spec.head_dim_qk)
        self.cache = torch.full(shape, torch.nan, dtype=dtype, device=device)
        self.requests: list[tuple[list[int], int]] = []  # pages, and how many tokens they hold
        counts = {"num_heads": heads[0], "num_kv_heads": heads[1]}
        self.ragged = lorax.create_prefill_state(device=device)
        self.paged = lorax.create_prefill_with_paged_kv_state(device=device)
        self.decode = lorax.create_decode_state(device=device, **counts)
        ints = {"dtype": torch.int32, "device": device}
        tables, ptr, last = (
            torch.full((8 * self.pool,), 1 << 30, **ints),
            torch.zeros(9, **ints),
            torch.zeros(8, **ints),
        )
        self.graph = lorax.create_decode_state_cuda_graphs(
            device=device, block_tables=tables, block_tables_ptr=ptr, last_page_len=last, **counts
        )

    @property
    def free(self):
        return sorted(set(range(self.pool)) - {page for pages, _ in self.requests for page in pages})

    def arrive(self):
        """A request, perhaps over the full pages of another."""
        pages, length = self.rng.choice([([], 0), *self.requests])
        full = self.rng.randint(0, length // self.page_size)
        self.requests.append((list(pages[:full]), full * self.page_size))

    def leave(self):
        self.requests.pop(self.rng.randrange(len(self.requests)))
        self.cache[:, self.free] = torch.nan

    def step(self):
        """Some of the requests go on, all by one token or each by a chunk."""
        phase, chosen = self.rng.choice(("decode", "padded", "prefill")), []
        for b in self.rng.sample(range(len(self.requests)), self.rng.randint(1, len(self.requests))):
            pages, length = self.requests[b]
            count = self.rng.randint(1, 30) if phase == "prefill" else 1
            need = -(-(length + count) // self.page_size) - len(pages)
            if need <= len(self.free):
                self.requests[b] = ([*pages, *self.rng.sample(self.free, need)], length + count)
                chosen.append((self.requests[b], count))
        if not chosen:
            return
        (pages, totals), counts = zip(*(request for request, _ in chosen), strict=True), [n for _, n in chosen]
        pages, pad_to = [array("i", own) for own in pages], 8 if phase == "padded" else 0
        size, device = self.page_size, self.device
        tables = StepTables.from_host(pages, totals, counts, size, self.pool, device, pad_to=pad_to)
        rows = torch.randn(3, sum(counts), self.spec.num_qo_heads, self.spec.head_dim_qk, device=device)
        q, (k, v) = rows[0].to(self.spec.q_dtype), rows[1:, :, : self.spec.num_kv_heads].to(self.spec.q_dtype)
        store(tuple(self.cache), k, v, tables.slots)
        whole = phase == "prefill" and list(totals) == counts
        out = self.attend(phase, q, k if whole else None, v, tables)
        qo, kv = RaggedLayout(tables.qo_indptr.cpu()), tables.pages.to("cpu")
        exact, _ = oracle.attend_batch(q.cpu(), *self.cache.cpu(), qo, kv, self.spec)
        assert relative_error(out.cpu()[: len(q)], exact) < BOUND[self.spec.q_dtype]
        assert not out[len(q) :].any()

    def attend(self, phase, q, k, v, tables):
        """Through the state of the phase: of prefills without a prefix (k is given), or over pages."""
        given = layer_arguments(self.spec, self.window)
        cached = {"block_tables": tables.pages.indices, "input_lengths": tables.lengths, "page_size": self.page_size}
        cached |= {"dtype": self.spec.q_dtype, **given}
        if phase != "prefill":
            state = self.graph if phase == "padded" else self.decode
            q = torch.nn.functional.pad(q, (0, 0, 0, 0, 0, tables.batch_size - len(q)))
            with lorax.use_decode_state(state=state, **cached):
                return lorax.decode_state.get().forward(q, tuple(self.cache))
        rows = tables.qo_indptr
        if k is not None:
            with lorax.use_prefill_state(state=self.ragged, cu_seqlens=rows, query_dtype=self.spec.q_dtype, **given):
                return lorax.prefill_state.get().forward(q, k, v)
        with lorax.use_prefill_with_paged_kv_state(state=self.paged, cu_seqlens=rows, **cached):
            return lorax.prefill_with_paged_kv_state.get().run(q, tuple(self.cache))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("page_size", [1, 16])
def test_random_schedule_matches_the_oracle(device, page_size, dtype, rng):
    """Arrivals over shared pages, chunks, decodes padded for a graph or not, departures."""
    engine = Engine(device, page_size, dtype, rng)
    for _ in range(40):
        if len(engine.requests) < 2 or (len(engine.requests) < 8 and rng.random() < 0.3):
            engine.arrive()
        engine.step()
        if len(engine.requests) > 2 and rng.random() < 0.3:
            engine.leave()


def test_graph_state_fills_its_buffers_in_place(device, rng):
    """A state for graphs follows batch after batch; what stands beyond a batch's pages is left alone."""
    ints = {"dtype": torch.int32, "device": device}
    tables, ptr, last = torch.full((300,), -7, **ints), torch.zeros(5, **ints), torch.zeros(4, **ints)
    spec, window = random_layer(rng)
    heads = {"num_heads": spec.num_qo_heads, "num_kv_heads": spec.num_kv_heads}
    state = lorax.create_decode_state_cuda_graphs(
        device=device, block_tables=tables, block_tables_ptr=ptr, last_page_len=last, **heads
    )
    assert state.is_cuda_graph_enabled
    for lengths in ([60, 1, 17, 16], [1, 1, 1, 2], [100, 16, 3, 90]):
        batch = random_batch(spec, [1] * 4, lengths, 16, device=device)
        tables[len(batch.kv.indices) :] = -7
        with lorax.use_decode_state(state=state, **paged_arguments(batch, window)):
            check(lorax.decode_state.get().run(batch.q, (batch.k, batch.v)), batch)
        assert torch.equal(tables[: len(batch.kv.indices)], batch.kv.indices)
        assert ptr.tolist() == batch.kv.indptr.tolist()
        assert last.tolist() == batch.kv.last_page_len.tolist()
    more = random_batch(spec, [1] * 5, [3] * 5, 16, device=device)
    with (
        pytest.raises(ValueError, match="the batch has 5 requests"),
        lorax.use_decode_state(state=state, **paged_arguments(more, window)),
    ):
        pass


@pytest.mark.gpu
def test_captured_graph_replayed_for_other_batches_matches_the_oracle(rng):
    ints = {"dtype": torch.int32, "device": "cuda"}
    tables, ptr, last = torch.zeros(300, **ints), torch.zeros(5, **ints), torch.zeros(4, **ints)
    spec, window = random_layer(rng, torch.bfloat16)
    heads = {"num_heads": spec.num_qo_heads, "num_kv_heads": spec.num_kv_heads}
    state = lorax.create_decode_state_cuda_graphs(
        device="cuda", block_tables=tables, block_tables_ptr=ptr, last_page_len=last, **heads
    )
    batches = [random_batch(spec, [1] * 4, random_lengths(rng, 1) * 4, 16, device="cuda") for _ in range(4)]
    pool = max(len(b.k) for b in batches)
    q, graph = torch.empty_like(batches[0].q), torch.cuda.CUDAGraph()
    k, v = (torch.full((pool, *b.shape[1:]), torch.nan, device="cuda", dtype=b.dtype) for b in (batches[0].k,) * 2)
    out = None
    for batch in batches:
        q.copy_(batch.q)
        k[: len(batch.k)], v[: len(batch.v)] = batch.k, batch.v
        with lorax.use_decode_state(state=state, **paged_arguments(batch, window)):
            if out is None:
                state.run(q, (k, v))
                with torch.cuda.graph(graph):
                    out = state.run(q, (k, v))
            graph.replay()
        check(out, batch)


def test_decode_state_of_many_heads_per_group_uses_tensor_cores():
    device = torch.device("cpu")
    space = lorax.get_workspace(device)
    assert space is lorax.get_workspace("cpu")
    assert (space.dtype, space.numel()) == (torch.uint8, 128 << 20)
    wide = lorax.create_decode_state(device=device, num_heads=20, num_kv_heads=4)
    assert (wide.use_tensor_cores, wide.is_cuda_graph_enabled) == (True, False)
    assert not lorax.create_decode_state(device=device, num_heads=16, num_kv_heads=4).use_tensor_cores


def one(rng, device="cpu"):
    spec, window = random_layer(rng)
    batch = random_batch(spec, [1, 1], [20, 3], 16, device=device)
    state = lorax.create_decode_state(device=device, num_heads=spec.num_qo_heads, num_kv_heads=spec.num_kv_heads)
    return batch, state, paged_arguments(batch, window)


def test_use_state_whose_body_raises_resets_the_state(rng):
    batch, state, given = one(rng)
    with pytest.raises(LookupError):
        lorax.decode_state.get()

    def fail():
        assert lorax.decode_state.get() is state
        raise KeyError("body")

    for _ in range(2):
        with pytest.raises(KeyError, match="body"), lorax.use_decode_state(state=state, **given):
            fail()
        with pytest.raises(LookupError):
            lorax.decode_state.get()
    with pytest.raises(ValueError, match="head_dim"), lorax.use_decode_state(state=state, **{**given, "head_size": 12}):
        pass
    with lorax.use_decode_state(state=state, **given):
        check(state.run(batch.q, (batch.k, batch.v)), batch)


def test_use_state_within_another_keeps_the_outer_plan(rng):
    """A state keeps its plan when another state, or itself, is used inside it."""
    (outer, state, given), (inner, other, given_inner) = one(rng), one(rng)
    for second in (other, state):
        with lorax.use_decode_state(state=state, **given):
            with lorax.use_decode_state(state=second, **given_inner):
                assert lorax.decode_state.get() is second
                check(lorax.decode_state.get().run(inner.q, (inner.k, inner.v)), inner)
            assert lorax.decode_state.get() is state
            check(lorax.decode_state.get().run(outer.q, (outer.k, outer.v)), outer)


def test_use_state_in_several_threads_keeps_each_threads_state(rng):
    pairs, meet, failed = [one(rng) for _ in range(3)], threading.Barrier(3), []

    def work(batch, state, given):
        try:
            for _ in range(5):
                with lorax.use_decode_state(state=state, **given):
                    meet.wait(10)
                    assert lorax.decode_state.get() is state
                    check(lorax.decode_state.get().run(batch.q, (batch.k, batch.v)), batch)
        except BaseException as error:
            failed.append(error)
            meet.abort()

    threads = [threading.Thread(target=work, args=pair) for pair in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


def test_use_state_in_several_tasks_keeps_each_tasks_state(rng):
    async def work(batch, state, given):
        with lorax.use_decode_state(state=state, **given):
            await asyncio.sleep(0)
            assert lorax.decode_state.get() is state
            check(lorax.decode_state.get().run(batch.q, (batch.k, batch.v)), batch)
            await asyncio.sleep(0)

    async def every():
        await asyncio.gather(*(work(*one(rng)) for _ in range(4)))

    asyncio.run(every())


def test_use_state_by_two_tasks_at_once_is_refused(rng):
    _batch, state, given = one(rng)

    async def work():
        with lorax.use_decode_state(state=state, **given):
            await asyncio.sleep(0)

    async def both():
        await asyncio.gather(work(), work())

    with pytest.raises(RuntimeError, match="in use by another thread or task"):
        asyncio.run(both())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_lengths": torch.tensor([20.0, 3.0])}, "input_lengths is torch.float32"),
        ({"input_lengths": torch.tensor([20, 3 + 2**32])}, r"input_lengths\[1\] = 4294967299 is out of range"),
        ({"block_tables": torch.tensor([0, 2**32 + 1, 1])}, r"block_tables\[1\] = 4294967297 is out of range"),
        ({"query_dtype": "float17"}, "query_dtype = 'float17'"),
        ({"input_lengths": torch.tensor([20, 40]).int()}, "kv_indptr.* is beyond the number of kv_indices"),
        ({"block_tables": torch.tensor([0, 1, -1]).int()}, r"kv_indices\[2\] = -1 is out of range"),
        ({"num_kv_heads": 3}, "num_qo_heads"),
        ({"dtype": "float17"}, "float17"),
        ({"window_left": -3}, "window_left"),
        ({"page_size": 0}, "page_size = 0"),
    ],
)
def test_use_state_with_wrong_arguments_is_refused(change, message, rng):
    _batch, state, given = one(rng)
    with pytest.raises(ValueError, match=message), lorax.use_decode_state(state=state, **{**given, **change}):
        pass


def test_use_state_with_a_state_of_another_kind_is_refused():
    states = (lorax.create_prefill_state(device="cpu"), lorax.create_decode_state(device="cpu", **heads_of(2, 1)), None)
    rows = torch.tensor([0, 20, 23]).int()
    common = {"cu_seqlens": rows, "window_left": -1, "head_size": 32, **heads_of(2, 1)}
    pages = {"block_tables": rows, "input_lengths": rows[1:], "page_size": 16, "dtype": torch.float32}
    for state in states:
        with pytest.raises(ValueError, match=r"state = .* BatchPrefillWithPagedKVCacheWrapper is needed"):
            lorax.use_prefill_with_paged_kv_state(state=state, **common, **pages)
    for state in states[1:]:
        with pytest.raises(ValueError, match=r"state = .* BatchPrefillWithRaggedKVCacheWrapper is needed"):
            lorax.use_prefill_state(state=state, **common)
    del common["cu_seqlens"]
    with pytest.raises(ValueError, match=r"state = '_RaggedState' .* BatchDecodeWithPagedKVCacheWrapper is needed"):
        lorax.use_decode_state(state=states[0], **common, **pages)


def heads_of(num_heads, num_kv_heads):
    return {"num_heads": num_heads, "num_kv_heads": num_kv_heads}


class Prompts:
    """Two prompts in pages and as rows, and the contexts of their two states."""

    def __init__(self, rng):
        self.spec = attention_spec(
            num_qo_heads=4, num_kv_heads=2, head_dim_qk=32, q_dtype=torch.float32, window_left=rng.choice((3, 7))
        )
        self.lengths = [rng.randint(9, 40), rng.randint(9, 40)]
        self.batch = random_batch(self.spec, self.lengths, self.lengths, 16)
        self.rows = RaggedLayout(self.batch.qo.indptr)
        self.k, self.v = torch.randn(2, sum(self.lengths), 2, 32)
        common = {**layer_arguments(self.spec, self.spec.mask.window_left), "cu_seqlens": self.batch.qo.indptr}
        self.paged, self.ragged = (
            lorax.create_prefill_with_paged_kv_state(device="cpu"),
            lorax.create_prefill_state(device="cpu"),
        )
        paged = {**paged_arguments(self.batch, self.spec.mask.window_left), "cu_seqlens": self.batch.qo.indptr}
        self.uses = {
            "paged": lambda: lorax.use_prefill_with_paged_kv_state(state=self.paged, **paged),
            "ragged": lambda: lorax.use_prefill_state(state=self.ragged, query_dtype=torch.float32, **common),
        }

    def tensors(self, kind):
        q, (k, v) = self.batch.q, (self.batch.k, self.batch.v)
        return (q, (k, v)) if kind == "paged" else (q, self.k, self.v)

    def check(self, kind, out, **layer):
        spec = self.spec.replace(**layer)
        if kind == "paged":
            exact, _ = oracle.attend_batch(self.batch.q, self.batch.k, self.batch.v, self.rows, self.batch.kv, spec)
        else:
            table, rows = PageTable.from_ragged(self.rows, len(self.k)), (self.k[:, None], self.v[:, None])
            exact, _ = oracle.attend_batch(self.batch.q, *rows, self.rows, table, spec)
        assert relative_error(out, exact) < BOUND[torch.float32]


@pytest.mark.parametrize("kind", ["ragged", "paged"])
def test_forward_with_omitted_arguments_uses_the_planned_ones(kind, rng):
    """Omitted arguments have their planned values, and later calls do not see the arguments of earlier ones."""
    prompts = Prompts(rng)
    tensors = prompts.tensors(kind)
    calls = [
        ({}, {}),
        ({"causal": False}, {"causal": False}),
        ({"causal": None, "window_left": None, "logits_soft_cap": None, "sm_scale": None}, {}),
        ({"causal": True, "window_left": -1, "sm_scale": 0.3}, {"window_left": -1, "sm_scale": 0.3}),
        ({"causal": False, "logits_soft_cap": 2.0}, {"causal": False, "logits_soft_cap": 2.0}),
        ({"pos_encoding_mode": "ALIBI"}, {"pos_encoding": "ALIBI"}),
        ({"pos_encoding_mode": "ROPE_LLAMA", "rope_theta": 99.0}, {"pos_encoding": "ROPE_LLAMA", "rope_theta": 99.0}),
    ]
    rng.shuffle(calls)
    with prompts.uses[kind]():
        state = getattr(prompts, kind)
        for given, layer in calls:
            prompts.check(kind, state.forward(*tensors, **given), **layer)
            prompts.check(kind, state.forward_return_lse(*tensors, **given)[0], **layer)
            prompts.check(kind, state.run(*tensors))
            assert (state._causal, state._window_left) == (True, prompts.spec.mask.window_left)
        prompts.check(kind, state.forward(*tensors, False, "NONE", False), causal=False)
        with pytest.raises(TypeError, match="windows"):
            state.forward(*tensors, windows=4)


def test_forward_of_decode_takes_all_arguments_by_position(rng):
    """FlashInfer's order: the position encoding, three scales, the window, soft cap and scale."""
    batch, state, given = one(rng)
    spec = batch.spec.replace(window_left=2, logits_soft_cap=4.0, sm_scale=0.2)
    with lorax.use_decode_state(state=state, **given):
        out = state.forward(batch.q, (batch.k, batch.v), "NONE", None, None, 2.0, 2, 4.0, 0.2)
        exact, _ = oracle.attend_batch(batch.q, batch.k, batch.v, batch.qo, batch.kv, spec)
        assert relative_error(out, exact * 2) < BOUND[torch.float32]
        check(state.forward(batch.q, (batch.k, batch.v)), batch)


@pytest.mark.parametrize(("phase", "query_dtype"), [("decode", None), ("prefill", torch.bfloat16)])
def test_state_over_an_fp8_cache_applies_scales_and_query_dtype(phase, query_dtype, device, rng):
    """Scales apply, and queries are float16 unless query_dtype is passed."""
    q_dtype, fp8 = query_dtype or torch.float16, torch.float8_e4m3fn
    spec, window = random_layer(rng, q_dtype)
    counts = [1, 1] if phase == "decode" else [5, 3]
    batch = random_batch(spec.replace(kv_dtype=fp8), counts, [20, 3], 16, device=device)
    given = {**paged_arguments(batch, window), "dtype": fp8}
    given |= {} if query_dtype is None else {"query_dtype": query_dtype}
    given["input_lengths"] = given["input_lengths"].long()
    if phase == "decode":
        state = lorax.create_decode_state(device=device, **heads_of(spec.num_qo_heads, spec.num_kv_heads))
        use = lorax.use_decode_state(state=state, **given)
    else:
        state = lorax.create_prefill_with_paged_kv_state(device=device)
        use = lorax.use_prefill_with_paged_kv_state(state=state, cu_seqlens=batch.qo.indptr.long(), **given)
    with use:
        out = state.forward(batch.q, (batch.k, batch.v), k_scale=0.5, v_scale=2.0)
    assert out.dtype == q_dtype
    scaled = batch.spec.replace(sm_scale=batch.spec.sm_scale * 0.5)
    tensors = (batch.q.cpu(), batch.k.cpu(), batch.v.cpu(), RaggedLayout(batch.qo.indptr.cpu()), batch.kv.to("cpu"))
    exact, _ = oracle.attend_batch(*tensors, scaled)
    assert relative_error(out.cpu(), exact * 2) < BOUND[q_dtype]
