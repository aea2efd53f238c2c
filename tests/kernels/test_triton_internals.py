"""What `kernels/gpu/triton_internals.py` knows of Triton, compared with the code of the installed version."""

from __future__ import annotations

import inspect
import json
import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

triton = pytest.importorskip("triton")

from triton.backends.nvidia import driver as nvidia  # noqa: E402
from triton.experimental import gluon  # noqa: E402
from triton.experimental.gluon import language as gl  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from quire.kernels.gpu import tma, triton_internals  # noqa: E402
from quire.kernels.gpu.triton_internals import aggregate  # noqa: E402


@aggregate
class Position:
    """A number of steps, in rounds of `length`, and a constant or None."""

    steps: gl.tensor
    length: gl.constexpr
    start: gl.tensor | None

    @gluon.jit
    def place(self):
        """The step in its round."""
        at = self.steps % self.length
        if self.start is not None:
            at += self.start
        return at

    @gluon.jit
    def advance(self):
        """The next position."""
        return Position(self.steps + 1, self.length, start=self.start)


@gluon.jit
def count(out, n, start):
    position = Position(gl.to_tensor(0), 3, start)
    for _ in range(n):
        position = position.advance()
    gl.store(out, position.place())


@dataclass(frozen=True)
class Record:
    """Constants of a kernel."""

    size: int


class Recorder:
    """A launch function that keeps its arguments."""

    def __call__(self, *given):
        self.given = given


def launcher(launch, scratch: int = 0) -> SimpleNamespace:
    """What `CudaLauncher` keeps of a compiled kernel."""
    sizes = dict.fromkeys(("global_scratch_size", "profile_scratch_size"), scratch)
    aligns = dict.fromkeys(("global_scratch_align", "profile_scratch_align"), 1)
    modes = {"launch_cooperative_grid": "cooperative", "launch_pdl": "dependent"}
    return SimpleNamespace(launch=launch, num_ctas=1, **sizes, **aligns, **modes)


def test_known_version_is_installed():
    """On another version, compare triton_internals.py with Triton's code, function by function, and then change
    KNOWN_VERSION.
    """
    assert triton.__version__.startswith(f"{triton_internals.KNOWN_VERSION}.")


def test_hook_of_a_compilation_takes_records_as_constants():
    """With a hook set, as by vLLM's monitor of compilations, Triton writes the constants as JSON."""
    given = []
    options = SimpleNamespace(num_warps=4, num_ctas=1, num_stages=1, enable_fp_fusion=True)
    options.launch_cooperative_grid, options.extern_libs = False, None
    config = Record(3)
    count._call_hook(
        lambda **passed: given.append(passed["compile"]), "key", {}, 0, {(0,): config, (1,): 5}, options, [{}], False
    )
    (passed,) = given
    assert passed["constants"] == {(0,): config, (1,): 5}
    assert json.loads(passed["specialization_data"])["constant_vals"] == [repr(config), 5]


def test_direct_launch_of_a_kernel_passes_what_triton_passes(monkeypatch):
    monkeypatch.setattr(triton_internals, "has_direct_launch", lambda: True)
    theirs, ours = Recorder(), Recorder()
    metadata, enter_hook, exit_hook = None, None, None
    given = ("function", "packed", metadata, enter_hook, exit_hook, "a", "b")
    nvidia.CudaLauncher.__call__(launcher(theirs), 7, 1, 1, "stream", *given)
    compiled = SimpleNamespace(run=launcher(ours), function="function", packed_metadata="packed")
    run, handle = triton_internals.direct_launch(compiled)
    run(7, 1, 1, "stream", *handle, "a", "b")
    assert ours.given == theirs.given
    assert run is ours
    # With scratch memory, and for versions that are not known, kernels are launched by Triton's launcher.
    call = "kernel.run(grid_0, grid_1, grid_2, stream, kernel.function, kernel.packed_metadata, launch_metadata,"
    assert call in inspect.getsource(JITFunction.run)
    compiled.run = launcher(ours, scratch=1)
    assert triton_internals.direct_launch(compiled) == (compiled.run, ("function", "packed", None, None, None))
    monkeypatch.setattr(triton_internals, "has_direct_launch", lambda: False)
    compiled.run = launcher(ours)
    assert triton_internals.direct_launch(compiled)[0] is compiled.run


@pytest.mark.parametrize(
    ("cuda", "version", "known"), [("12.8", "3.6.1", True), ("12.8", "3.60.0", False), (None, "3.5", False)]
)
def test_direct_launch_on_another_version_warns_once(cuda, version, known, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(triton, "__version__", version)
    triton_internals.has_direct_launch.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert [triton_internals.has_direct_launch() for _ in range(3)] == [known] * 3
    triton_internals.has_direct_launch.cache_clear()
    assert len(caught) == (cuda is not None and not known)
    assert all("Triton 3.6, not with 3.60.0" in str(each.message) for each in caught)


def test_descriptors_of_a_kernel_are_those_of_triton(monkeypatch):
    """The function behind the one that encodes descriptors gets the same arguments from both."""
    theirs, ours, signature = Recorder(), Recorder(), {"k": "tensordesc<bf16[16,64]>", "v": "tensordesc<bf16[8,64]>"}
    metas = [
        {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [n, 64], "fp4_padded": False} for n in (16, 8)
    ]
    utils = SimpleNamespace(fill_tma_descriptor=lambda *x: tuple(tuple(y) if isinstance(y, list) else y for y in x))
    monkeypatch.setattr(triton.runtime.driver, "_active", SimpleNamespace(utils=utils))
    matrices = tma.TmaMatrix(160, 1024, 1024, 16, 64), tma.TmaMatrix(320, 128, 256, 8, 64)
    tensors = torch.zeros(160, 1024, dtype=torch.bfloat16), torch.zeros(320, 256, dtype=torch.bfloat16)
    given = [m.descriptor(x) for m, x in zip(matrices, tensors, strict=True)]
    base = range(nvidia._BASE_ARGS_FORMAT_LEN)
    nvidia.wrap_handle_tensordesc(theirs, signature, metas)(*base, *given)
    compiled = SimpleNamespace(
        run=SimpleNamespace(launch=nvidia.wrap_handle_tensordesc(ours, signature, metas)),
        metadata=SimpleNamespace(tensordesc_meta=metas),
    )
    kept = tma.Descriptors(compiled, matrices)
    assert kept.launch is ours
    kept.launch(*base, *kept[tuple(x.data_ptr() for x in tensors)])
    assert ours.given == theirs.given
    assert len(theirs.given) == len(base) + 10


def test_aggregate_has_fields_and_methods_in_kernels():
    from helpers.triton_compile import compile_kernel

    assert Position.fields == ("steps", "length", "start")
    for start in ("i32", None):
        usage = compile_kernel(count, "sm_90", {"out": "*i32", "n": "i32", "start": start}, num_warps=4)
        assert "rem" in usage.asm["ttgir"]
    with pytest.raises(TypeError, match=r"Expected .*constexpr.* for attribute 'length'"):
        Position(gl.tensor(None, gl.int32), gl.tensor(None, gl.int32), None)
    with pytest.raises(AttributeError, match="did not initialize attribute 'start'"):
        Position(gl.tensor(None, gl.int32), 3)


def test_aggregate_with_other_fields_has_another_key():
    """Kernels are compiled anew where fields change places, which changes the source of no function."""

    class First:
        """A pair."""

        a: gl.tensor
        b: gl.tensor

    class Second:
        """Its fields have changed places."""

        b: gl.tensor
        a: gl.tensor

    First.__qualname__ = Second.__qualname__
    keys = [str([x.cache_key for x in aggregate(each).hash_attrs]) for each in (First, Second, First)]
    assert keys[0] != keys[1]
    assert keys[0] == keys[2]


def test_reinterpret_is_a_method_of_shared_memory():
    """Gluon's examples use it, too, in spite of its name."""
    assert callable(gl.shared_memory_descriptor._reinterpret)


def test_internals_are_read_by_no_other_file():
    """Packages of Triton that are not for its users are imported, or named, in one place."""
    pattern = re.compile(r"triton\.(runtime|backends|compiler|_C|language\.core)|\.nonlocals|_scratch_size")
    root = Path(triton_internals.__file__).parents[2]
    texts = {str(path.relative_to(root)): path.read_text() for path in root.rglob("*.py")}
    # Closures of other packages are read in files that have nothing of Triton.
    found = {path for path, text in texts.items() if "triton" in text and pattern.search(text)}
    assert found == {"kernels/gpu/triton_internals.py"}
