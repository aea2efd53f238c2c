"""Tensors that require grad are refused where gradients would be lost, and detached where they are weights."""

from __future__ import annotations

import copy
import re
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

import quire
from helpers.autograd import MODES, computed, devices, each, flat, leaf, modes, parameter
from helpers.public_calls import (
    DIM,
    F32,
    HEADS,
    KV_HEADS,
    LAYER,
    PAGE,
    all_calls,
    cache,
    decoder,
    ints,
    layer,
    prefiller,
    rows,
    tables,
)
from quire.kernels import ops, registry, torch_internals
from quire.wrappers.planner import Planner

REFUSED = "requires grad, but Quire computes no gradients: call it under torch.no_grad"


@devices
@pytest.mark.parametrize("make", [leaf, computed, parameter])
def test_call_with_an_argument_that_requires_grad_is_refused_by_name(make, device):
    """Each argument whose gradient there would be is refused by its name; without grad mode it is like any other."""
    wrong = []
    calls = all_calls(device)
    for name, call in calls.items():
        for arg in call.differentiable:
            if call.given[arg] is None:
                continue
            given = {**call.given, arg: each(call.given[arg], make)}
            try:
                call.function(**given)
                wrong.append(f"{name}({arg}): no error")
            except ValueError as error:
                if not re.match(rf"({arg}|{call.inner.get(arg, arg)}) {REFUSED}", str(error)):
                    wrong.append(f"{name}({arg}): {error}")
    assert not wrong, "\n" + "\n".join(wrong)


@devices
@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
def test_calls_without_grad_mode_take_tensors_that_require_grad(mode, device):
    for name, call in all_calls(device).items():
        with MODES[mode]():
            detached = call.function(**copied(call.given))
            needing = {
                x: each(given, parameter) if x in call.differentiable else given for x, given in call.given.items()
            }
            result = call.function(**copied(needing))
        for a, b in zip(flat(detached), flat(result), strict=True):
            if isinstance(a, Tensor):
                torch.testing.assert_close(a.float(), b.float(), msg=name, equal_nan=True)
                assert not b.requires_grad or b.is_leaf, name


def copied(given):
    return {
        name: each(x, lambda t: copy.copy(t) if isinstance(t, nn.Parameter) else t.detach().clone())
        for name, x in given.items()
    }


@devices
@pytest.mark.parametrize("backend", ["auto", "reference", "triton"])
def test_each_family_refuses_tensors_that_require_grad(backend, device):
    if backend == "triton" and not ops.on_triton(torch.device(device)):
        pytest.skip("Triton is neither interpreted nor on a GPU")
    q, (k, v) = rows(2, HEADS, device), cache(device)
    wrapper = quire.BatchDecodeWithPagedKVCacheWrapper(torch.empty(0, device=device), backend=backend)
    wrapper.plan(**tables(device), **layer())
    expected = wrapper.run(q, (k, v))
    for name, given in (("q", (leaf(q), (k, v))), ("k", (q, (leaf(k), v))), ("v", (q, (k, leaf(v))))):
        with pytest.raises(ValueError, match=f"^{name} {REFUSED}"):
            wrapper.run(*given)
        with torch.no_grad():
            torch.testing.assert_close(wrapper.run(*given), expected)
    weights = nn.Parameter(torch.randn(HEADS, device=device)), nn.Parameter(torch.rand(KV_HEADS, device=device) + 0.5)
    options = {"sinks": weights[0], "k_scale": weights[1], "v_scale": weights[1]}
    detached = {name: x.detach() for name, x in options.items()}
    result = wrapper.run(q, (k, v), **options)
    assert not result.requires_grad
    torch.testing.assert_close(result, wrapper.run(q, (k, v), **detached))


@devices
@modes
def test_calls_with_parameters_as_weights_return_no_grad(mode, device):
    """Sinks and scales may be parameters, of every call that takes them; slopes of ALiBi a tensor."""
    names = {"sinks", "sink", "k_scale", "v_scale", "scale_k", "cos_sin_cache"}
    found = set()
    for name, call in all_calls(device).items():
        weights = names & set(call.given)
        found |= weights
        if not weights:
            continue
        detached = call.function(**copied(call.given))
        with MODES[mode]():
            result = call.function(
                **copied({x: each(y, parameter) if x in weights else y for x, y in call.given.items()})
            )
        for a, b in zip(flat(detached), flat(result), strict=True):
            if isinstance(a, Tensor):
                assert not b.requires_grad, name
                torch.testing.assert_close(a.float(), b.float(), msg=name)
    assert found == names
    ones = nn.Parameter(torch.ones(1, device=device))
    decode = all_calls(device)["decode.run"]
    scaled = dict.fromkeys(("q_scale", "k_scale", "v_scale"), ones)
    assert not decode.function(**{**decode.given, **scaled}).requires_grad
    slopes, alibi = nn.Parameter(torch.rand(HEADS, device=device)), {"pos_encoding_mode": "ALIBI"}
    wrappers = [quire.BatchDecodeWithPagedKVCacheWrapper(torch.empty(0, device=device)) for _ in range(2)]
    q, pages = rows(2, HEADS, device), cache(device)
    for wrapper, given in zip(wrappers, (slopes, slopes.tolist()), strict=True):
        wrapper.plan(**tables(device), **layer(), **alibi, alibi_slopes=given)
    torch.testing.assert_close(*(wrapper.run(q, pages) for wrapper in wrappers), rtol=0, atol=0)


@devices
def test_latent_run_with_parameters_as_block_scales_returns_no_grad(device):
    wrapper = quire.BatchMLAPagedAttentionWrapper(torch.empty(0, device=device), backend="reference")
    bf16, fp8 = torch.bfloat16, torch.float8_e4m3fn
    csr = [x.to(device) for x in (ints(0, 1, 2), ints(0, 2, 3), ints(2, 0, 3), ints(7, 2))]
    wrapper.plan(*csr, HEADS, 128, 64, PAGE, True, 0.1, bf16, fp8)
    q = [rows(2, HEADS, device, dim).to(bf16) for dim in (128, 64)]
    held = [rows(4, PAGE, device, dim).to(fp8) for dim in (128, 64)]
    scales = torch.rand(4, PAGE, 1, device=device) + 0.5
    detached = wrapper.run(*q, *held, ckv_scale_arr=scales, kpe_scale=0.5)
    result = wrapper.run(*q, *held, ckv_scale_arr=nn.Parameter(scales), kpe_scale=0.5)
    assert not result.requires_grad
    torch.testing.assert_close(result, detached, rtol=0, atol=0)
    with pytest.raises(ValueError, match=f"ckv_cache {REFUSED}"):
        wrapper.run(*q, held[0].requires_grad_(), held[1], ckv_scale_arr=scales, kpe_scale=0.5)


@pytest.mark.slow
@pytest.mark.parametrize("fullgraph", [True, False])
def test_compiled_calls_refuse_tensors_that_require_grad(fullgraph):
    """Calls compiled for tensors without grad refuse, too. Where graphs must not break, torch raises its own error."""
    torch.compiler.reset()
    wrapper = prefiller("cpu")
    q, (k, v) = rows(5, HEADS, "cpu"), cache("cpu")
    single = (rows(5, KV_HEADS, "cpu"), rows(5, KV_HEADS, "cpu"))
    state = (q, rows(5, HEADS, "cpu")[..., 0].contiguous())
    calls = {
        "q": (lambda q: wrapper.run(q, (k, v)), q),
        "v": (lambda v: wrapper.run(q, (k, v)), v),
        "k": (lambda k: quire.single_prefill_with_kv_cache(q, k, single[1]), single[0]),
        "v_b": (lambda v: quire.merge_state(*state, v, state[1])[0], q + 1),
        "query": (lambda x: quire.apply_rope_with_cos_sin_cache(ints(0, 1, 2, 3, 4), x, single[0], DIM, table)[0], q),
    }
    table = torch.randn(16, DIM)
    error = (ValueError, torch._dynamo.exc.Unsupported) if fullgraph else ValueError
    for name, (function, x) in calls.items():
        compiled = torch.compile(function, backend="aot_eager", fullgraph=fullgraph)
        torch.testing.assert_close(compiled(x), function(x), rtol=0, atol=0)
        for given in (leaf(x), computed(x)):
            with pytest.raises(error, match=f"{name} {REFUSED}"):
                compiled(given)
            with torch.no_grad():
                torch.testing.assert_close(compiled(given), function(x), rtol=0, atol=0)
    torch.compiler.reset()


@devices
def test_compiled_layer_with_parameters_as_weights_returns_no_grad(device):
    torch.compiler.reset()
    wrapper, q, (k, v) = decoder(device), rows(2, HEADS, device), cache(device)
    weights = nn.ParameterList([torch.randn(HEADS, device=device), torch.rand(KV_HEADS, device=device) + 0.5])

    def attend(q, k, v):
        return wrapper.run(q, (k, v), sinks=weights[0], k_scale=weights[1], v_scale=weights[1] * 2)

    result = torch.compile(attend, backend="aot_eager", fullgraph=True)(q, k, v)
    assert not result.requires_grad
    torch.testing.assert_close(result, attend(q, k, v), rtol=0, atol=0)
    torch.compiler.reset()


@pytest.fixture
def repeated(monkeypatch):
    """A list with an entry for each run that was replayed. Wrappers are patched to replay runs without a GPU."""
    done = []
    replay = lambda *addresses: bool(done.append(1)) or True  # noqa: E731
    monkeypatch.setattr("quire.kernels.attention._compute", lambda *given: replay)
    monkeypatch.setattr(Planner, "_keeps_launches", lambda wrapper: True)
    monkeypatch.setattr(registry, "choose", lambda *given: registry.family("cpu"))
    monkeypatch.setattr(torch_internals, "current_device", lambda: None)
    monkeypatch.setattr(torch_internals, "current_raw_stream", lambda index: 0)
    return done


def test_repeated_run_refuses_tensors_that_require_grad(repeated):
    """A call that was remembered for tensors that do not require grad says nothing of those that do."""
    empty = torch.empty(0, device="meta")
    decode, latent = quire.BatchDecodeWithPagedKVCacheWrapper(empty), quire.BatchMLAPagedAttentionWrapper(empty)
    decode.plan(*(x.to("meta") for x in tables("cpu").values()), *LAYER, q_data_type=F32)
    of_latent = [x.to("meta") for x in (ints(0, 1, 2), ints(0, 2, 3), ints(2, 0, 3), ints(7, 2))]
    latent.plan(*of_latent, HEADS, 128, 64, PAGE, True, 0.1, F32, F32)
    q, (k, v) = rows(2, HEADS, "meta"), cache("meta")
    into = {"out": torch.empty_like(q), "lse": torch.empty(2, HEADS, device="meta")}
    parts = [
        rows(2, HEADS, "meta", 128),
        rows(2, HEADS, "meta", 64),
        rows(4, PAGE, "meta", 128),
        rows(4, PAGE, "meta", 64),
    ]
    runs = {
        "q": (lambda x: decode.run(x, (k, v)), q),
        "k": (lambda x: decode.run(q, (x, v)), k),
        "v": (lambda x: decode.run(q, (k, x)), v),
        "out": (lambda x: decode.run(q, (k, v), **{**into, "out": x}), into["out"]),
        "lse": (lambda x: decode.run(q, (k, v), **{**into, "lse": x}), into["lse"]),
        "q_nope": (lambda x: latent.run(x, *parts[1:]), parts[0]),
        "q_pe": (lambda x: latent.run(parts[0], x, *parts[2:]), parts[1]),
        "ckv_cache": (lambda x: latent.run(*parts[:2], x, parts[3]), parts[2]),
        "kpe_cache": (lambda x: latent.run(*parts[:3], x), parts[3]),
    }
    for name, (run, x) in runs.items():
        run(x), run(x)
        count = len(repeated)
        assert count, name
        with pytest.raises(ValueError, match=f"^{name} {REFUSED}"):
            run(leaf(x))
        with torch.no_grad():
            run(leaf(x))
        assert len(repeated) == count + 1, "and without grad mode it is repeated"
        repeated.clear()
    sinks = torch.randn(HEADS, device="meta")
    decode.run(q, (k, v), sinks=sinks)
    decode.run(q, (k, v), sinks=nn.Parameter(sinks))
    assert len(repeated) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_repeated_run_on_a_gpu_refuses_tensors_that_require_grad(backend):
    """Decode and prefill in 16 bits, which Hopper's kernels compute where there are any."""
    bf16, dim = torch.bfloat16, 128
    empty, table = torch.empty(1 << 26, dtype=torch.uint8, device="cuda"), tables("cuda")
    decode = quire.BatchDecodeWithPagedKVCacheWrapper(empty, backend=backend)
    decode.plan(**table, **layer(q_data_type=bf16, head_dim=dim))
    prefill = quire.BatchPrefillWithPagedKVCacheWrapper(empty, backend=backend)
    prefill.plan(ints(0, 3, 5).cuda(), *table.values(), HEADS, KV_HEADS, dim, PAGE, q_data_type=bf16, causal=True)
    k, v = torch.randn(2, 4, PAGE, KV_HEADS, dim, device="cuda").to(bf16)
    sinks = torch.randn(HEADS, device="cuda")
    for wrapper, tokens in ((decode, 2), (prefill, 5)):
        q = rows(tokens, HEADS, "cuda", dim).to(bf16)
        for options in ({}, {"sinks": sinks}):
            expected = wrapper.run(q, (k, v), **options)
            assert wrapper.planned.launches, "nothing is remembered"
            torch.testing.assert_close(wrapper.run(q, (k, v), **options), expected, rtol=0, atol=0)
            for name, given in (("q", (leaf(q), (k, v))), ("k", (q, (leaf(k), v))), ("v", (q, (k, leaf(v))))):
                with pytest.raises(ValueError, match=f"^{name} {REFUSED}"):
                    wrapper.run(*given, **options)
                with torch.no_grad():
                    torch.testing.assert_close(wrapper.run(*given, **options), expected, rtol=0, atol=0)
        result = wrapper.run(q, (k, v), sinks=nn.Parameter(sinks))
        torch.testing.assert_close(result, expected, rtol=0, atol=0)
        assert not result.requires_grad


@devices
@pytest.mark.parametrize("inside", [False, True])
def test_calls_with_inference_tensors_equal_those_with_others(inside, device, rng):
    """Tensors made in inference mode, outputs among them, may be used outside of it, and the other way round."""
    makes, uses = (nullcontext, torch.inference_mode) if inside else (torch.inference_mode, nullcontext)
    seed = rng.randrange(1 << 31)
    torch.manual_seed(seed)
    detached = {name: call.function(**call.given) for name, call in all_calls(device).items()}
    torch.manual_seed(seed)
    with makes():
        calls = all_calls(device)
    calls.pop("get_batch_indices_positions")  # writes by torch's own operations, which refuse to
    for name, call in calls.items():
        with uses():
            result = call.function(**call.given)
        for a, b in zip(flat(detached[name]), flat(result), strict=True):
            if isinstance(a, Tensor):
                torch.testing.assert_close(a.float(), b.float(), msg=name)
