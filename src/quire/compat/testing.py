"""The functions of `flashinfer.testing`: timing, and counts of operations and bytes.

Calls on a GPU are timed by CUDA events. Without a GPU, and if all tensor arguments of a call are on the host, calls are
timed by the host's clock, and caches are not flushed.
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

from quire.kernels.torch_internals import tree_flatten, tree_map_only

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
# The number of calls before a graph is captured, which compile kernels and allocate memory.
_WARM_UP = 3
# How many times all copies of the tensors fill the L2 cache, so that no copy is in it when it is used again.
_COLD = 5


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
        dry_run_iters, repeat_iters: the numbers of measurements to discard and to return; None: as many as take
            dry_run_time_ms and repeat_time_ms.
        l2_flush, l2_flush_size_mb, l2_flush_device: deprecated. l2_flush is an older name of cold_l2_cache;
            l2_flush_size_mb is the size of the buffer that is written to flush the cache, by default twice the cache.
        sleep_after_run: whether to sleep after each measurement (see `sleep_after_kernel_run`).
        enable_cupti: warns that CUPTI is not used.
        use_cuda_graph: measure replays of a graph of num_iters_within_graph calls, and return the time of one call.
        cold_l2_cache: flush the cache before each measurement or, in a graph, alternate between copies of the argument
            tensors. Tensors that fn does not get as arguments stay in the cache during a graph.
        aggregate_op: reduces the times of all ranks to one, if torch.distributed is initialized.
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
        graph = _capture(fn, list(islice(cycle(copies), num_iters_within_graph)))
        times = _times(graph.replay, None, counts, sleep_after_run, aggregate_op, on_gpu)
        return [x / num_iters_within_graph for x in times]
    flush = None
    if cold_l2_cache:
        size = 2 * get_l2_cache_size() if l2_flush_size_mb is None else l2_flush_size_mb << 20
        flush = torch.empty(size, dtype=torch.int8, device="cuda").zero_
    return _times(call, flush, counts, sleep_after_run, aggregate_op, on_gpu)


def bench_gpu_time_with_cuda_event(fn: Callable[..., Any], *args: Any, **options: Any) -> list[float]:
    """`bench_gpu_time` without a graph."""
    return bench_gpu_time(fn, *args, **options)


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


def bench_gpu_time_with_cupti(fn: Callable[..., Any], *args: Any, **options: Any) -> list[float]:
    """`bench_gpu_time` with enable_cupti=True, which warns that CUDA events are used."""
    return bench_gpu_time(fn, *args, **(options | {"enable_cupti": True}))


def _times(
    call: Callable[[], Any],
    before: Callable[[], Any] | None,
    counts: tuple[int | None, int | None, float, float],
    rest: bool,
    aggregate_op: Callable[[list[float]], float],
    on_gpu: bool,
) -> list[float]:
    """The milliseconds of each measured call, after a warm-up that is not returned."""
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
    for start, end in events:
        if before is not None:
            before()
        start.record()
        call()
        end.record()
        if rest:
            sleep_after_kernel_run(rest)
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in events]


def _by_clock(call: Callable[[], Any], before: Callable[[], Any] | None, count: int, rest: float) -> list[float]:
    times = []
    for _ in range(count):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e3)
        if rest:
            sleep_after_kernel_run(rest)
    return times


def _capture(fn: Callable[..., Any], calls: list[tuple[Sequence[Any], dict[str, Any]]]) -> torch.cuda.CUDAGraph:
    """A CUDA graph of these calls, which also keeps their tensors alive."""
    stream = torch.cuda.Stream()
    # The current stream may still compute the arguments.
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for args, kwargs in calls[:_WARM_UP]:
            fn(*args, **kwargs)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for args, kwargs in calls:
            fn(*args, **kwargs)
    # A replay reads the arguments, which would be freed if nothing referred to them.
    graph._calls = calls  # type: ignore[attr-defined]
    return graph


def _copy(x: Tensor) -> Tensor:
    """A copy of a GPU tensor with equal strides; tensors on the host are not copied."""
    if not x.is_cuda:
        return x
    if not x.numel():
        return x.clone()
    span = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    return x.detach().as_strided((span,), (1,)).clone().as_strided(x.shape, x.stride())


def get_l2_cache_size(device: torch.device | int | str | None = None) -> int:
    """The number of bytes of a GPU's L2 cache."""
    size: int = torch.cuda.get_device_properties(
        torch.cuda.current_device() if device is None else device
    ).L2_cache_size
    return size


def calculate_rotation_count(
    tensors: Sequence[Tensor], device: torch.device | int | str | None = None, min_rotations: int = 2
) -> int:
    """The number of copies of GPU tensors to alternate between, so that none is in the L2 cache when it is reused."""
    size = sum(x.nbytes for x in tensors if x.is_cuda)
    enough = _COLD * get_l2_cache_size(device) if size else 0
    return 1 if size >= enough else max(min_rotations, math.ceil(enough / size) + 1)


def count_bytes(*tensors: Any) -> int:
    """The number of bytes of all tensors in nested sequences."""
    return sum(x.nbytes for x in tree_flatten(tensors)[0] if isinstance(x, Tensor))


def aggregate_gpu_time_across_ranks(x: Any, op: Callable[[list[Any]], Any]) -> Any:
    """`op` over the ranks' numbers, or over the ranks' lists element by element; x itself if there is one rank."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return x
    ranks = torch.distributed.get_world_size()
    if ranks == 1:
        return x
    gathered: list[Any] = [None] * ranks
    torch.distributed.all_gather_object(gathered, x)
    return [op(list(each)) for each in zip(*gathered, strict=True)] if isinstance(x, list) else op(gathered)


def set_seed(random_seed: int) -> None:
    """Seed the random number generators of Python, NumPy and torch."""
    random.seed(random_seed)
    np.random.seed(random_seed)
    torch.manual_seed(random_seed)


def sleep_after_kernel_run(execution_time: float) -> None:
    """Sleep for 5 times the execution_time of a call, which is in milliseconds, at most a second."""
    time.sleep(min(execution_time / 200, 1.0) if math.isfinite(execution_time) else 0.01)


def _visible_pairs(qo: Any, kv: Any, causal: bool) -> Any:
    """Twice the pairs of a query and a visible key, as FlashInfer counts them: half of the last qo keys if causal."""
    return qo * (2 * kv - qo) if causal else 2 * qo * kv


def attention_flops(
    batch_size: int,
    qo_seqlen: int,
    kv_seqlen: int,
    head_dim_qk: int,
    head_dim_vo: int,
    num_qo_heads: int,
    causal: bool,
) -> int:
    """The floating-point operations of the two matrix products of attention, for requests of one length."""
    if qo_seqlen > kv_seqlen:
        raise ValueError(f"qo_seqlen = {qo_seqlen} is not supported: kv_seqlen = {kv_seqlen} at most")
    pairs: int = _visible_pairs(qo_seqlen, kv_seqlen, causal)
    return batch_size * pairs * num_qo_heads * (head_dim_qk + head_dim_vo)


def attention_flops_with_actual_seq_lens(
    actual_seq_lens_q: Tensor,
    actual_seq_lens_kv: Tensor,
    head_dim_qk: int,
    head_dim_vo: int,
    num_qo_heads: int,
    causal: bool,
) -> Tensor:
    """`attention_flops` for requests of different lengths, as a tensor with one element."""
    if causal and bool((actual_seq_lens_q > actual_seq_lens_kv).any()):
        raise ValueError("actual_seq_lens_q exceeds actual_seq_lens_kv: causal attention needs as many keys as queries")
    q, kv = (x.double().flatten() for x in (actual_seq_lens_q, actual_seq_lens_kv))
    pairs: Tensor = _visible_pairs(q, kv, causal).sum()
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
    """`attention_flops` per `time` milliseconds, in TFLOP/s; 0 if the time is NaN."""
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
    """`attention_flops_with_actual_seq_lens` per `ms` milliseconds, in TFLOP/s; 0 if the time is NaN."""
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
    """The number of bytes of q, k, v and the output per `time` milliseconds, in TB/s; 0 if the time is NaN."""
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
    """`attention_tb_per_sec` for requests of different lengths."""
    rows, keys = int(actual_seq_lens_q.sum()) * num_qo_heads, int(actual_seq_lens_kv.sum()) * num_kv_heads
    return _rate(_bytes(rows, keys, head_dim_qk, head_dim_vo, q_dtype, k_dtype, v_dtype, o_dtype), time, 1e12)


def _bytes(rows: int, keys: int, qk: int, vo: int, *dtypes: torch.dtype) -> int:
    q, k, v, o = (x.itemsize for x in dtypes)
    return rows * (qk * q + vo * o) + keys * (qk * k + vo * v)
