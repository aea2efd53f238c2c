"""Keys and values that require grad are stored detached, in caches that may require grad or be inference tensors."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import quire
from helpers.autograd import MODES, computed, devices, leaf, modes, parameter
from helpers.public_calls import (
    DIM,
    F32,
    KV_HEADS,
    PAGE,
    cache,
    ints,
    rows,
    tables,
)


def storing(form: str, device: str):
    """A function that stores a key and a value, and the cache that holds them: its tensors, new or given."""
    places, table = (ints(0, 0, 1).to(device), ints(5, 6, 1).to(device)), tables(device)
    where = table["indices"], table["indptr"], table["last_page_len"]
    if form == "pool":
        pool = quire.PagedKVCache(1, KV_HEADS, DIM, PAGE, 4, device, F32)
        pool.begin_forward(3)
        return lambda key, value, held: pool.append(0, key, value), [pool.data]
    if form == "latent":
        held = [rows(4, PAGE, device, 2 * DIM), rows(4, PAGE, device, 2 * DIM)]
        return lambda key, value, held: quire.append_paged_mla_kv_cache(
            key.flatten(1), value.flatten(1), *places, *held, *where
        ), held  # fmt: skip
    if form == "store":
        slots = torch.tensor([9, 10, 13], device=device)
        return lambda key, value, held: quire.steps.store(tuple(held), key, value, slots), list(cache(device))
    if form == "rope":
        return storing_fp8(where[:2], places, device)
    layout = form[:3]
    pair = [x if layout == "NHD" else x.transpose(1, 2).contiguous() for x in cache(device)]
    held = [torch.stack(pair, 1)] if "5-D" in form else pair
    return lambda key, value, held: quire.append_paged_kv_cache(
        key, value, *places, tuple(held) if len(held) == 2 else held[0], *where, layout
    ), held  # fmt: skip


def storing_fp8(where, places, device):
    cos_sin = torch.randn(16, DIM, device=device)
    held = [torch.zeros(4, PAGE, KV_HEADS, DIM, device=device).to(torch.float8_e4m3fn) for _ in range(2)]

    def put(key, value, held):
        quire.rope.rope_quantize_fp8_append_paged_kv_cache(
            key.repeat(1, 2, 1), key, None, None, value, cos_sin, places[1], tuple(held), *where, *places,
            page_size=PAGE, quant_scale_kv=0.5,
        )  # fmt: skip

    return put, held


FORMS = ["NHD pair", "HND pair", "NHD 5-D", "HND 5-D", "pool", "latent", "store", "rope"]
forms = pytest.mark.parametrize("form", FORMS)


@devices
@modes
@forms
def test_store_of_keys_that_require_grad_leaves_the_cache_without_grad(form, mode, device):
    """The cache holds the numbers, and is as it was to autograd; so are the keys, whose own graph lives on."""
    store, held = storing(form, device)
    source = leaf(rows(3, KV_HEADS, device))
    expected = [x.clone() for x in held] if form != "pool" else None
    if expected is not None:
        store(source.detach(), source.detach() * 2, expected)
    with MODES[mode]():
        key = source * 1
        store(key, nn.Parameter(source.detach() * 2), held)
        store(source, key * 2, held)
    for x in held:
        assert (x.requires_grad, x.grad_fn, x.is_leaf) == (False, None, True)
    if expected is not None:
        assert all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in zip(held, expected, strict=True))
    else:
        assert torch.equal(held[0][0, 0, 0, :3], source)
        assert torch.equal(held[0][0, 0, 1, :3], source * 2)
    if mode == "grad":
        key.sum().backward()
        assert torch.equal(source.grad, torch.ones_like(source))


@devices
@modes
@pytest.mark.parametrize("make", [leaf, computed, parameter])
@pytest.mark.parametrize("form", [x for x in FORMS if x not in ("pool", "rope")])
def test_store_to_a_cache_that_requires_grad_writes_to_it(form, make, mode, device):
    store, held = storing(form, device)
    needing, expected = [make(x) for x in held], [x.clone() for x in held]
    before = [x.grad_fn for x in needing]
    key, value = rows(3, KV_HEADS, device), rows(3, KV_HEADS, device)
    store(key, value, expected)
    with MODES[mode]():
        store(key, value, needing)
        store(leaf(key), value, needing)
    assert [x.grad_fn for x in needing] == before
    assert all(torch.equal(x, y) for x, y in zip(needing, expected, strict=True))


@devices
@modes
@pytest.mark.parametrize("make", [leaf, computed])
def test_copy_of_pages_that_require_grad_copies_them(make, mode, device):
    pages, to = rows(4, PAGE, device), torch.tensor([[0, 1], [3, 2]])
    source, target, within = make(pages), make(rows(4, PAGE, device)), make(pages)
    fns = target.grad_fn, within.grad_fn
    expected = rows(4, PAGE, device)
    with MODES[mode]():
        quire.cache.swap_blocks(source, target, to)
        quire.cache.swap_blocks(source, expected, to)
        quire.cache.copy_blocks([within], to)
    assert (target.grad_fn, within.grad_fn) == fns
    assert not expected.requires_grad
    for x in (target, expected, within):
        assert torch.equal(x[[1, 2]], pages[[0, 3]])


@forms
def test_compiled_store_leaves_the_cache_without_grad(form):
    torch.compiler.reset()
    if form == "pool":
        pytest.skip("its tables are made on the host")
    store, held = storing(form, "cpu")
    source = leaf(rows(3, KV_HEADS, "cpu"))
    expected, needing = [x.clone() for x in held], [leaf(x) if x.element_size() > 1 else x.clone() for x in held]
    store(source.detach(), source.detach() * 2, expected)

    def step(x, held):
        key = x * 1
        store(key, key * 2, held)
        return key.sum()

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    compiled(source, held).backward()
    assert torch.equal(source.grad, torch.ones_like(source))
    for x, y in zip(held, expected, strict=True):
        assert (x.requires_grad, x.grad_fn) == (False, None)
        assert torch.equal(x.view(torch.uint8), y.view(torch.uint8))
    with torch.no_grad():
        compiled(source, needing)
    for x, y in zip(needing, expected, strict=True):
        assert torch.equal(x.detach().view(torch.uint8), y.view(torch.uint8))
    torch.compiler.reset()


@devices
@forms
def test_store_to_inference_tensors_equals_store_to_others(form, device):
    """Made in inference mode, used in and out of it."""
    with torch.inference_mode():
        store, held = storing(form, device)
        key, value = rows(3, KV_HEADS, device), rows(3, KV_HEADS, device)
        inside = [x.clone() for x in held]
        store(key, value, inside)
    store(key, value, held)
    if form != "pool":
        assert all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in zip(held, inside, strict=True))
    store(leaf(key.clone()) * 1, value, held)
    assert all(x.is_inference() and not x.requires_grad for x in held)
