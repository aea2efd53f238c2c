"""How many pages of keys and values a device has room for."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable

import torch

from quire.engine.graph_inputs import StepShape
from quire.engine.runner import Runner
from quire.engine.selfcheck import profile


def free_pages(page_bytes: int) -> int:
    """The pages that a quarter of the host's free memory holds, at least 1."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(1, free // 4 // page_bytes)


def profiled_pages(
    make: Callable[[int], Runner],
    page_size: int,
    page_bytes: int,
    largest: StepShape,
    utilization: float,
    cuda_graphs: bool,
) -> int:
    """The pages that a GPU has room for beside what is on it already and what a step of the largest size takes.

    Args:
        make: makes a runner with a number of pages.
        page_size: tokens in a page.
        page_bytes: the bytes of a page in the caches of all layers.
        largest: the most requests and tokens of a step.
        utilization: the part of the GPU's memory that may be used.
        cuda_graphs: whether graphs will be captured. These have a pool of their own, so the memory of a step counts
            twice.

    Raises:
        ValueError: there is no room for a page.
    """
    # A step of the largest size needs at most this many pages.
    trial = make(-(-largest.tokens // page_size) + 2 * largest.rows)
    device = trial.model.device
    # A step of one token compiles kernels and makes workspaces.
    profile(trial, 1, 1)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    profile(trial, largest.tokens, largest.rows)
    step = torch.cuda.max_memory_allocated(device) - before
    trial.model.hidden_states.last = None
    del trial
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    capacity = total * utilization - (total - free) - step * (1 + cuda_graphs)
    if capacity < page_bytes:
        gib = 2**30
        what = f"{free / gib:.1f} of {total / gib:.1f} GiB are free beside the weights and other programs"
        needed = f"a step takes {step * (1 + cuda_graphs) / gib:.1f} GiB"
        raise ValueError(f"gpu_memory_utilization = {utilization}: {what}, and {needed}: no page of the cache has room")
    return int(capacity) // page_bytes
