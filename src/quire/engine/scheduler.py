"""Scheduling: which requests compute how many tokens in the next step, and on which pages.

The scheduler uses continuous batching. Running requests come first, in the order of their arrival: a decode needs one
token, a prefill takes the rest of the token budget (a chunk). Then waiting requests are admitted. When pages run out,
the prefix tree evicts pages that no request holds, and after that the last request is preempted: its pages are
released, and it waits to be computed again from its tokens.
"""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass

from quire.cache import PageAllocator, PrefixTree
from quire.engine.request import Request


@dataclass(slots=True)
class Chunk:
    """Tokens start to start + count of a request, which one step computes."""

    request: Request
    start: int
    count: int

    @property
    def samples(self) -> bool:
        """Whether the chunk ends with the request's last token, so the step samples the next one."""
        return self.start + self.count == len(self.request.tokens)


@dataclass(slots=True)
class Stats:
    """Counts since the engine started."""

    steps: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    reused_tokens: int = 0  # tokens of prompts that were in the cache
    preemptions: int = 0
    peak_pages: int = 0  # the most pages in use at once


class Scheduler:
    """Waiting and running requests, and the pages of the cache.

    Args:
        num_pages, page_size: of the cache.
        max_num_seqs: the largest number of running requests.
        max_batched_tokens: the largest number of tokens of a step.
    """

    def __init__(self, num_pages: int, page_size: int, max_num_seqs: int, max_batched_tokens: int) -> None:
        self.page_size, self.max_num_seqs, self.max_batched_tokens = page_size, max_num_seqs, max_batched_tokens
        self.allocator = PageAllocator(num_pages)
        self.tree = PrefixTree(self.allocator, page_size)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.stats = Stats()

    def add(self, request: Request) -> None:
        self.waiting.append(request)
        self.stats.prompt_tokens += request.prompt_len

    def schedule(self) -> list[Chunk]:
        """The chunks of the next step; empty if there are no requests."""
        chunks, preempted = self._continue_running()
        if not preempted:
            chunks += self._admit(self.max_batched_tokens - sum(c.count for c in chunks))
        held = self.allocator.num_pages - self.allocator.num_free
        self.stats.peak_pages = max(self.stats.peak_pages, held)
        return chunks

    def remove(self, request: Request) -> None:
        """Remove a waiting or running request that has ended; its full pages stay in the prefix tree."""
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        self._release(request)

    def reset(self) -> list[Request]:
        """Remove all requests and all prefixes, because the contents of the cache are undefined."""
        requests = [*self.running, *self.waiting]
        for request in requests:
            self._release(request)
        self.running.clear()
        self.waiting.clear()
        self.tree.clear()
        return requests

    def compute_again(self, request: Request) -> None:
        """Release the pages of a running request and put it first in the queue; all its tokens are computed again."""
        self.running.remove(request)
        self._release(request)
        self.waiting.appendleft(request)

    def _continue_running(self) -> tuple[list[Chunk], bool]:
        """Chunks of running requests, and whether any was preempted."""
        decoding = sum(len(r.tokens) - r.computed == 1 for r in self.running)
        budget, prefill_budget = self.max_batched_tokens, self.max_batched_tokens - decoding
        chunks: list[Chunk] = []
        preempted, i = False, 0
        while i < len(self.running):
            request = self.running[i]
            left = len(request.tokens) - request.computed
            count = min(left, budget) if left == 1 else min(left, prefill_budget, budget)
            if count > 0:
                while not self._reserve(request, request.computed + count):
                    victim = self.running[-1]  # not in this step, whose requests have indices below i
                    self.compute_again(victim)
                    self.stats.preemptions += 1
                    preempted = True
                    if victim is request:
                        return chunks, preempted
                chunks.append(self._chunk(request, count))
                budget -= count
                prefill_budget -= count if left > 1 else 0
            i += 1
        return chunks, preempted

    def _admit(self, budget: int) -> list[Chunk]:
        """Chunks of waiting requests, within the token budget, max_num_seqs and the free pages."""
        chunks: list[Chunk] = []
        while self.waiting and budget > 0 and len(self.running) < self.max_num_seqs:
            request = self.waiting[0]
            request.pages = array("i", self.tree.match(request.tokens[:-1]))  # the last token is always computed
            request.computed = len(request.pages) * self.page_size
            count = min(len(request.tokens) - request.computed, budget)
            if not self._reserve(request, request.computed + count, spare=len(self.running)):
                self._release(request)
                break
            self.waiting.popleft()
            self.running.append(request)
            if not request.admitted:
                request.admitted = True
                request.reused = request.computed
                self.stats.reused_tokens += request.reused
            chunks.append(self._chunk(request, count))
            budget -= count
        return chunks

    def _chunk(self, request: Request, count: int) -> Chunk:
        """Make a chunk and insert its full pages into the prefix tree. Other requests may use these pages in this step
        already, since each layer writes all new keys and values before it computes attention.
        """
        chunk = Chunk(request, request.computed, count)
        full = (chunk.start + count) // self.page_size
        if full > chunk.start // self.page_size:
            self.tree.insert(request.tokens[: full * self.page_size], request.pages[:full])
        return chunk

    def _reserve(self, request: Request, length: int, spare: int = 0) -> bool:
        """Allocate pages for `length` tokens of a request; return False if fewer than `spare` pages would stay free. An
        admission spares one page per running request, so it does not cause a preemption in the next step.
        """
        count = -(-length // self.page_size) - len(request.pages)
        short = count + spare - self.allocator.num_free
        if short > 0 and self.tree.evict(short) < short:
            return False
        request.pages.extend(self.allocator.allocate(count))
        return True

    def _release(self, request: Request) -> None:
        self.allocator.release(request.pages)
        request.pages, request.computed = array("i"), 0
