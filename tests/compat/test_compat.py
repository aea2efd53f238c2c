"""`import flashinfer` means Quire: in a process of its own, or installed and removed again."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
import torch

import quire
from quire import compat
from quire.compat.unsupported import NAMES
from quire.definition import attention_spec, oracle


@pytest.fixture
def flashinfer():
    compat.install()
    yield import_module("flashinfer")
    compat.uninstall()


@pytest.fixture(autouse=True, scope="module")
def removed():
    compat.uninstall()
    yield
    compat.uninstall()


def test_compat_operations_are_those_of_quire(flashinfer):
    for name in ("BatchAttention", "MultiLevelCascadeAttentionWrapper", "append_paged_kv_cache", "merge_state"):
        assert getattr(flashinfer, name) is getattr(quire, name)
        assert name in dir(flashinfer)
    from flashinfer.attention import BatchAttention, BatchAttentionWithAttentionSinkWrapper
    from flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper
    from flashinfer.triton.cascade import merge_states

    assert BatchAttention is flashinfer.attention.BatchAttention is quire.BatchAttention
    assert BatchAttentionWithAttentionSinkWrapper is quire.BatchAttentionWithAttentionSinkWrapper
    assert BatchDecodeWithPagedKVCacheWrapper is quire.BatchDecodeWithPagedKVCacheWrapper
    assert merge_states is quire.merge_states
    assert flashinfer.__version__ == "0.7.2"


@pytest.mark.parametrize("name", compat._OPERATIONS)
def test_compat_modules_exist_where_quire_has_them(name, flashinfer):
    if find_spec(f"quire.{name}") is None:
        if f"flashinfer.{name}" in NAMES:
            return
        assert find_spec(f"flashinfer.{name}") is None
        assert not hasattr(flashinfer, name)
        with pytest.raises(ImportError, match=f"flashinfer.{name}"):
            import_module(f"flashinfer.{name}")
        return
    ours, theirs = import_module(f"quire.{name}"), import_module(f"flashinfer.{name}")
    assert getattr(flashinfer, name) is theirs
    assert find_spec(f"flashinfer.{name}") is not None
    assert set(ours.__all__) <= set(dir(theirs))
    assert set(ours.__all__) <= set(theirs.__all__)
    for public in ours.__all__:
        assert getattr(theirs, public) is getattr(ours, public)


def test_compat_segment_gemm_is_that_of_quire(flashinfer):
    assert flashinfer.SegmentGEMMWrapper is flashinfer.gemm.SegmentGEMMWrapper is quire.SegmentGEMMWrapper
    with pytest.raises(NotImplementedError, match=r"flashinfer\.gemm\.bmm_fp8 is not part of Quire"):
        flashinfer.gemm.bmm_fp8()


def test_compat_missing_name_raises_and_names_quire(flashinfer):
    for name in ("trtllm_fp4_block_scale_moe", "_private", "cache", "engine", "moe_ep"):
        with pytest.raises(AttributeError, match=f"'flashinfer' has no attribute '{name}': Quire"):
            getattr(flashinfer, name)
    with pytest.raises(AttributeError, match=r"'flashinfer\.decode' has no attribute 'refuse'"):
        flashinfer.decode.refuse  # noqa: B018
    with pytest.raises(ImportError, match="sm110_gqa_decode"):
        from flashinfer.decode import sm110_gqa_decode  # noqa: F401
    for name in ("flashinfer.moe_ep", "flashinfer.engine", "flashinfer.jit.cubin_loader"):
        with pytest.raises(ImportError, match=name):
            import_module(name)
        assert find_spec(name) is None
    assert not any(
        isinstance(getattr(flashinfer.cascade, name), ModuleType) for name in dir(flashinfer.cascade) if name[0] != "_"
    )


@pytest.mark.parametrize("module", NAMES)
def test_compat_unsupported_function_exists_and_raises_when_called(module, flashinfer):
    theirs = import_module(module)
    for name in NAMES[module]:
        found = getattr(theirs, name)
        assert getattr(theirs, name) is found
        assert name in dir(theirs)
        if found.__module__.startswith("quire."):
            continue
        calls = [found, found.run, found.plan] if isinstance(found, type) else [found]
        for call in calls:
            with pytest.raises(NotImplementedError, match=rf"{module}\.{name} is not part of Quire"):
                call(1, x=2)


def test_compat_page_module_computes_batch_indices_and_positions(flashinfer):
    module = flashinfer.page.get_page_module()
    indptr, lengths = torch.tensor([0, 2, 2, 3]).int(), torch.tensor([5, 1, 1]).int()
    requests, positions = torch.full((2, 3), -7, dtype=torch.int32)
    module.get_batch_indices_positions(indptr, lengths, requests, positions)
    assert (requests.tolist(), positions.tolist()) == ([0, 0, 2], [3, 4, 0])
    requests.zero_()
    module.get_batch_indices_positions(indptr.long(), lengths.long(), requests, positions)
    assert (requests.tolist(), positions.tolist()) == ([0, 0, 2], [3, 4, 0])
    module.get_batch_indices_positions(indptr[:1], lengths[:0], requests[:0], positions[:0])


def test_compat_packages_of_compiled_kernels_are_found(flashinfer):
    for name in ("flashinfer_cubin", "flashinfer_jit_cache"):
        assert find_spec(name).origin == "quire"
        assert import_module(name).__name__ == name


def test_compat_flags_of_unused_libraries_are_false(flashinfer):
    from flashinfer.cudnn.prefill import CUDNN_AVAILABLE
    from flashinfer.cutile.cutile_common import is_cuda_tile_available

    assert not CUDNN_AVAILABLE
    assert not is_cuda_tile_available()


def test_compat_quickstart_of_flashinfer_runs(flashinfer):
    """The quickstart of FlashInfer's package page: a cache, decode over it, and the wrapper for prompts."""
    from flashinfer import BatchDecodeWithPagedKVCache, BatchPrefillWithRaggedKVCache
    from flashinfer.core import PagedKVCache

    assert flashinfer.core.PagedKVCache is flashinfer.PagedKVCache is PagedKVCache is quire.PagedKVCache
    heads = {"kv_heads": 2, "head_dim": 16}
    cache = flashinfer.core.PagedKVCache(
        num_layers=1, num_kv_heads=2, head_dim=16, page_size=16, max_num_pages=8, device="cpu", data_type=torch.float32
    )
    wrapper = BatchDecodeWithPagedKVCache(
        kv_cache=cache, num_heads=4, **heads, sm_scale=1.0 / (16**0.5), dtype=torch.float32
    )
    sequence = cache.begin_forward(50)
    key, value = torch.randn(2, 50, 2, 16)
    cache.append(0, key, value, [sequence])
    cache.end_forward(sequence, 50)
    query = torch.randn(1, 1, 4, 16)
    output = wrapper.decode(query)
    assert output.shape == query.shape
    spec = attention_spec(num_qo_heads=4, num_kv_heads=2, head_dim_qk=16)
    exact, _ = oracle.attend(query[0], key, value, spec)
    torch.testing.assert_close(output[0].double(), exact, rtol=1e-5, atol=1e-5)
    prompt = torch.randn(50, 4, 16)
    prefill = BatchPrefillWithRaggedKVCache(num_heads=4, **heads, dtype=torch.float32)
    exact, _ = oracle.attend(prompt, key, value, spec)
    outputs = prefill.prefill(prompt, key, value, torch.tensor([0, 50]))
    torch.testing.assert_close(outputs.double(), exact, rtol=1e-5, atol=1e-5)


def test_compat_logging_and_tracing_do_nothing(flashinfer, tmp_path):
    from flashinfer.api_logging import flashinfer_api
    from flashinfer.autotuner import autotune
    from flashinfer.fi_trace import fi_trace
    from flashinfer.trace import Const, Scalar, Tensor, TraceTemplate, Var

    template = TraceTemplate(
        op_type="x", axes={"n": Var(), "h": Const(abbrev="h")}, inputs={"x": Tensor(["n"]), "s": Scalar("float32")}
    )
    for decorate in (flashinfer_api, flashinfer_api(trace=template)):
        assert decorate(len) is len
    assert flashinfer.autotune is autotune
    with flashinfer.autotune(True, cache="a file"):
        assert fi_trace(flashinfer.merge_state, save_dir=tmp_path, v_a=torch.zeros(1)) == {}
    assert flashinfer.fi_trace(flashinfer.merge_state, save_dir=tmp_path) == {}
    assert not list(tmp_path.iterdir())
    with pytest.raises(NotImplementedError, match=r"flashinfer\.xqa\.xqa is not part of Quire"):
        flashinfer.xqa(1)
    with pytest.raises(AttributeError, match=r"'flashinfer\.decode' has no attribute 'decode'"):
        flashinfer.decode(1)


def test_compat_jit_env_has_the_folders_of_flashinfer(flashinfer):
    from flashinfer.jit import env

    assert flashinfer.jit.env is env
    assert env.has_flashinfer_cubin()
    for name in ("FLASHINFER_WORKSPACE_DIR", "FLASHINFER_CUBIN_DIR", "FLASHINFER_CSRC_DIR", "FLASHINFER_GEN_SRC_DIR"):
        assert isinstance(getattr(env, name), Path)
    assert env.FLASHINFER_JIT_DIR.parent == env.FLASHINFER_WORKSPACE_DIR
    assert not env.FLASHINFER_WORKSPACE_DIR.exists()


def test_compat_imports_of_vllm_and_sglang_are_found(flashinfer):
    """What modules of vLLM and SGLang that have to do with attention import when they are imported."""
    from flashinfer import (
        BatchDecodeMlaWithPagedKVCacheWrapper,
        nvfp4_quantize_append_paged_kv_cache_with_slot_mapping,
    )
    from flashinfer.concat_ops import concat_mla_k
    from flashinfer.mla import MLAHeadDimensions, MLALayerDimensions
    from flashinfer.triton.cascade import variable_length_merge_states
    from flashinfer.utils import FP4Tensor, get_trtllm_gen_multi_ctas_kv_counter_bytes

    assert BatchDecodeMlaWithPagedKVCacheWrapper is quire.BatchDecodeMlaWithPagedKVCacheWrapper
    assert flashinfer.decode.BatchDecodeMlaWithPagedKVCacheWrapper is BatchDecodeMlaWithPagedKVCacheWrapper
    assert (concat_mla_k, MLAHeadDimensions) == (quire.concat_ops.concat_mla_k, quire.mla.MLAHeadDimensions)
    assert (MLALayerDimensions, variable_length_merge_states) == (
        quire.mla.MLALayerDimensions,
        quire.cascade.variable_length_merge_states,
    )
    assert not isinstance(torch.zeros(1), FP4Tensor)
    for call in (get_trtllm_gen_multi_ctas_kv_counter_bytes, nvfp4_quantize_append_paged_kv_cache_with_slot_mapping):
        with pytest.raises(NotImplementedError, match="is not part of Quire"):
            call()


def test_compat_fast_decode_plan_is_that_of_quire(flashinfer):
    assert flashinfer.fast_decode_plan is flashinfer.decode.fast_decode_plan is quire.fast_decode_plan


def test_compat_uninstall_restores_modules_and_finders():
    def names():
        return [name for name in sys.modules if name.partition(".")[0] == "flashinfer"]

    path, elsewhere = list(sys.meta_path), find_spec("flashinfer")
    compat.install()
    compat.install()
    assert sys.meta_path[1:] == path
    assert find_spec("flashinfer").origin == "quire"
    import_module("flashinfer.decode")
    assert {"flashinfer", "flashinfer.decode"} <= set(names())
    compat.uninstall()
    compat.uninstall()
    assert sys.meta_path == path
    assert names() == []
    assert find_spec("flashinfer") == elsewhere


def test_compat_install_after_another_flashinfer_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer", ModuleType("flashinfer"))
    with pytest.raises(RuntimeError, match="flashinfer is imported already"):
        compat.install()
    assert compat._FINDER not in sys.meta_path
    compat.uninstall()
    assert "flashinfer" in sys.modules


@pytest.mark.slow
def test_compat_installed_by_sitecustomize_serves_a_program(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import quire.compat, sys\nassert 'torch' not in sys.modules\n")
    program = tmp_path / "program.py"
    program.write_text("""
import importlib.util
assert importlib.util.find_spec("flashinfer") and not importlib.util.find_spec("flashinfer.comm")
import torch
import flashinfer
from flashinfer.cascade import *
v, s = torch.randn(3, 2, 8), torch.randn(3, 2)
out, lse = merge_state(v, s, v, s)
torch.testing.assert_close(out, v)
torch.testing.assert_close(lse, s + 1)
print(flashinfer.single_decode_with_kv_cache(v[0], v, v).shape)
""")
    paths = os.pathsep.join([str(tmp_path), *(p for p in sys.path if p)])
    done = subprocess.run(
        [sys.executable, str(program)], env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True
    )
    assert done.stdout.strip() == "torch.Size([2, 8])", done.stderr
    assert "Error in sitecustomize" not in done.stderr


@pytest.mark.slow
def test_compat_in_child_processes_is_installed(tmp_path):
    program = """
from flashinfer import single_decode_with_kv_cache
import sys, flashinfer, flashinfer.decode, torch
assert flashinfer.decode.single_decode_with_kv_cache is single_decode_with_kv_cache
assert sys.modules["flashinfer"] is flashinfer
x = torch.randn(3, 2, 8)
print(flashinfer.__version__, *single_decode_with_kv_cache(x[0], x, x).shape)
"""
    paths = os.pathsep.join([compat.path(), *(p for p in sys.path if p)])
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.stdout.split() == ["0.7.2", "2", "8"], done.stderr


def test_compat_utils_equal_their_definitions(flashinfer):
    utils = import_module("flashinfer.utils")
    assert [utils.PosEncodingMode[name].value for name in ("NONE", "ROPE_LLAMA", "ALIBI")] == [0, 1, 2]
    assert (utils.MaskMode.CUSTOM.value, utils.TensorLayout["HND"].value) == (2, 1)
    for x in range(1, 40):
        y = utils.next_positive_power_of_2(x)
        assert y >= x > y // 2
        assert y & (y - 1) == 0
        assert utils.round_up(x, 7) == utils.ceil_div(x, 7) * 7
        assert 0 <= utils.round_up(x, 7) - x < 7
    assert utils.next_positive_power_of_2(0) == 1
    assert utils.get_indptr(torch.tensor([3, 0, 2]).int()).tolist() == [0, 3, 3, 5]
    assert utils.canonicalize_torch_dtype("bfloat16") is torch.bfloat16
    assert utils.is_float8(torch.zeros(1).to(torch.float8_e5m2))
    assert not utils.is_float8(torch.zeros(1))
    assert utils.log2e * utils.ln2 == pytest.approx(1)
    assert utils.is_fa3_backend_supported(0, False, True, torch.float16, torch.float16)
    assert utils.is_fa3_prefill_head_dim_supported(192, 128)
    assert not utils.is_fa3_prefill_head_dim_supported(60, 128)
    assert utils.version_at_least("0.7.2", "0.7")
    assert not utils.version_at_least("0.7.2", "0.10")
    assert not utils.device_support_pdl(torch.device("cpu"))
    with pytest.raises(ValueError, match="device = 'cpu' is not supported"):
        utils.is_sm90a_supported(torch.device("cpu"))
    backend = utils.determine_attention_backend(torch.device("cpu"), 0, False, False, torch.float16, torch.float16)
    assert flashinfer.BatchPrefillWithPagedKVCacheWrapper(torch.empty(0), backend=backend)


@pytest.mark.gpu
def test_compat_device_functions_on_a_gpu_equal_torch(flashinfer):
    utils = import_module("flashinfer.utils")
    major, minor = utils.get_compute_capability(torch.device("cuda"))
    assert (major, minor) == torch.cuda.get_device_capability()
    assert utils.is_sm90a_supported(torch.device("cuda")) == (major == 9)
    assert utils.is_sm121a_supported("cuda") == ((major, minor) == (12, 1))
    assert utils.get_device_sm_count(torch.device("cuda")) > 0


def test_compat_jit_specs_build_nothing(flashinfer):
    from flashinfer.jit import JitSpec, MissingJITCacheError, build_jit_specs
    from flashinfer.jit.attention import gen_pod_module
    from flashinfer.jit.attention.variants import attention_sink_decl
    from flashinfer.jit.utils import filename_safe_dtype_map

    specs = [
        flashinfer.decode.gen_batch_decode_module(torch.float16, torch.float16, 128),
        flashinfer.prefill.gen_batch_prefill_module("fa2", torch.float16, 128, pos_encoding_mode=0),
        flashinfer.attention.gen_batch_attention_module(torch.bfloat16),
        flashinfer.page.gen_page_module(),
        gen_pod_module(torch.float16, 128),
    ]
    assert all(isinstance(spec, JitSpec) for spec in specs)
    assert len({spec.name for spec in specs}) == len(specs)
    assert build_jit_specs(specs, verbose=False) is None
    assert set(attention_sink_decl) == {"fa2", "fa3"}
    assert issubclass(MissingJITCacheError, RuntimeError)
    assert MissingJITCacheError("text", specs[0]).spec is specs[0]
    assert filename_safe_dtype_map[torch.bfloat16] == "bfloat16"
    with pytest.raises(AttributeError, match="gen_customize_batch_prefill_module"):
        flashinfer.prefill.gen_customize_batch_prefill_module  # noqa: B018
