"""What the engine has counted since it started, and its state."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Stats:
    """Counts since the engine started, and its state when the counts were asked for.

    Attributes:
        steps: computed steps.
        prompt_tokens: tokens of the prompts of all requests.
        admitted_tokens: tokens of the prompts of requests that have been admitted at least once.
        cached_tokens: those of admitted_tokens that were in the cache.
        generated_tokens: sampled tokens.
        drafted_tokens: tokens that were guessed and computed, see `LLM(speculative_tokens=...)`.
        accepted_tokens: those of drafted_tokens that were sampled, too, and thus did not need a step of their own.
        preemptions: requests whose pages were released before they ended.
        peak_pages: the most pages in use at once, the prefix tree's included.
        running, waiting: requests.
        pages, free_pages: pages of the cache, and those that neither a request nor the prefix tree holds.
        cached_pages: pages of the prefix tree, which requests may hold, too.
        held_pages: pages that running requests hold.
        passed_over: requests that wait, while later ones may run, for their adapter to be on the device; one of each
            call.
        device_adapters: adapters on the device.
        held_adapters: those of them that running requests have.
        free_rank_pages: rank pages without an adapter.
        adapter_copies: copies of adapters to the device, each of a whole one.
    """

    steps: int = 0
    prompt_tokens: int = 0
    admitted_tokens: int = 0
    generated_tokens: int = 0
    cached_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    preemptions: int = 0
    peak_pages: int = 0
    running: int = 0
    waiting: int = 0
    pages: int = 0
    free_pages: int = 0
    cached_pages: int = 0
    held_pages: int = 0
    passed_over: int = 0
    device_adapters: int = 0
    held_adapters: int = 0
    free_rank_pages: int = 0
    adapter_copies: int = 0

    @property
    def hit_rate(self) -> float:
        """The part of the admitted prompts' tokens that were in the cache."""
        return self.cached_tokens / self.admitted_tokens if self.admitted_tokens else 0.0
