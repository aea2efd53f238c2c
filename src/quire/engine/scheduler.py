"""Scheduling: which requests compute how many tokens in the next step, and on which pages.

The scheduler uses continuous batching. Running requests come first, in the order of their arrival: a decode needs one
token, a prefill takes the rest of the token budget (a chunk). Then waiting requests are admitted, in turn from each of
their calls; those whose adapter is not on the device yet are passed over until it is. When pages run out, the prefix
tree evicts pages that no request holds, and after that the last request is preempted: its pages are released, and it
waits to be computed again from its tokens.

The scheduler works with the numbers of tokens, not with the tokens. A step can thus be scheduled while the last token
of its requests is in flight, that is, sampled by a step whose results the host has not read. Pages can be released and
given to other requests meanwhile, since the device computes steps in order. Only the prefix tree needs the tokens.
"""

from __future__ import annotations

from array import array
from dataclasses import replace

import numpy as np

from quire.cache import PageAllocator, PrefixTree
from quire.engine.adapters.slots import AdapterSlots
from quire.engine.batch import Chunk, StepBatch
from quire.engine.request import Request
from quire.engine.stats import Stats
from quire.engine.waiting import WaitingQueue

# The most log-probabilities of prompts that a step computes, as logits of all tokens of a long prompt would take too
# much memory. A prompt whose log-probabilities are wanted is computed in chunks of so many tokens.
MAX_PROMPT_LOGPROBS = 256
# The number of waiting requests whose adapters are copied to the device before there is room for the requests.
_COPIED_AHEAD = 4


class Scheduler:
    """Waiting and running requests, and the pages of the cache.

    Args:
        num_pages, page_size: of the cache.
        max_num_seqs: the largest number of running requests.
        max_batched_tokens: the largest number of tokens of a step.
        speculative_tokens: the most drafts of a request in a step.
        stats: counts what the scheduler does; by default new counts.
        adapters: those on the device; None: no request has one.

    Attributes:
        max_rows: the largest number of tokens that a step samples: one for each request and one for each draft.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        max_num_seqs: int,
        max_batched_tokens: int,
        speculative_tokens: int = 0,
        stats: Stats | None = None,
        adapters: AdapterSlots | None = None,
    ) -> None:
        self.page_size, self.max_num_seqs = page_size, max_num_seqs
        self.max_batched_tokens = max_batched_tokens
        self.speculative_tokens = speculative_tokens
        self.max_rows = max(max_num_seqs, 1 + speculative_tokens) if speculative_tokens else max_num_seqs
        self.allocator = PageAllocator(num_pages)
        self.tree = PrefixTree(self.allocator, page_size)
        self.waiting = WaitingQueue()
        self.running: list[Request] = []
        self.stats = Stats() if stats is None else stats
        self.adapters = adapters
        # The last step, if it was one token of each running request, and how often it can be repeated until a request
        # has all its tokens.
        self._last_decodes: StepBatch | None = None
        self._steps_left = 0
        # How many more log-probabilities of prompts the step can compute.
        self._prompt_logprobs_left = MAX_PROMPT_LOGPROBS
        # The state of adapters and queue at the last pass that ended because no other waiting request was ready.
        self._none_ready: tuple[int, int] | None = None
        # Running requests that have nothing left to compute, and end when the host has read their embeddings.
        self._num_computed_requests = 0

    def add(self, request: Request) -> None:
        self.waiting.append(request)
        self.stats.prompt_tokens += request.prompt_len

    def schedule(self) -> StepBatch:
        """The next step; empty if there are no requests, or if all wait for tokens in flight."""
        self._prompt_logprobs_left, self._num_computed_requests = MAX_PROMPT_LOGPROBS, 0
        batch, can_admit = self._decode_again(), True
        can_repeat = batch is not None
        if batch is None:
            batch, can_admit = self._continue_running()
            if batch.decode_only and 0 < len(batch) == len(self.running) and not self.speculative_tokens:
                can_repeat = True
                self._steps_left = min(r.max_total_tokens - r.num_computed_tokens for r in self.running) - 2
        admitted = self._admit(self.max_batched_tokens - batch.num_tokens) if can_admit else []
        held = self.allocator.num_pages - self.allocator.num_free
        self.stats.peak_pages = max(self.stats.peak_pages, held)
        self._last_decodes = batch if can_repeat and not admitted else None
        return StepBatch.of([*batch, *admitted]) if admitted else batch

    def snapshot(self) -> Stats:
        """The counts, and the numbers of requests and pages now; also for other threads."""
        adapters = self.adapters
        return replace(
            self.stats,
            running=len(self.running),
            waiting=len(self.waiting),
            pages=self.allocator.num_pages,
            free_pages=self.allocator.num_free,
            cached_pages=len(self.tree),
            held_pages=self._held(),
            passed_over=self.waiting.num_passed_over,
            device_adapters=0 if adapters is None else len(adapters),
            held_adapters=0 if adapters is None else adapters.num_held_adapters,
            free_rank_pages=0 if adapters is None else adapters.num_free_pages,
            adapter_copies=0 if adapters is None else adapters.num_loads,
        )

    def _held(self) -> int:
        """The number of pages that running requests hold; prompts with a common prefix hold the same pages."""
        held = np.zeros(self.allocator.num_pages, dtype=bool)
        for request in list(self.running):
            # Of a copy, since the engine may add pages meanwhile.
            held[np.asarray(request.pages[:], dtype=np.int32)] = True
        return int(held.sum())

    def remove(self, request: Request) -> None:
        """Remove a waiting or running request that has ended; its full pages stay in the prefix tree."""
        if request in self.running:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        if request.finish_reason in ("stop", "length"):
            self._share(request, request.num_computed_tokens)
        self._release(request)
        self._forget_adapter(request)

    def reset(self) -> list[Request]:
        """Remove all requests and all prefixes, because the contents of the cache are undefined."""
        requests = [*self.running, *self.waiting]
        for request in requests:
            self._release(request)
            self._forget_adapter(request)
        self.running.clear()
        self.waiting.clear()
        self.tree.clear()
        return requests

    def _forget_adapter(self, request: Request) -> None:
        """Let the adapter of a request that has ended go, if it has been unloaded. Callers may keep the request."""
        adapter, request.adapter = request.adapter, None
        if adapter is not None and self.adapters is not None:
            self.adapters.discard(adapter)

    def compute_again(self, request: Request) -> None:
        """Release the pages of a running request and put it first in the queue; all its tokens are computed again."""
        self.running.remove(request)
        self._release(request)
        self.waiting.appendleft(request)

    def _decode_again(self) -> StepBatch | None:
        """A step of one more token of each running request, if the last step was such a step. None if it was not, or if
        requests must be scheduled one by one because there are too few pages.
        """
        last = self._last_decodes
        if last is None or self._steps_left <= 0 or last.requests != self.running:
            return None
        starts = last.starts + 1
        # The requests whose pages are full.
        full = np.flatnonzero(starts % self.page_size == 0)
        short = len(full) - self.allocator.num_free
        if short > 0 and self.tree.evict(short) < short:
            return None
        pages = self.allocator.allocate(len(full))
        for i, start, page in zip(full.tolist(), starts[full].tolist(), pages, strict=True):
            request = last.requests[i]
            request.pages.append(page)
            self._share(request, start)
        self._steps_left -= 1
        return StepBatch(last.requests, starts)

    def _continue_running(self) -> tuple[StepBatch, bool]:
        """Chunks of running requests, and whether none of them was preempted, so that others may be admitted."""
        running, size = self.running, self.page_size
        lefts = [r.num_total_tokens - r.num_unneeded_tokens - r.num_computed_tokens for r in running]
        self._num_computed_requests = lefts.count(0)
        budget, prefill_budget = self.max_batched_tokens, self.max_batched_tokens - lefts.count(1)
        spare_rows = self.max_rows - min(self.max_num_seqs, len(running) + len(self.waiting))
        chunks: list[Chunk] = []
        # A preemption removes requests from the end of `running` during this loop.
        for request, left in zip(running, lefts, strict=False):
            start = request.num_computed_tokens
            count = 1 if left == 1 <= budget else min(left, prefill_budget, budget)
            count, num_prompt_logprobs = self._bound_prompt_logprobs(request, count)
            # A request at its limit ends when its last token is read.
            if count <= 0 or start + left >= request.max_total_tokens:
                continue
            end = start + count
            if end > len(request.pages) * size and not self._make_room(request, end):
                return StepBatch.of(chunks), False
            # The known tokens may just have filled a page.
            if count > 1 or (end - request.num_inflight_tokens) % size == 0:
                self._share(request, end)
            samples = count == left and request.samples
            chunk = Chunk(request, start, count, samples, num_prompt_logprobs=num_prompt_logprobs)
            chunks.append(chunk)
            budget -= count
            self._prompt_logprobs_left -= num_prompt_logprobs
            if left > 1:
                prefill_budget -= count
            elif self.speculative_tokens:
                chunk.drafts = drafts = self._draft(request, end, min(spare_rows, prefill_budget))
                chunk.count += len(drafts)
                budget, prefill_budget, spare_rows = (x - len(drafts) for x in (budget, prefill_budget, spare_rows))
        return StepBatch.of(chunks), len(running) == len(lefts)

    def _bound_prompt_logprobs(self, request: Request, count: int) -> tuple[int, int]:
        """The number of tokens of a request's chunk, at most `count`, for which the step has room for the wanted
        log-probabilities of the prompt; and the number of these log-probabilities.
        """
        start, left = request.num_computed_tokens, self._prompt_logprobs_left
        wanted = request.num_wanted_prompt_logprobs(start, start + count)
        if wanted <= left:
            return count, wanted
        return max(start, request.num_known_prompt_logprobs) - start + left, left

    def _draft(self, request: Request, end: int, max_drafts: int) -> list[int]:
        """At most `max_drafts` drafts after the `end` tokens of a running request, with pages for them. Drafts take no
        page from the prefix tree, and none that a running request may need in the next step.
        """
        if request.lookup is None:
            return []
        free = max(0, self.allocator.num_free - len(self.running))
        capacity = (len(request.pages) + free) * self.page_size - end
        max_drafts = min(max_drafts, self.speculative_tokens, capacity, request.max_total_tokens - end - 1)
        drafts = request.lookup.draft(request.tokens, max_drafts)
        self._reserve(request, end + len(drafts))
        self.stats.drafted_tokens += len(drafts)
        return drafts

    def _make_room(self, request: Request, end: int) -> bool:
        """Reserve pages for `end` tokens of a running request, and preempt the last requests until that succeeds; False
        if the request itself was preempted.
        """
        while not self._reserve(request, end):
            # The victim has no chunk in this step yet, since chunks are made in the order of `running`.
            victim = self.running[-1]
            self.compute_again(victim)
            self.stats.preemptions += 1
            if victim is request:
                return False
        return True

    def _admit(self, budget: int) -> list[Chunk]:
        """Chunks of waiting requests, within the token budget, max_num_seqs and the free pages."""
        chunks: list[Chunk] = []
        max_running = self.max_num_seqs + self._num_computed_requests
        state = None
        if self.adapters is not None and self.waiting:
            state = self.adapters.poll(), self.waiting.num_changes
            if state == self._none_ready:
                return chunks
            self.adapters.begin_pass()
        in_turn = self.waiting.in_turn(self._is_ready)
        while budget > 0 and len(self.running) < max_running:
            request = next(in_turn, None)
            if request is None:
                self._none_ready = state
                return chunks
            # A request that was preempted waits until its tokens are known.
            if request.num_inflight_tokens:
                break
            length = len(request.tokens) - request.num_unneeded_tokens
            pages, request.node = self.tree.find(
                request.tokens[: request.num_reusable_tokens(length)], request.namespace
            )
            request.pages, request.num_computed_tokens = array("i", pages), len(pages) * self.page_size
            count = min(length - request.num_computed_tokens, budget)
            count, num_prompt_logprobs = self._bound_prompt_logprobs(request, count)
            if count == 0 or not self._reserve(request, request.num_computed_tokens + count, spare=len(self.running)):
                self._release(request)
                break
            self.waiting.take(request)
            self.running.append(request)
            if request.adapter is not None and self.adapters is not None:
                request.slot = self.adapters.hold(request.adapter)
            if not request.admitted:
                request.admitted = True
                request.num_cached_tokens = request.num_computed_tokens
                self.stats.cached_tokens += request.num_cached_tokens
                self.stats.admitted_tokens += request.prompt_len
            self._share(request, request.num_computed_tokens + count)
            samples = request.num_computed_tokens + count == length and request.samples
            start = request.num_computed_tokens
            chunks.append(Chunk(request, start, count, samples, num_prompt_logprobs=num_prompt_logprobs))
            budget -= count
            self._prompt_logprobs_left -= num_prompt_logprobs
        if self.adapters is not None:
            # Begin to copy the adapters of the requests that come next.
            for request in self.waiting.next(_COPIED_AHEAD):
                self._is_ready(request)
        return chunks

    def _is_ready(self, request: Request) -> bool:
        """Whether the adapter of a waiting request, if it has one, is on the device."""
        return request.adapter is None or (self.adapters is not None and self.adapters.is_ready(request.adapter))

    def _share(self, request: Request, end: int) -> None:
        """Insert the full pages among the first `end` tokens into the prefix tree, if they are known. Requests may
        use these pages in the step that computes them already, since each layer writes all new keys and values before
        it computes attention.
        """
        full = min(end, len(request.tokens)) // self.page_size
        if full > 0 and (request.node is None or request.node.depth < full):
            namespace = request.namespace
            request.node = self.tree.insert(request.tokens, request.pages, request.node, full, namespace)

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
        if request.node is not None:
            self.tree.touch(request.node)
        self.allocator.release(request.pages)
        if request.slot >= 0 and request.adapter is not None and self.adapters is not None:
            self.adapters.release(request.adapter)
            request.slot = -1
        request.pages, request.node = array("i"), None
        request.num_computed_tokens = 0
