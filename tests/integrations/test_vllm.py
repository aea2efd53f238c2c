"""The plug-in of vLLM, called as vLLM calls it over a cache with real keys and values, against the definition."""

from __future__ import annotations

import sys
from importlib.metadata import entry_points
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from helpers.vllm_modules import INSTALLED, REGISTERED, SETTINGS, AttentionBackendEnum, vllm_modules
from helpers.vllm_steps import Steps, VllmAttentionBackend, config
from quire.bench.batches import relative_error
from quire.definition import attention_spec
from quire.integrations import vllm

BOUNDS = {torch.float32: 2e-6, torch.bfloat16: 3e-3}
LAYERS: dict[str, dict[str, Any]] = {
    "default": {},
    "window": {"window_left": 24},
    "soft cap": {"logits_soft_cap": 8.0},
    "window and soft cap": {"window_left": 19, "logits_soft_cap": 20.0},
    "alibi": {"pos_encoding": "ALIBI"},
}


def steps(rng, dtype=torch.float32, sinks=False, **options: Any) -> Steps:
    changes = options.pop("changes", {})
    kv_heads = rng.choice((1, 2))
    spec = attention_spec(
        num_qo_heads=kv_heads * rng.choice((1, 3, 4)), num_kv_heads=kv_heads, head_dim_qk=64, q_dtype=dtype, **changes
    )
    if changes.get("pos_encoding") == "ALIBI":
        spec = spec.replace(slopes=tuple(rng.random() for _ in range(spec.num_qo_heads)))
    given = torch.randn(spec.num_qo_heads).to(dtype) if sinks else None
    return Steps(spec, sinks=given, **options)


def check(computed: tuple[torch.Tensor, torch.Tensor]) -> None:
    out, exact = computed
    assert relative_error(out, exact) < BOUNDS[out.dtype]


@pytest.mark.parametrize("layout", ["NHD", "HND", "layers"])
@pytest.mark.parametrize("name", LAYERS)
def test_forward_prefill_chunks_and_decodes_give_the_oracles_output(name, layout, rng):
    run = steps(rng, changes=LAYERS[name], layout=layout, sinks=name == "window")
    run.start(3)
    check(run.step([20, 1, rng.randrange(2, 40)]))
    check(run.step([1, 1, 1]))
    run.start(1)
    check(run.step([1, 1, 1, 33]))
    check(run.step([1, 17, 1, 5]))
    check(run.step([1, 1, 1, 1]))


def test_forward_of_requests_with_cached_prefixes_gives_the_oracles_output(rng):
    run = steps(rng)
    first = run.start(1)[0]
    check(run.step([50]))
    run.start(2, first, 2)
    check(run.step([1, 18, 7]))
    check(run.step([1, 1, 1]))


@pytest.mark.parametrize("spec_tokens", [1, 4])
def test_forward_of_drafts_gives_the_oracles_output(spec_tokens, rng):
    run = steps(rng, spec_tokens=spec_tokens)
    assert run.builder.reorder_batch_threshold == 1 + spec_tokens
    run.start(3)
    check(run.step([1 + spec_tokens, 1, 30]))
    check(run.step([1 + spec_tokens] * 3))
    check(run.step([1, 1 + spec_tokens, 1]))
    check(run.step([1 + spec_tokens, 1, 20]))


@pytest.mark.parametrize("measured", [False, True])
@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "fp8_e4m3", "fp8_e5m2"])
def test_forward_over_fp8_applies_the_layers_scales(kv_cache_dtype, measured, rng):
    scales = (rng.choice((0.5, 0.3)), 2.0)
    run = steps(
        rng, torch.bfloat16, kv_cache_dtype=kv_cache_dtype, scales=scales, measured=measured, layout="HND", sinks=True
    )
    run.start(2)
    check(run.step([rng.randrange(2, 40), 5]))
    check(run.step([1, 1], pad_tokens=2))


def test_forward_of_padded_steps_gives_the_oracles_output(rng):
    """Full graphs pad requests, which have no tokens and lengths of 0, and piecewise ones pad tokens alone."""
    run = steps(rng)
    run.start(3)
    check(run.step([9, 3, 21], pad_tokens=7))
    check(run.step([1, 1, 1], pad_reqs=5, pad_tokens=5))
    check(run.step([1, 1, 14], pad_reqs=2, pad_tokens=3))


@pytest.mark.parametrize("window", [-1, 11])
def test_forward_not_causal_sees_later_tokens(window, rng):
    run = steps(rng, changes={"causal": False, "window_left": window})
    run.start(2)
    check(run.step([12, 25]))
    check(run.step([3, 9]))


def test_forward_of_a_shared_prefix_gives_the_oracles_output(rng):
    run = steps(rng, num_blocks=200, max_blocks=24, sinks=True)
    first = run.start(1)[0]
    check(run.step([16 * 17]))
    run.start(9, first, 17)
    q_lens = [1, *(rng.randrange(1, 30) for _ in range(9))]
    builder = run.builder
    options = (4, 2, False, False, False, 132, 1)
    assert builder.use_cascade_attention(272, q_lens, *options)
    assert not builder.use_cascade_attention(240, q_lens, *options)
    assert not builder.use_cascade_attention(272, q_lens[:7], *options)
    assert not builder.use_cascade_attention(272, q_lens, 4, 2, False, True, False, 132, 1)
    check(run.step(q_lens, prefix=272))
    check(run.step([1] * 10, prefix=272))


def test_one_builder_serves_layers_of_different_kinds(rng):
    """Layers of a group may differ in windows and soft caps, and take turns in every step."""
    run = steps(rng)
    other = steps(rng, changes={"window_left": 13, "logits_soft_cap": 9.0})
    other.spec = other.spec.replace(num_qo_heads=run.spec.num_qo_heads, num_kv_heads=run.spec.num_kv_heads)
    other = Steps(other.spec)
    run.start(2)
    for q_lens in ([20, 30], [1, 1], [1, 22]):
        slots = run.write(q_lens)
        metadata, q = run.builder.build(0, run.metadata(q_lens, slots=slots)), run.queries(q_lens)
        for _ in range(2):
            for layer in (run, other):
                out = torch.empty_like(q)
                layer.impl.forward(run.layer, q, q, q, run.cache, metadata, out)
                layer.sequences = run.sequences
                check((out, layer.exact(q, q_lens)))


def test_capture_plans_for_the_longest_query_only_without_mixed_graphs(rng):
    for mode, q_len, role in (("PIECEWISE", 3, "decode"), ("NONE", 1, "decode"), ("FULL", None, "extend")):
        run = steps(rng, spec_tokens=2, mixed_mode=mode)
        run.start(2)
        q_lens = [q_len or 1] * 2
        run.write(q_lens)
        metadata = run.builder.build_for_cudagraph_capture(run.metadata(q_lens))
        (launch,) = metadata.launches
        assert (launch._role, launch._max_q_len) == (role, q_len)
    assert type(run.builder)._cudagraph_support.name == "ALWAYS"
    assert run.builder.update_draft_decode_metadata(metadata) is None


def test_capture_by_a_derived_builder_has_what_its_build_changes(rng):
    """vLLM derives builders for layers that see later tokens, and replaces `build` alone."""

    class Bidirectional(VllmAttentionBackend.get_builder_cls()):
        def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
            changed = SimpleNamespace(**vars(common_attn_metadata) | {"causal": False})
            return super().build(common_prefix_len, changed, fast_build)

    run = steps(rng, mixed_mode="FULL", changes={"causal": False})
    builder = Bidirectional(SimpleNamespace(block_size=16), ["layer"], config(0, "FULL"), torch.device("cpu"))
    run.start(2)
    slots = run.write([12, 25])
    given = run.metadata([12, 25], slots=slots)
    given.causal = True
    q = run.queries([12, 25])
    for metadata in (builder.build(0, given), builder.build_for_cudagraph_capture(given)):
        out = torch.full_like(q, torch.nan)
        run.impl.forward(run.layer, q, q, q, run.cache, metadata, out)
        check((out, run.exact(q, [12, 25])))


@pytest.mark.parametrize("q_lens", [[1, 1], [3, 1], [40, 2]])
def test_build_takes_the_longest_query_as_numpys_number(q_lens, rng):
    """As vLLM has it where it divides requests into chunks of attention."""
    run = steps(rng)
    run.start(2)
    slots = run.write(q_lens)
    given = run.metadata(q_lens, slots=slots)
    given.max_query_len = np.int32(given.max_query_len)
    q = run.queries(q_lens)
    out = torch.full_like(q, torch.nan)
    run.impl.forward(run.layer, q, q, q, run.cache, run.builder.build(0, given), out)
    check((out, run.exact(q, q_lens)))


def test_backend_refuses_a_cache_of_another_type_of_16_bits():
    def reason(dtype, kv_cache_dtype):
        return VllmAttentionBackend.supports_combination(
            64, dtype, kv_cache_dtype, 16, False, False, False, False, None
        )

    assert reason(torch.bfloat16, "float16") == "kv_cache_dtype float16 with dtype bfloat16 not supported"
    assert reason(torch.float32, "bfloat16") is not None
    for kv_cache_dtype in ("auto", "bfloat16", "fp8", None):
        assert reason(torch.bfloat16, kv_cache_dtype) is None


def test_first_step_has_launches_for_prompts_of_any_length_whose_output_is_replaced(rng):
    for q_lens in ([1, 1, 1], [2, 2], [9, 1]):
        run = steps(rng)
        run.start(len(q_lens))
        run.write(q_lens)
        found = [(x._role, x._max_q_len) for x in run.builder.build(0, run.metadata(q_lens)).launches]
        assert found[0] == ("extend", None)
        assert [length for _, length in found[1:-1]] == [n for n in (2, 4, 8, 16, 32, 64) if n >= max(q_lens)]
        later = run.builder.build(0, run.metadata(q_lens)).launches
        assert len(later) == 1
        run = steps(rng)
        run.start(len(q_lens))
        check(run.step(q_lens))


def test_forward_without_metadata_fills_the_output(rng):
    run = steps(rng)
    q = run.queries([3])
    out = torch.full(q.shape, torch.nan)
    assert run.impl.forward(run.layer, q, q, q, run.cache, None, out).count_nonzero() == 0


def test_unsupported_options_are_refused(rng):
    run = steps(rng)
    run.start(1)
    run.write([3])
    metadata, q = run.builder.build(0, run.metadata([3])), run.queries([3])
    with pytest.raises(NotImplementedError, match="outputs of attention that are quantized"):
        run.impl.forward(run.layer, q, q, q, run.cache, metadata, q, output_scale=torch.ones(1))
    with pytest.raises(ValueError, match="kv_cache has shape"):
        run.impl.forward(run.layer, q, q, q, run.cache[:, :, :, :64], metadata, q)
    mixed = run.metadata([3])
    mixed.causal = torch.tensor([True])
    with pytest.raises(ValueError, match="causal = 'Tensor' is not supported: a bool"):
        run.builder.build(0, mixed)
    implementation = type(run.impl)
    with pytest.raises(ValueError, match="attn_type = 'encoder' is not supported: decoder"):
        implementation(4, 64, 1.0, 2, attn_type="encoder")
    with pytest.raises(ValueError, match="kv_cache_dtype = 'nvfp4' is not supported"):
        implementation(4, 64, 1.0, 2, kv_cache_dtype="nvfp4")


def test_backend_attributes_list_what_it_supports():
    backend = VllmAttentionBackend
    assert backend.get_name() == "CUSTOM"
    assert [n for n in (40, 64, 96, 128, 256, 320, 512, 60, 328) if backend.supports_head_size(n)] == [
        40, 64, 96, 128, 256, 320, 512,
    ]  # fmt: skip
    assert backend.supports_sink()
    assert backend.supports_sliding_window()
    assert backend.supports_non_causal()
    assert backend.supports_batch_invariance()
    assert not backend.supports_device_cpu_query_lens_mismatch()
    assert {"auto", "fp8", "fp8_e5m2"} <= set(backend.supported_kv_cache_dtypes)
    assert backend.get_kv_cache_shape(7, 16, 2, 64) == (7, 2, 16, 128)


@pytest.mark.skipif(INSTALLED, reason="vLLM is installed, and reads its configuration for the layout")
@pytest.mark.parametrize(("layout", "order"), [("NHD", (0, 2, 1, 3)), ("HND", (0, 1, 2, 3))])
def test_order_of_a_cache_in_memory_is_that_of_vllms_layout(layout, order, monkeypatch):
    monkeypatch.setitem(SETTINGS, "layout", layout)
    with vllm_modules():
        assert VllmAttentionBackend.get_kv_cache_stride_order() == order
        layers = VllmAttentionBackend.get_kv_cache_stride_order(include_num_layers_dimension=True)
    # The dimension of layers is the first of the shape, and that of blocks comes before it in memory.
    assert [i - 1 for i in layers if i != 0] == list(order)
    assert layers[0] == 1


@pytest.mark.skipif(INSTALLED, reason="vLLM is installed: tests/integrations/test_vllm_interface.py")
def test_register_names_the_backend_as_often_as_it_is_called():
    for _ in range(2):
        with vllm_modules():
            vllm.register()
        assert REGISTERED == {AttentionBackendEnum.CUSTOM: vllm.BACKEND}


def test_register_without_vllm_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm.v1.attention.backends.registry", None)
    with pytest.raises(ImportError, match=r"this needs vLLM, 0.26 to 0.33: pip install 'quire-attention\[vllm\]'"):
        vllm.register()


def test_entry_point_of_an_installed_package_is_register():
    found = [x for x in entry_points(group="vllm.general_plugins") if x.name == "quire"]
    if not found:
        pytest.skip("the package is not installed with its entry points")
    assert found[0].load() is vllm.register
