"""What `kernels/torch_internals.py` knows of torch, compared with public functions of the installed version."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch

from quire.kernels import torch_internals
from quire.kernels.torch_internals import KNOWN_VERSIONS, assert_async, scaled_mm, tree_flatten, tree_map_only


def test_known_version_is_installed():
    """On another version, compare torch_internals.py with the code of torch, and then change KNOWN_VERSIONS."""
    assert torch.__version__.startswith(tuple(f"{version}." for version in KNOWN_VERSIONS))


def test_cuda_functions_are_declared_in_the_stub_of_torch():
    """Builds for CPUs have the stub, too, but not the functions."""
    stub = Path(torch.__file__).with_name("_C") / "__init__.pyi"
    text = stub.read_text()
    assert "def _cuda_getDevice() -> _int: ..." in text
    assert "def _cuda_getCurrentRawStream(device: _int) -> _int: ..." in text


def test_names_of_peer_memory_are_those_of_torch():
    """Builds for CPUs have the stub of symmetric memory, but not its class."""
    from torch.distributed import distributed_c10d

    stub = (Path(torch.__file__).with_name("_C") / "_distributed_c10d.pyi").read_text()
    for name in ("class _SymmetricMemory:", "def empty_strided_p2p(", "def rendezvous(", "class ProcessGroupNCCL("):
        assert name in stub
    assert callable(distributed_c10d._register_process_group)
    for method in ("_set_default_backend", "_register_backend", "_set_group_name"):
        assert callable(getattr(torch.distributed.ProcessGroup, method))


def test_environment_of_a_group_is_restored(monkeypatch):
    monkeypatch.setenv("QUIRE_SET", "kept")
    monkeypatch.delenv("QUIRE_UNSET", raising=False)
    with torch_internals._environment(QUIRE_SET="other", QUIRE_UNSET="added"):
        assert os.environ["QUIRE_SET"] == "kept"
        assert os.environ["QUIRE_UNSET"] == "added"
    assert os.environ["QUIRE_SET"] == "kept"
    assert "QUIRE_UNSET" not in os.environ


@pytest.mark.gpu
def test_cuda_functions_on_a_gpu_equal_the_public_ones():
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            device = torch_internals.current_device()
            assert device == torch.cuda.current_device()
            assert torch_internals.current_raw_stream(device) == stream.cuda_stream


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="this build of torch has CUDA")
def test_cuda_functions_of_a_build_without_cuda_raise():
    for call in (torch_internals.current_device, lambda: torch_internals.current_raw_stream(0)):
        with pytest.raises(RuntimeError, match="has no CUDA"):
            call()


def test_scaled_mm_takes_the_arguments_that_kernels_pass():
    names = [argument.name for argument in torch.ops.aten._scaled_mm.default._schema.arguments]
    assert names[:4] == ["self", "mat2", "scale_a", "scale_b"]
    assert {"out_dtype", "use_fast_accum"} < set(names)
    a, b = (torch.eye(16).to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones(())
    product = scaled_mm(a, b.T, scale_a=2 * one, scale_b=3 * one, out_dtype=torch.bfloat16)
    assert torch.equal(product.float(), 6 * torch.eye(16))


def test_assert_async_of_false_raises_with_its_message():
    assert_async(torch.tensor(True), "a message")
    with pytest.raises(RuntimeError, match="a message"):
        assert_async(torch.tensor(False), "a message")


def test_trees_of_tensors_are_flattened_and_mapped():
    tree = ([torch.ones(1), 2], {"name": torch.zeros(1)})
    assert [float(x) for x in tree_flatten(tree)[0]] == [1, 2, 0]
    (first, number), mapped = tree_map_only(torch.Tensor, lambda x: x + 5, tree)
    assert (float(first), number, float(mapped["name"])) == (6, 2, 5)


def test_internals_of_torch_are_read_by_no_other_file():
    pattern = re.compile(r"torch\.([a-z]+\.)*_[A-Za-z]|from torch[a-z.]* import _[a-z]")
    root = Path(torch_internals.__file__).parents[1]
    texts = {str(path.relative_to(root)): path.read_text() for path in root.rglob("*.py")}
    found = {path for path, text in texts.items() if pattern.search(text.replace("torch.__version__", ""))}
    assert found == {"kernels/torch_internals.py", "engine/inductor_passes.py"}
