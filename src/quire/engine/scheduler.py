"""Which requests compute how many tokens in the next step, and on which pages.

Continuous batching: every step is chosen anew. Running requests go first, in the order of their arrival; one that
decodes needs one token, one that still prefills takes what the budget leaves (a chunk). Then waiting requests are
admitted. When pages run out, the tree of prefixes gives up what nobody uses, and after that the latest arrival is
preempted: its pages are released and it waits again, to be computed anew from its tokens.
"""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass

from quire.cache import PageAllocator, PrefixTree
from quire.engine.request import Request


@dataclass(slots=True)
class Chunk:
    """Tokens start to start + count of a request, to be computed in one step."""

    request: Request
    start: int
    count: int

    @property
    def samples(self) -> bool:
        """Whether the chunk ends with the last known token, so that the next one is sampled."""
        return self.start + self.count == len(self.request.tokens)


@dataclass(slots=True)
class Stats:
    """Counts since the engine started."""

    steps: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    reused_tokens: int = 0  # of prompts, found in the cache
    preemptions: int = 0
    peak_pages: int = 0  # held at once


class Scheduler:
    """Waiting and running requests, and the pages of the cache.

    Args:
        num_pages, page_size: of the cache.
        max_num_seqs: requests that run at once, at most.
        max_batched_tokens: tokens that a step computes, at most.
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
        """The chunks of the next step; empty if there is nothing to do."""
        chunks, preempted = self._continue_running()
        if not preempted:
            chunks += self._admit(self.max_batched_tokens - sum(c.count for c in chunks))
        held = self.allocator.num_pages - self.allocator.num_free
        self.stats.peak_pages = max(self.stats.peak_pages, held)
        return chunks

    def remove(self, request: Request) -> None:
        """Forget a request that has ended, wherever it is; its full pages stay known as prefixes."""
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        self._give_back(request)

    def reset(self) -> list[Request]:
        """Forget all requests and all prefixes: what the cache holds is not known any more."""
        requests = [*self.running, *self.waiting]
        for request in requests:
            self._give_back(request)
        self.running.clear()
        self.waiting.clear()
        self.tree.clear()
        return requests

    def compute_again(self, request: Request) -> None:
        """Release a running request's pages and let it wait, before all others, to be computed anew from its tokens."""
        self.running.remove(request)
        self._give_back(request)
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
                    victim = self.running[-1]  # never one of this step's: those stand before i
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
        """Chunks of waiting requests, as far as budget, seats and pages go."""
        chunks: list[Chunk] = []
        while self.waiting and budget > 0 and len(self.running) < self.max_num_seqs:
            request = self.waiting[0]
            request.pages = array("i", self.tree.match(request.tokens[:-1]))  # at least the last token is computed
            request.computed = len(request.pages) * self.page_size
            count = min(len(request.tokens) - request.computed, budget)
            if not self._reserve(request, request.computed + count, spare=len(self.running)):
                self._give_back(request)
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
        """A chunk, and its full pages made known: whoever uses them in this very step reads them after they are
        written, since each layer writes all new keys before it attends.
        """
        chunk = Chunk(request, request.computed, count)
        full = (chunk.start + count) // self.page_size
        if full > chunk.start // self.page_size:
            self.tree.insert(request.tokens[: full * self.page_size], request.pages[:full])
        return chunk

    def _reserve(self, request: Request, length: int, spare: int = 0) -> bool:
        """Pages for `length` tokens of a request, if `spare` more stay free (one for each that runs already, so that
        an admission does not at once preempt somebody).
        """
        count = -(-length // self.page_size) - len(request.pages)
        short = count + spare - self.allocator.num_free
        if short > 0 and self.tree.evict(short) < short:
            return False
        request.pages.extend(self.allocator.allocate(count))
        return True

    def _give_back(self, request: Request) -> None:
        self.allocator.release(request.pages)
        request.pages, request.computed = array("i"), 0
