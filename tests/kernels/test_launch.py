"""Launches by address that are repeated: over other tensors, and with descriptors for TMA."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

triton = pytest.importorskip("triton")
launch = pytest.importorskip("quire.kernels.gpu.launch")


class Compiled:
    """A kernel that only keeps what it is launched with."""

    function = packed_metadata = "the kernel"
    global_scratch_size, profile_scratch_size = 1, 0

    def __init__(self):
        self.run, self.launched = self, []

    def __call__(self, *given):
        self.launched.append(given[-6:])


def test_replay_at_aligned_addresses_launches_the_kernel():
    """What the kernel reads besides stays, and stays allocated."""
    compiled, tables = Compiled(), torch.zeros(4)
    replay = launch.LaunchReplay(compiled, 1, (tables, None), (77, 0.5))
    address = tables.data_ptr()
    del tables
    assert replay((16, None, 32, 48, None, 64, None, 80), 0)
    assert compiled.launched == [(None, 80, address, None, 77, 0.5)]
    for i in (0, 2, 3, 5):
        addresses = [16, None, 32, 48, None, 64, None, 80]
        addresses[i] += 8
        assert not replay(tuple(addresses), 0)
    assert len(compiled.launched) == 1
    assert replay._others[0].data_ptr() == address


def test_replay_with_descriptors_encodes_each_address_once(monkeypatch):
    """Keys and values go to the function behind Triton's own, as descriptors that are encoded once for each address."""
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST, wrap_handle_tensordesc

    given, encoded = [], []
    kind = {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [16, 64], "fp4_padded": False}
    launcher = lambda *x: given.append(x[-21:])  # noqa: E731  (Triton finds the launcher by its name)
    compiled = Compiled()
    compiled.launch = wrap_handle_tensordesc(launcher, {"k": "tensordesc<bf16[16,64]>", "v": "*fp32"}, [kind])
    compiled.metadata = SimpleNamespace(tensordesc_meta=[kind, kind])
    utils = SimpleNamespace(fill_tma_descriptor=lambda *x: encoded.append(x) or ("map", x[0]))
    monkeypatch.setattr(triton.runtime.driver, "_active", SimpleNamespace(utils=utils))
    matrices = launch.TmaMatrix(160, 1024, 1024, 16, 128), launch.TmaMatrix(320, 128, 256, 16, 128)
    repeat = launch.LaunchReplay(compiled, 1, (torch.zeros(4),) * 5, (8, 0.5), matrices)
    for k, v in ((16, 32), (48, 32), (16, 32)):
        assert repeat((64, None, k, v, None, 80, None, None), 0)
    for (k, v), x in zip(((16, 32), (48, 32), (16, 32)), given, strict=True):
        assert x[:10] == (("map", k), 160, 1024, 1024, 1, ("map", v), 320, 128, 256, 1)
        assert x[10:14] == (None, 80, None, None)
    assert [x[0] for x in encoded] == [16, 32, 48, 32]
    assert encoded[0][1:] == (3, 2, TMA_DTYPE_DEVICE_TO_HOST[10], (16, 64), (160, 1024), (1024, 1), 0)
    assert not repeat((64, None, 24, 32, None, 80, None, None), 0), "an address that is not aligned"


class Kernel:
    """A kernel that Triton "compiles" at each call, which keeps its arguments."""

    def __init__(self):
        self.compiled, self.calls = Compiled(), []

    def __getitem__(self, grid):
        def call(*given, num_warps):
            self.calls.append((grid, given, num_warps))
            return self.compiled

        return call


def test_small_launcher_called_again_launches_by_address(monkeypatch):
    """Anew for other dtypes, sizes and constants; by Triton's own path wherever an address is not aligned."""
    monkeypatch.setattr(launch, "has_direct_launch", lambda: True)
    monkeypatch.setattr(launch, "INTERPRETED", True)  # tensors on the CPU have no current device
    monkeypatch.setattr(launch, "current_raw_stream", lambda device: "the stream")
    kernel = Kernel()
    small, x, y = launch.SmallLauncher(kernel), torch.zeros(64), torch.zeros(64)
    constants, others = (type("Constants", (), {"num_warps": n})() for n in (4, 8))
    small((3, 2), (x, None), (5, 0.5), (16,), constants)
    assert kernel.calls == [((3, 2), (x, None, 5, 0.5, 16, constants), 4)]
    small((7, 2), (y, None), (6, 0.25), (16,), constants)
    assert kernel.compiled.launched == [(y.data_ptr(), None, 6, 0.25, 16, constants)]
    for tensors, sizes, c in (
        ((x.int(), None), (16,), constants),
        ((x, None), (8,), constants),
        ((x, x), (16,), others),
    ):
        small((1, 1), tensors, (5, 0.5), sizes, c)
    assert len(kernel.calls) == 4
    for _ in range(2):
        small((1, 1), (x[1:], None), (5, 0.5), (16,), constants)
    assert len(kernel.calls) == 6
    assert len(kernel.compiled.launched) == 1


@pytest.mark.parametrize(
    ("capability", "hip", "expected"), [((9, 0), None, True), ((9, 4), "6.4", False), ((8, 9), None, False)]
)
def test_has_hopper_kernels_of_other_gpus_is_false(capability, hip, expected, monkeypatch):
    """An AMD GPU may have the major version 9, too."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert launch.has_hopper_kernels.__wrapped__(torch.device("cuda", 0)) is expected
