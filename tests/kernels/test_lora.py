"""Products of adapters against float64."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from helpers.interpret import INTERPRETED
from quire.kernels.lora import RANK_PAGE, add_lora, add_lora_embedding, group_by_slot

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# Triton's interpreter truncates what it stores as bfloat16 instead of rounding it.
PRECISION = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 1.2e-2 if INTERPRETED else 6e-3}


@dataclass
class Pools:
    """Adapters in slots of a device, and their factors in float64: A [parts, rank, in_features], B [rank,
    out_features] of each slot. Pages that no adapter has are NaN, as is what lies between the pages.
    """

    a: torch.Tensor
    b: torch.Tensor
    part_ends: list[int]
    rank_pages: torch.Tensor
    num_rank_pages: torch.Tensor
    exact: list[tuple[torch.Tensor, torch.Tensor]]

    def factors(self):
        return self.a, self.b, self.part_ends

    def tables(self):
        return self.rank_pages, self.num_rank_pages

    def added(self, slots, x, magnitude=lambda t: t):
        """What the adapters in the slots of rows add to y, for rows x in float64; or, with `abs`, to its magnitude."""
        rows = torch.zeros(len(slots), self.part_ends[-1], dtype=torch.float64)
        for row, slot in enumerate(slots):
            if slot >= 0:
                a, b = (magnitude(t) for t in self.exact[slot])
                h = (magnitude(x[row]) @ own.T for own in a)
                parts = zip(h, [0, *self.part_ends[:-1]], self.part_ends, strict=True)
                rows[row] = torch.cat([own @ b[:, start:end] for own, start, end in parts])
        return rows


def make_pools(rng, ranks, widths, in_features, dtype, device):
    """Random adapters of these ranks, for merged layers of these widths. Rank 0: the adapter has no page."""
    needed, out_features = [-(-rank // RANK_PAGE) for rank in ranks], sum(widths)
    num_pages = sum(needed) + 2
    # As where the pools of several layers are one tensor, pages do not follow each other at once.
    a = torch.full((num_pages, len(widths) + 1, RANK_PAGE, in_features), torch.nan)[:, :-1]
    b = torch.full((num_pages, RANK_PAGE + 1, out_features), torch.nan)[:, :-1]
    free = rng.sample(range(num_pages), num_pages)
    width = max(*needed, 1) + rng.randint(0, 2)
    rank_pages = torch.full((len(ranks), width), 2**30, dtype=torch.int32)
    exact = []
    for slot, (rank, count) in enumerate(zip(ranks, needed, strict=True)):
        own_a = torch.zeros(len(widths), count * RANK_PAGE, in_features)
        own_b = torch.zeros(count * RANK_PAGE, out_features)
        own_a[:, :rank] = torch.randn(len(widths), rank, in_features) * in_features**-0.5
        own_b[:rank] = torch.randn(rank, out_features)
        own_a, own_b = own_a.to(dtype), own_b.to(dtype)
        exact.append((own_a.double(), own_b.double()))
        for i in range(count):
            page = rank_pages[slot, i] = free.pop()
            part = slice(i * RANK_PAGE, (i + 1) * RANK_PAGE)
            a[page], b[page] = own_a[:, part], own_b[part]
    # `to` would make pages contiguous.
    a, b = (t._base.to(dtype).to(device)[:, :-1] for t in (a, b))
    ends = [sum(widths[: i + 1]) for i in range(len(widths))]
    counts = torch.tensor(needed, dtype=torch.int32, device=device)
    return Pools(a, b, ends, rank_pages.to(device), counts, exact)


def inside_nan(values, dtype, device):
    """A tensor of these rows, and the one that surrounds it with NaN."""
    rows, columns = values.shape
    around = torch.full((rows + 2, columns + 16), torch.nan, dtype=dtype, device=device)
    inner = around[1:-1, 8:-8]
    inner.copy_(values)
    return inner, around


def check_added(y, before, around, slots, added, magnitude):
    """y and what surrounds it, where `added`, whose terms have this sum of magnitudes, is expected in rows of slots."""
    mine = torch.tensor([slot >= 0 for slot in slots], dtype=torch.bool)
    assert torch.equal(y.cpu()[~mine], before[~mine]), "rows without an adapter are as they were"
    exact, size = before.double() + added, before.double().abs() + magnitude
    assert ((y.double().cpu() - exact).abs() <= PRECISION[y.dtype] * size)[mine].all()
    around[1:-1, 8:-8] = torch.nan
    assert around.isnan().all(), "nothing around y is written"


def check_add_lora(pools, slots, dtype, device):
    in_features, out_features = pools.a.shape[-1], pools.part_ends[-1]
    x, _around = inside_nan(torch.randn(len(slots), in_features), dtype, device)
    y, around = inside_nan(torch.randn(len(slots), out_features), dtype, device)
    before = y.cpu().clone()
    order, ends = group_by_slot(torch.tensor(slots, dtype=torch.int32, device=device), len(pools.exact))
    add_lora(y, x, *pools.factors(), order, ends, *pools.tables())
    given = slots, x.double().cpu()
    check_added(y, before, around, slots, pools.added(*given), pools.added(*given, torch.abs))


def draw_slots(rng, rows, num_slots):
    """A slot for each row: some rows have no adapter, some adapters no row, and one may have nearly all."""
    hot = rng.randrange(num_slots)
    present = [-1, *rng.sample(range(num_slots), rng.randint(1, num_slots))]
    return [hot if rng.random() < 0.3 else rng.choice(present) for _ in range(rows)]


@pytest.mark.interpret
@pytest.mark.parametrize("device", DEVICES)
def test_group_by_slot_of_random_slots_sorts_rows_that_have_one(device, rng):
    for rows in (0, 1, rng.randint(2, 40), rng.randint(300, 400), *((5000,) if device == "cuda" else ())):
        num_slots = rng.choice((1, 3, 8, 40))
        slots = torch.tensor(draw_slots(rng, rows, num_slots), dtype=torch.int32)
        order, ends = group_by_slot(slots.to(device), num_slots)
        assert (order.dtype, order.shape, ends.dtype, ends.shape) == (torch.int32, (rows,), torch.int32, (num_slots,))
        counts = [int((slots == slot).sum()) for slot in range(num_slots)]
        assert ends.tolist() == [sum(counts[: i + 1]) for i in range(num_slots)]
        expected = [row for slot in range(num_slots) for row in range(rows) if slots[row] == slot]
        assert order[: len(expected)].tolist() == expected


@pytest.mark.interpret(dtype=[torch.float16, torch.float32])  # the interpreter cannot multiply bfloat16
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", PRECISION, ids=str)
def test_add_lora_of_random_adapters_matches_float64(dtype, device, rng):
    # Kernels for many rows are others than those for few, but in float32.
    many = rng.randint(513, 2000) if device == "cuda" else rng.randint(513, 550) if dtype != torch.float32 else 70
    for rows in (1, rng.randint(2, 40), many):
        ranks = [rng.choice((0, 1, 8, 16, 17, 64)) for _ in range(rng.randint(1, 6))]
        widths = rng.choice(([40], [24], [48, 16, 16], [64, 64], [130, 30]))
        pools = make_pools(rng, ranks, widths, rng.choice((64, 100, 600, 1104)), dtype, device)
        check_add_lora(pools, draw_slots(rng, rows, len(ranks)), dtype, device)


@pytest.mark.interpret
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_add_lora_of_ranks_from_1_to_256_in_a_batch_matches_float64(dtype, device, rng):
    pools = make_pools(rng, [1, 256, 16, 100], [64, 32], rng.choice((128, 1300)), dtype, device)
    check_add_lora(pools, [rng.randrange(4) for _ in range(12)], dtype, device)


@pytest.mark.interpret(dtype=[torch.float16])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_add_lora_to_nearly_the_opposite_rounds_nothing_in_between(dtype, device, rng):
    """The sum is small, so that a rounding of one of its terms, or of h, to 16 bits would be as large."""
    pools = make_pools(rng, [16, 64], [96, 32], 600, dtype, device)
    for rows in (6, 520):
        slots = [rng.randrange(2) for _ in range(rows)]
        x = torch.randn(rows, 600).to(device, dtype)
        added, magnitude = (pools.added(slots, x.double().cpu(), f) for f in (lambda t: t, torch.abs))
        y = (-added).to(device, dtype)
        exact = added + y.double().cpu()
        order, ends = group_by_slot(torch.tensor(slots, dtype=torch.int32, device=device), 2)
        add_lora(y, x, *pools.factors(), order, ends, *pools.tables())
        bound = 1e-5 * magnitude + PRECISION[dtype] * exact.abs()
        assert ((y.double().cpu() - exact).abs() <= bound).all()


@pytest.mark.interpret
@pytest.mark.parametrize("device", DEVICES)
def test_add_lora_of_no_rows_or_of_rows_without_adapter_writes_nothing(device, rng):
    pools = make_pools(rng, [16, 3], [32, 16], 64, torch.float32, device)
    for slots in ([], [-1], [-1] * 20):
        check_add_lora(pools, slots, torch.float32, device)


@pytest.mark.interpret
@pytest.mark.parametrize("device", DEVICES)
def test_add_lora_of_rows_with_a_leading_dimension_equals_that_of_rows(device, rng):
    pools = make_pools(rng, [16, 20], [32, 16], 64, torch.float32, device)
    slots = torch.tensor([1, -1, 0, 1], dtype=torch.int32, device=device)
    x, y = torch.randn(4, 64).to(device), torch.randn(4, 48).to(device)
    batch_y = y.clone()[None]
    for out, given in ((y, x), (batch_y, x[None])):
        add_lora(out, given, *pools.factors(), *group_by_slot(slots, 2), *pools.tables())
    assert torch.equal(batch_y[0], y)


@pytest.mark.interpret
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_add_lora_of_a_row_beside_other_rows_has_the_same_bits(dtype, device, rng, products_in_order):
    """For equal numbers of rows, wherever the row stands, and whatever the others are."""
    rows, ranks = rng.choice((5, 33)), [16, 40, 8]
    pools = make_pools(rng, ranks, [48, 32], 1100, dtype, device)
    x, y = torch.randn(1100).to(device, dtype), torch.randn(80).to(device, dtype)
    results = []
    for others in ([-1] * rows, [1] * rows, draw_slots(rng, rows, 3)):
        place = rng.randrange(rows)
        slots = torch.tensor([*others[:place], 1, *others[place + 1 :]], dtype=torch.int32, device=device)
        batch_x, batch_y = (torch.randn(rows, n).to(device, dtype) for n in (1100, 80))
        batch_x[place], batch_y[place] = x, y
        add_lora(batch_y, batch_x, *pools.factors(), *group_by_slot(slots, 3), *pools.tables())
        results.append(batch_y[place])
    assert all(torch.equal(result, results[0]) for result in results)
    assert not torch.equal(results[0], y)


def test_add_lora_of_tensors_that_do_not_fit_is_refused(rng):
    pools = make_pools(rng, [16], [32, 16], 64, torch.float32, "cpu")
    x, y = torch.randn(2, 64), torch.randn(2, 48)
    tables = (*group_by_slot(torch.zeros(2, dtype=torch.int32), 1), *pools.tables())
    a, b, part_ends = pools.factors()
    for message, given in (
        ("y has shape .2, 40.*48 adjacent", (y[:, :40], x, a, b, part_ends)),
        ("y has shape .*48 adjacent", (torch.randn(48, 2).T, x, a, b, part_ends)),
        ("x is torch.float16", (y, x.half(), a, b, part_ends)),
        ("order has 2 places", (torch.randn(3, 48), torch.randn(3, 64), a, b, part_ends)),
        ("x is .*3, 64", (y, torch.randn(3, 64), a, b, part_ends)),
        ("a is .*2, 16, 32", (y, x[:, :32], a, b, part_ends)),
        ("a is .*1, 16, 64", (y, x, a, b, [48])),
        ("b is torch.float16", (y, x, a, b.half(), part_ends)),
        ("b has strides", (y, x, a, torch.randn(4, 48, 16).mT, part_ends)),
    ):
        with pytest.raises(ValueError, match=message):
            add_lora(*given, *tables)
    order, ends, rank_pages, num_rank_pages = tables
    for given in (
        (order, ends, rank_pages.repeat(2, 1), num_rank_pages),
        (order, ends.repeat(2), rank_pages, num_rank_pages),
        (order, ends.repeat(2), rank_pages.repeat(2, 2)[:, :1], num_rank_pages.repeat(2)),
    ):
        with pytest.raises(ValueError, match="rank_pages has shape"):
            add_lora(y, x, a, b, part_ends, *given)


def check_embedding(pools, tokens, slots, dtype, device, ids_dtype):
    y, around = inside_nan(torch.randn(len(slots), pools.part_ends[-1]), dtype, device)
    before, ids = y.cpu().clone(), torch.tensor(tokens, dtype=ids_dtype, device=device)
    a, b, _ends = pools.factors()
    given = torch.tensor(slots, dtype=torch.int32, device=device)
    add_lora_embedding(y, ids, a.squeeze(1), b, given, *pools.tables())
    one_hot = torch.eye(a.shape[-1], dtype=torch.float64)[tokens]
    check_added(y, before, around, slots, pools.added(slots, one_hot), pools.added(slots, one_hot, torch.abs))


@pytest.mark.interpret
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", PRECISION, ids=str)
def test_add_lora_embedding_of_random_tokens_matches_float64(dtype, device, rng):
    ranks, vocab = [0, 1, 40, 16], 90
    pools = make_pools(rng, ranks, [rng.choice((48, 300))], vocab, dtype, device)
    for rows in (0, 1, rng.randint(2, 30)):
        tokens = [rng.randrange(vocab) for _ in range(rows)]
        ids_dtype = rng.choice((torch.int32, torch.int64))
        check_embedding(pools, tokens, draw_slots(rng, rows, len(ranks)), dtype, device, ids_dtype)


def test_add_lora_embedding_of_tensors_that_do_not_fit_is_refused(rng):
    pools = make_pools(rng, [16], [32], 64, torch.float32, "cpu")
    a, b, slots = pools.a.squeeze(1), pools.b, torch.zeros(2, dtype=torch.int32)
    for message, given in (
        ("ids has shape .3", (torch.randn(2, 32), torch.zeros(3).long(), a, b)),
        ("y has shape", (torch.randn(2, 31), torch.zeros(2).long(), a, b)),
        ("a is .*64, 16", (torch.randn(2, 32), torch.zeros(2).long(), a.mT, b)),
    ):
        with pytest.raises(ValueError, match=message):
            add_lora_embedding(*given, slots, *pools.tables())


@pytest.mark.interpret
@pytest.mark.parametrize("device", DEVICES)
def test_add_lora_in_a_compiled_layer_equals_that_of_an_eager_one(device, rng):
    """With inputs of one and of several dimensions, merged outputs that are split afterwards, and other row counts."""
    pools = make_pools(rng, [16, 5, 40], [64, 32], 96, torch.float32, device)
    weight = torch.randn(96, 96, device=device)

    def layer(x, slots):
        order, ends = group_by_slot(slots, 3)
        y = torch.nn.functional.linear(x, weight)
        add_lora(y, x, *pools.factors(), order, ends, *pools.tables())
        left, right = y.split([64, 32], -1)
        return left.sigmoid(), right + 1

    # Inductor takes long to compile for a CPU.
    backend = "inductor" if device == "cuda" else "aot_eager"
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=backend)
    with torch.no_grad():
        for rows in (rng.randint(2, 9), rng.randint(10, 40)):
            x = torch.randn(1, rows, 96, device=device)
            slots = torch.tensor(draw_slots(rng, rows, 3), dtype=torch.int32, device=device)
            base = layer(x, torch.full_like(slots, -1))
            for out, expected, without in zip(compiled(x, slots), layer(x, slots), base, strict=True):
                assert torch.allclose(out, expected, rtol=1e-4, atol=1e-4)
                assert bool((slots < 0).all()) == torch.allclose(out, without, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_add_lora_in_a_cuda_graph_reads_the_tables_of_each_replay(dtype, rng):
    """Each launch overlaps the one before: the product, both launches for its adapters, and the next layer's."""
    rows, in_features = rng.choice((1, 8, 64, 600)), 1024
    pools = make_pools(rng, [16, 64, 5, 33], [1024], in_features, dtype, "cuda")
    weight = torch.randn(1024, 1024).div(32).to("cuda", dtype)
    slots, x = torch.zeros(rows, dtype=torch.int32, device="cuda"), torch.randn(rows, 1024).to("cuda", dtype)

    def layers():
        order, ends = group_by_slot(slots, 4)
        outputs, given = [], x
        for _ in range(3):
            y = given @ weight.T
            before = y.clone()
            add_lora(y, given, *pools.factors(), order, ends, *pools.tables())
            outputs.append((given, before, y))
            given = y.sigmoid()
        return outputs

    layers()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = layers()
    for _ in range(20):
        drawn = draw_slots(rng, rows, 4)
        slots.copy_(torch.tensor(drawn, dtype=torch.int32))
        x.normal_()
        graph.replay()
        mine = torch.tensor(drawn) >= 0
        for given, before, y in outputs:
            added = [pools.added(drawn, given.double().cpu(), f) for f in (lambda t: t, torch.abs)]
            exact, size = before.double().cpu() + added[0], before.double().cpu().abs() + added[1]
            assert ((y.double().cpu() - exact).abs() <= PRECISION[dtype] * size)[mine].all()
            assert torch.equal(y.cpu()[~mine], before.cpu()[~mine])
