"""What programs import from `flashinfer.testing`: timing, and the counts that times are compared with.

Times are of calls on the GPU, by CUDA events. Where there is none, or all tensors that a call is given lie on the host,
they are the host's, with its caches as they are.
"""

from __future__ import annotations

import math
import random
import time
import warnings
from collections.abc import Callable, Sequence
from itertools import cycle, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only

__all__ = [
    "aggregate_gpu_time_across_ranks",
    "attention_flops",
    "attention_flops_with_actual_seq_lens",
    "attention_tb_per_sec",
    "attention_tb_per_sec_with_actual_seq_lens",
    "attention_tflops_per_sec",
    "attention_tflops_per_sec_with_actual_seq_lens",
    "bench_gpu_time",
    "bench_gpu_time_with_cuda_event",
    "bench_gpu_time_with_cudagraph",
    "bench_gpu_time_with_cupti",
    "calculate_rotation_count",
    "count_bytes",
    "get_l2_cache_size",
    "set_seed",
    "sleep_after_kernel_run",
]

_BF16 = torch.bfloat16
_WARM = 3  # calls before a graph is captured: kernels are compiled, and memory is found
_COLD = 5  # caches' worth of copies between two uses of one


def bench_gpu_time(
    fn: Callable[..., Any],
    dry_run_iters: int | None = None,
    repeat_iters: int | None = None,
    dry_run_time_ms: float = 25,
    repeat_time_ms: float = 100,
    l2_flush: bool | None = None,
    l2_flush_size_mb: int | None = None,
    l2_flush_device: str | None = None,
    sleep_after_run: bool = False,
    enable_cupti: bool = False,
    use_cuda_graph: bool = False,
    num_iters_within_graph: int = 10,
    input_args: Sequence[Any] = (),
    input_kwargs: dict[str, Any] | None = None,
    cold_l2_cache: bool = True,
    aggregate_op: Callable[[list[float]], float] = max,
) -> list[float]:
    """Times of ``fn(*input_args, **input_kwargs)``, in milliseconds, one for each measurement.

    Args:
        dry_run_iters, repeat_iters: measurements to leave out and to return; by default as many as fill dry_run_time_ms
            and repeat_time_ms.
        l2_flush, l2_flush_size_mb, l2_flush_device: deprecated; l2_flush is the old name of cold_l2_cache, the size is
            that of what is written to empty the cache, twice the cache by default.
        sleep_after_run: rest after each measurement, as long as `sleep_after_kernel_run` says.
        enable_cupti: warns that it makes no difference: CUPTI is not used.
        use_cuda_graph: measure replays of a graph of num_iters_within_graph calls, and return the time of one call.
        cold_l2_cache: empty the cache before each measurement or, in a graph, take turns with copies of the tensors
            that are given. Tensors that fn does not get as arguments stay in the cache of a graph.
        aggregate_op: what makes one time of those of all ranks, where torch.distributed is initialized.
    """
    if enable_cupti:
        warnings.warn("CUPTI is not used. Falling back to CUDA events.", UserWarning, stacklevel=2)
    if any(x is not None for x in (l2_flush, l2_flush_size_mb, l2_flush_device)):
        text = "l2_flush, l2_flush_size_mb and l2_flush_device are deprecated: use cold_l2_cache"
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        cold_l2_cache = cold_l2_cache if l2_flush is None else l2_flush
    kwargs = input_kwargs or {}
    tensors = [x for x in tree_flatten((tuple(input_args), kwargs))[0] if isinstance(x, Tensor)]
    on_gpu = torch.cuda.is_available() and (not tensors or any(x.is_cuda for x in tensors))
    counts = (dry_run_iters, repeat_iters, dry_run_time_ms, repeat_time_ms)

    def call() -> None:
        fn(*input_args, **kwargs)

    if not on_gpu:
        return _times(call, None, counts, sleep_after_run, aggregate_op, on_gpu)
    if use_cuda_graph:
        copies = [(tuple(input_args), kwargs)]
        if cold_l2_cache:
            more = calculate_rotation_count(tensors) - 1
            copies += [tree_map_only(Tensor, _copy, copies[0]) for _ in range(min(more, num_iters_within_graph - 1))]
        graph = _captured(fn, list(islice(cycle(copies), num_iters_within_graph)))
        times = _times(graph.replay, None, counts, sleep_after_run, aggregate_op, on_gpu)
        return [x / num_iters_within_graph for x in times]
    flush = None
    if cold_l2_cache:
        size = 2 * get_l2_cache_size() if l2_flush_size_mb is None else l2_flush_size_mb << 20
        flush = torch.empty(size, dtype=torch.int8, device="cuda").zero_
    return _times(call, flush, counts, sleep_after_run, aggregate_op, on_gpu)


def bench_gpu_time_with_cuda_event(
    fn: Callable[..., Any],
    dry_run_iters: int | None = None,
    repeat_iters: int | None = None,
    dry_run_time_ms: float = 25,
    repeat_time_ms: float = 100,
    **options: Any,
) -> list[float]:
    """`bench_gpu_time` without a graph."""
    return bench_gpu_time(fn, dry_run_iters, repeat_iters, dry_run_time_ms, repeat_time_ms, **options)


def bench_gpu_time_with_cudagraph(
    fn: Callable[..., Any],
    dry_run_iters: int | None = None,
    repeat_iters: int | None = None,
    dry_run_time_ms: float = 25,
    repeat_time_ms: float = 100,
    num_iters_within_graph: int = 10,
    **options: Any,
) -> list[float]:
    """`bench_gpu_time` with use_cuda_graph=True."""
    options |= {"use_cuda_graph": True, "num_iters_within_graph": num_iters_within_graph}
    return bench_gpu_time(fn, dry_run_iters, repeat_iters, dry_run_time_ms, repeat_time_ms, **options)


def bench_gpu_time_with_cupti(
    fn: Callable[..., Any],
    dry_run_iters: int | None = None,
    repeat_iters: int | None = None,
    dry_run_time_ms: float = 25,
    repeat_time_ms: float = 100,
    **options: Any,
) -> list[float]:
    """`bench_gpu_time` with enable_cupti=True: by CUDA events, which it warns of."""
    options["enable_cupti"] = True
    return bench_gpu_time(fn, dry_run_iters, repeat_iters, dry_run_time_ms, repeat_time_ms, **options)


def _times(
    call: Callable[[], Any],
    before: Callable[[], Any] | None,
    counts: tuple[int | None, int | None, float, float],
    rest: bool,
    aggregate_op: Callable[[list[float]], float],
    on_gpu: bool,
) -> list[float]:
    """Milliseconds of each of some calls, after others that are not counted."""
    measure = _by_events if on_gpu else _by_clock
    measure(call, before, 1, 0.0)
    estimates = measure(call, before, 5, 0.0)
    estimate = max(aggregate_gpu_time_across_ranks(sum(estimates) / len(estimates), aggregate_op), 1e-6)
    dry, repeat, dry_ms, repeat_ms = counts
    measure(call, before, max(1, int(dry_ms / estimate)) if dry is None else dry, 0.0)
    repeat = max(1, int(repeat_ms / estimate)) if repeat is None else repeat
    times = measure(call, before, repeat, estimate if rest else 0.0)
    return aggregate_gpu_time_across_ranks(times, aggregate_op)


def _by_events(call: Callable[[], Any], before: Callable[[], Any] | None, count: int, rest: float) -> list[float]:
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
    torch.cuda.synchronize()
    for begin, end in events:
        if before is not None:
            before()
        begin.record()
        call()
        end.record()
        if rest:
            sleep_after_kernel_run(rest)
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) for begin, end in events]


def _by_clock(call: Callable[[], Any], before: Callable[[], Any] | None, count: int, rest: float) -> list[float]:
    times = []
    for _ in range(count):
        begin = time.perf_counter()
        call()
        times.append((time.perf_counter() - begin) * 1e3)
        if rest:
            sleep_after_kernel_run(rest)
    return times


def _captured(fn: Callable[..., Any], calls: list[tuple[Sequence[Any], dict[str, Any]]]) -> torch.cuda.CUDAGraph:
    """A graph of these calls. It keeps no tensors: the closure of its caller does."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # which may still be making what calls read
    with torch.cuda.stream(stream):
        for args, kwargs in calls[:_WARM]:
            fn(*args, **kwargs)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for args, kwargs in calls:
            fn(*args, **kwargs)
    graph._calls = calls  # type: ignore[attr-defined]  # whose tensors it reads
    return graph


def _copy(x: Tensor) -> Tensor:
    """A copy with the same strides, whatever they are; tensors on the host stay."""
    if not x.is_cuda:
        return x
    if not x.numel():
        return x.clone()
    span = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    return x.detach().as_strided((span,), (1,)).clone().as_strided(x.shape, x.stride())


def get_l2_cache_size(device: torch.device | int | str | None = None) -> int:
    """Bytes of a GPU's second-level cache."""
    size: int = torch.cuda.get_device_properties(
        torch.cuda.current_device() if device is None else device
    ).L2_cache_size
    return size


def calculate_rotation_count(
    tensors: Sequence[Tensor], device: torch.device | int | str | None = None, min_rotations: int = 2
) -> int:
    """How many copies of the tensors on a GPU take turns so that none is in its cache when it is used again."""
    size = sum(x.nbytes for x in tensors if x.is_cuda)
    enough = _COLD * get_l2_cache_size(device) if size else 0
    return 1 if size >= enough else max(min_rotations, math.ceil(enough / size) + 1)


def count_bytes(*tensors: Any) -> int:
    """Bytes of all tensors in nested sequences."""
    return sum(x.nbytes for x in tree_flatten(tensors)[0] if isinstance(x, Tensor))


def aggregate_gpu_time_across_ranks(x: Any, op: Callable[[list[Any]], Any]) -> Any:
    """`op` of the ranks' numbers, or of those at each place of the ranks' lists; x itself where there is one rank."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return x
    ranks = torch.distributed.get_world_size()
    if ranks == 1:
        return x
    found: list[Any] = [None] * ranks
    torch.distributed.all_gather_object(found, x)
    return [op(list(each)) for each in zip(*found, strict=True)] if isinstance(x, list) else op(found)


def set_seed(random_seed: int) -> None:
    """Seed Python's, NumPy's and torch's random numbers."""
    random.seed(random_seed)
    np.random.seed(random_seed)
    torch.manual_seed(random_seed)


def sleep_after_kernel_run(execution_time: float) -> None:
    """Sleep 5 times as long as a call took (execution_time is in milliseconds), at most a second."""
    time.sleep(min(execution_time / 200, 1.0) if math.isfinite(execution_time) else 0.01)


def _causal(seen: Any, kv: Any, causal: bool) -> Any:
    """Twice the pairs of a query and a key that it sees, as FlashInfer counts them: half of the last square is seen."""
    return seen * (2 * kv - seen) if causal else 2 * seen * kv


def attention_flops(
    batch_size: int,
    qo_seqlen: int,
    kv_seqlen: int,
    head_dim_qk: int,
    head_dim_vo: int,
    num_qo_heads: int,
    causal: bool,
) -> int:
    """Floating-point operations of attention over requests of one length, those of the two matrix products."""
    if qo_seqlen > kv_seqlen:
        raise ValueError(f"qo_seqlen = {qo_seqlen} is not supported: kv_seqlen = {kv_seqlen} at most")
    pairs: int = _causal(qo_seqlen, kv_seqlen, causal)
    return batch_size * pairs * num_qo_heads * (head_dim_qk + head_dim_vo)


def attention_flops_with_actual_seq_lens(
    actual_seq_lens_q: Tensor,
    actual_seq_lens_kv: Tensor,
    head_dim_qk: int,
    head_dim_vo: int,
    num_qo_heads: int,
    causal: bool,
) -> Tensor:
    """`attention_flops` of requests of these lengths, as a tensor of one number."""
    if causal and bool((actual_seq_lens_q > actual_seq_lens_kv).any()):
        raise ValueError("actual_seq_lens_q exceeds actual_seq_lens_kv: causal attention needs as many keys as queries")
    q, kv = (x.double().flatten() for x in (actual_seq_lens_q, actual_seq_lens_kv))
    pairs: Tensor = _causal(q, kv, causal).sum()
    return pairs * num_qo_heads * (head_dim_qk + head_dim_vo)


def _rate(amount: float, ms: float, unit: float) -> float:
    return 0.0 if math.isnan(ms) else amount / (ms * 1e-3) / unit


def attention_tflops_per_sec(
    batch_size: int,
    qo_seqlen: int,
    kv_seqlen: int,
    head_dim_qk: int,
    head_dim_vo: int,
    num_qo_heads: int,
    causal: bool,
    time: float,
) -> float:
    """`attention_flops` in `time` milliseconds, in 10**12 a second; 0 if the time is NaN."""
    sizes = (batch_size, qo_seqlen, kv_seqlen, head_dim_qk, head_dim_vo, num_qo_heads, causal)
    return _rate(attention_flops(*sizes), time, 1e12)


def attention_tflops_per_sec_with_actual_seq_lens(
    actual_seq_lens_q: Tensor,
    actual_seq_lens_kv: Tensor,
    head_dim_qk: int,
    head_dim_vo: int,
    num_qo_heads: int,
    causal: bool,
    ms: float,
) -> float:
    """`attention_flops_with_actual_seq_lens` in `ms` milliseconds, in 10**12 a second; 0 if the time is NaN."""
    sizes = (actual_seq_lens_q, actual_seq_lens_kv, head_dim_qk, head_dim_vo, num_qo_heads, causal)
    return _rate(float(attention_flops_with_actual_seq_lens(*sizes)), ms, 1e12)


def attention_tb_per_sec(
    batch_size: int,
    qo_seqlen: int,
    kv_seqlen: int,
    head_dim_qk: int,
    head_dim_vo: int,
    num_qo_heads: int,
    num_kv_heads: int,
    time: float,
    q_dtype: torch.dtype = _BF16,
    k_dtype: torch.dtype = _BF16,
    v_dtype: torch.dtype = _BF16,
    o_dtype: torch.dtype = _BF16,
) -> float:
    """Bytes of q, k, v and the output in `time` milliseconds, in 10**12 a second; 0 if the time is NaN."""
    rows, keys = batch_size * qo_seqlen * num_qo_heads, batch_size * kv_seqlen * num_kv_heads
    return _rate(_bytes(rows, keys, head_dim_qk, head_dim_vo, q_dtype, k_dtype, v_dtype, o_dtype), time, 1e12)


def attention_tb_per_sec_with_actual_seq_lens(
    actual_seq_lens_q: Tensor,
    actual_seq_lens_kv: Tensor,
    head_dim_qk: int,
    head_dim_vo: int,
    num_qo_heads: int,
    num_kv_heads: int,
    time: float,
    q_dtype: torch.dtype = _BF16,
    k_dtype: torch.dtype = _BF16,
    v_dtype: torch.dtype = _BF16,
    o_dtype: torch.dtype = _BF16,
) -> float:
    """`attention_tb_per_sec` of requests of these lengths."""
    rows, keys = int(actual_seq_lens_q.sum()) * num_qo_heads, int(actual_seq_lens_kv.sum()) * num_kv_heads
    return _rate(_bytes(rows, keys, head_dim_qk, head_dim_vo, q_dtype, k_dtype, v_dtype, o_dtype), time, 1e12)


def _bytes(rows: int, keys: int, qk: int, vo: int, *dtypes: torch.dtype) -> int:
    q, k, v, o = (x.itemsize for x in dtypes)
    return rows * (qk * q + vo * o) + keys * (qk * k + vo * v)
