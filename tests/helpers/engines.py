"""What tests of the engine share."""

from __future__ import annotations

from quire.engine import LLM


def pages_add_up(llm: LLM) -> bool:
    """Whether, with nothing running, each page is free or held once, by the prefix tree."""
    scheduler = llm._engine.scheduler
    allocator, known = scheduler.allocator, set(scheduler.tree.pages)
    assert not scheduler.running
    assert not scheduler.waiting
    assert allocator.num_free + len(known) == allocator.num_pages
    return all(allocator.holders(page) == (page in known) for page in range(allocator.num_pages))
