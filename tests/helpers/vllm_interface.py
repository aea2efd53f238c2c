"""Compares the plug-in with the interface of an installed or unpacked vLLM, and prints its version, in a process of its
own.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from inspect import Parameter, signature
from types import SimpleNamespace
from typing import Any

import torch
import vllm
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention import backend as base
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from quire.integrations.vllm import register
from quire.integrations.vllm.builder import QuireMetadata

# What one of the two versions alone has.
VERSIONED = {
    "get_kv_cache_shape", "get_kv_cache_stride_order", "use_cascade_attention",
    "supports_device_cpu_query_lens_mismatch", "update_draft_decode_metadata", "supports_draft_decode_metadata_update",
}  # fmt: skip


def compare_members(own: type, theirs: type, added: set[str]) -> None:
    """Check that each public member of `own` is one of vLLM's, or `added`, and has vLLM's parameters in their order."""
    for name, member in vars(own).items():
        if name.startswith("_") and name != "__init__" and name != "_cudagraph_support":
            continue
        if not hasattr(theirs, name):
            assert name in VERSIONED | added, f"{own.__name__}.{name} is not of vLLM {vllm.__version__}"
            continue
        if not callable(getattr(theirs, name)) or isinstance(member, type):
            continue
        ours, expected = (list(signature(getattr(x, name)).parameters.values()) for x in (own, theirs))
        assert [x.name for x in ours[: len(expected)]] == [x.name for x in expected], f"{own.__name__}.{name}"
        assert all(x.default is not Parameter.empty for x in ours[len(expected) :]), f"{own.__name__}.{name}"


def refusals(backend: Any, **changes: Any) -> list[str]:
    """Why vLLM's selector would not take the backend for a layer on a Hopper GPU."""
    layer = {
        "head_size": 128, "dtype": torch.bfloat16, "kv_cache_dtype": "fp8", "block_size": 16, "use_mla": False,
        "has_sink": True, "use_sparse": False, "use_mm_prefix": False, "use_per_head_quant_scales": False,
        "device_capability": DeviceCapability(9, 0), "attn_type": "decoder", "has_sliding_window": True,
        "use_non_causal": True, "use_batch_invariant": True,
    }  # fmt: skip
    reasons: list[str] = backend.validate_configuration(**{**layer, **changes})
    return reasons


def metadata_of_a_step(backend: Any) -> Any:
    """Metadata made of vLLM's own, for a chunk and two decodes."""
    mode = SimpleNamespace(mixed_mode=lambda: None)
    config = SimpleNamespace(
        speculative_config=None,
        compilation_config=SimpleNamespace(cudagraph_mode=mode),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
    )
    spec = SimpleNamespace(block_size=16)
    builder = backend.get_builder_cls()(spec, ["layer"], config, torch.device("cpu"))
    offsets = torch.tensor([0, 1, 2, 9], dtype=torch.int32)
    common = base.CommonAttentionMetadata(
        query_start_loc=offsets, query_start_loc_cpu=offsets, seq_lens=torch.tensor([5, 6, 30], dtype=torch.int32),
        num_reqs=3, num_actual_tokens=9, max_query_len=7, max_seq_len=30,
        block_table_tensor=torch.zeros(3, 4, dtype=torch.int32), slot_mapping=torch.zeros(9, dtype=torch.int64),
    )  # fmt: skip
    assert builder.get_cudagraph_support(config, spec) is base.AttentionCGSupport.ALWAYS
    assert len(builder.build_for_cudagraph_capture(common).launches) == 1
    assert len(builder.build_for_drafting(common, 0).launches) == 2
    return builder.build(0, common)


def main() -> None:
    register()
    register()
    backend: Any = AttentionBackendEnum.CUSTOM.get_class()
    implementation, builder = backend.get_impl_cls(), backend.get_builder_cls()
    assert AttentionBackendEnum[backend.get_name()] is AttentionBackendEnum.CUSTOM
    for own in (backend, implementation, builder):
        assert not own.__abstractmethods__, own
    compare_members(backend, base.AttentionBackend, set())
    added = {"num_heads", "do_kv_cache_update"}
    compare_members(implementation, base.AttentionImpl, added)
    compare_members(builder, base.AttentionMetadataBuilder, set())
    assert not implementation.supports_dcp
    assert not backend.forward_includes_kv_cache_update
    assert refusals(backend) == []
    assert refusals(backend, kv_cache_dtype="auto", head_size=64, dtype=torch.float16) == []
    others = {
        "use_mla": True, "use_sparse": True, "use_mm_prefix": True, "attn_type": "encoder", "kv_cache_dtype": "nvfp4",
        "head_size": 60, "device_capability": DeviceCapability(7, 5),
    }  # fmt: skip
    for change in ({name: value} for name, value in others.items()):
        assert len(refusals(backend, **change)) == 1, change
    metadata = metadata_of_a_step(backend)
    assert is_dataclass(QuireMetadata)
    assert {x.name for x in fields(QuireMetadata)} >= {"num_actual_tokens", "max_query_len", "seq_lens", "slot_mapping"}
    assert [launch._role for launch in metadata.launches] == ["extend", "decode"]
    print(vllm.__version__)


if __name__ == "__main__":
    main()
