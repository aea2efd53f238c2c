"""`flashinfer.testing` under quire.compat: times are those of the calls, and counts are what they say."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest
import torch

from quire import compat
from quire.compat import testing

BENCHES = ["bench_gpu_time", "bench_gpu_time_with_cuda_event", "bench_gpu_time_with_cudagraph"]
QUICK = {"dry_run_iters": 1, "repeat_iters": 4}


def test_compat_testing_is_imported_as_flashinfer_testing():
    compat.install()
    try:
        import flashinfer
        from flashinfer.testing import bench_gpu_time, bench_gpu_time_with_cupti
        from flashinfer.testing.utils import attention_tb_per_sec, quantize_fp8, set_seed

        assert flashinfer.testing.bench_gpu_time is bench_gpu_time is testing.bench_gpu_time
        assert bench_gpu_time_with_cupti is testing.bench_gpu_time_with_cupti
        assert (attention_tb_per_sec, set_seed) == (testing.attention_tb_per_sec, testing.set_seed)
        with pytest.raises(NotImplementedError, match="quantize_fp8 is not part of Quire"):
            quantize_fp8(torch.zeros(2, 2))
    finally:
        compat.uninstall()


@pytest.mark.parametrize("name", BENCHES)
def test_bench_gpu_time_of_host_tensors_times_on_the_host(name):
    """Calls whose tensors lie on the host are timed there, on machines with a GPU too."""
    seen = []

    def call(x, factor):
        seen.append(x * factor)
        time.sleep(0.004)

    x = torch.ones(3)
    times = getattr(testing, name)(call, **QUICK, input_args=(x,), input_kwargs={"factor": 2.0})
    assert len(times) == 4
    assert all(3.9 < ms < 400 for ms in times)
    assert len(seen) == 1 + 5 + 1 + 4
    assert all(torch.equal(y, x * 2) for y in seen)


def test_bench_gpu_time_with_a_time_takes_as_many_measurements_as_fit():
    calls = []

    def call(x):
        calls.append(x)
        time.sleep(0.002)

    times = testing.bench_gpu_time(call, dry_run_time_ms=4, repeat_time_ms=20, input_args=(torch.ones(1),))
    assert 1 <= len(times) <= 10
    assert len(testing.bench_gpu_time(call, dry_run_iters=0, repeat_time_ms=0.0, input_args=(torch.ones(1),))) == 1
    assert testing.bench_gpu_time(call, **QUICK, input_args=(torch.ones(1),), aggregate_op=min) != times


def test_bench_gpu_time_with_ignored_options_warns():
    given = {**QUICK, "input_args": (torch.ones(1),)}
    with pytest.warns(UserWarning, match="Falling back to CUDA events"):
        assert len(testing.bench_gpu_time_with_cupti(torch.neg, **given)) == 4
    with pytest.warns(DeprecationWarning, match="use cold_l2_cache"):
        assert len(testing.bench_gpu_time(torch.neg, **given, l2_flush=False, l2_flush_size_mb=1)) == 4


@pytest.mark.gpu
@pytest.mark.parametrize("cold", [False, True])
@pytest.mark.parametrize("name", BENCHES)
def test_bench_gpu_time_on_a_gpu_grows_with_the_work(name, cold):
    """A product twice as large in each dimension takes more than 4 times as long, and copies keep their strides."""
    times, strides = {}, set()

    def call(a, b):
        strides.add((a.stride(), b.stride()))
        return a @ b

    for n in (4096, 8192):  # the smaller product, too, takes much longer than its launch
        a, b = torch.randn(2, n, n, device="cuda", dtype=torch.bfloat16)
        measured = getattr(testing, name)(
            call, input_args=(a, b.T), cold_l2_cache=cold, dry_run_iters=5, repeat_iters=9
        )
        assert len(measured) == 9
        times[n] = min(measured)  # other tests may use the GPU, too
        assert strides == {((n, 1), (1, n))}
        strides.clear()
    assert 4 * times[4096] < times[8192] < 30 * times[4096]
    assert times[8192] > 2 * 8192**3 / 1e15 * 1e3 / 3, "no GPU multiplies so fast"


@pytest.mark.gpu
def test_copy_of_a_strided_tensor_has_its_strides():
    whole = torch.randn(6, 2, 8, 4, device="cuda")
    for x in (whole, whole[:, 0], whole[1:, 1, :, :2], whole.transpose(0, 3), whole[:1, :1].expand(6, 2, 8, 4)):
        copy = testing._copy(x)
        assert (copy.shape, copy.stride()) == (x.shape, x.stride())
        assert torch.equal(copy, x)
        assert copy.data_ptr() != x.data_ptr()
    assert testing.calculate_rotation_count([whole]) >= 2
    assert testing.calculate_rotation_count([torch.empty(6 * testing.get_l2_cache_size(), device="cuda").byte()]) == 1


def test_attention_flops_and_bytes_equal_their_formulas(rng):
    batch, heads, kv_heads = rng.randrange(1, 9), rng.randrange(1, 9), rng.randrange(1, 9)
    kv = rng.randrange(1, 200)
    q = rng.randrange(1, kv + 1)
    sizes, lengths = (batch, q, kv, 192, 128, heads), (torch.full((batch,), q), torch.full((batch,), kv))
    for causal in (False, True):
        pairs = sum(kv - q + i + 0.5 if causal else kv for i in range(q))  # half of each query's own key
        flops = 2 * batch * heads * pairs * (192 + 128)
        assert testing.attention_flops(*sizes, causal) == flops
        assert float(testing.attention_flops_with_actual_seq_lens(*lengths, 192, 128, heads, causal)) == flops
        assert testing.attention_tflops_per_sec(*sizes, causal, 2.0) == pytest.approx(flops / 2e-3 / 1e12)
        rate = testing.attention_tflops_per_sec_with_actual_seq_lens(*lengths, 192, 128, heads, causal, 2.0)
        assert rate == pytest.approx(flops / 2e-3 / 1e12)
    moved = batch * 2 * (q * heads * (192 + 128) + kv * kv_heads * (192 + 128))
    assert testing.attention_tb_per_sec(*sizes, kv_heads, 2.0) == pytest.approx(moved / 2e-3 / 1e12)
    rate = testing.attention_tb_per_sec_with_actual_seq_lens(*lengths, 192, 128, heads, kv_heads, 2.0)
    assert rate == pytest.approx(moved / 2e-3 / 1e12)
    eights = {"q_dtype": torch.float32, "k_dtype": torch.float8_e4m3fn, "v_dtype": torch.float8_e4m3fn}
    moved = batch * (q * heads * (192 * 4 + 128 * 2) + kv * kv_heads * (192 + 128))
    assert testing.attention_tb_per_sec(*sizes, kv_heads, 2.0, **eights) == pytest.approx(moved / 2e-3 / 1e12)
    assert testing.attention_tb_per_sec(*sizes, kv_heads, float("nan")) == 0
    assert testing.count_bytes(torch.zeros(3), [torch.zeros(2).half()], 7) == 16
    with pytest.raises(ValueError, match=r"qo_seqlen = 5 .* kv_seqlen = 4"):
        testing.attention_flops(1, 5, 4, 64, 64, 1, True)
    with pytest.raises(ValueError, match="actual_seq_lens_q exceeds"):
        testing.attention_flops_with_actual_seq_lens(torch.tensor([5]), torch.tensor([4]), 64, 64, 1, True)


def test_set_seed_repeats_random_numpy_and_torch():
    def numbers():
        testing.set_seed(7)
        return random.random(), np.random.rand(), float(torch.rand(()))

    assert numbers() == numbers()
