"""The scheduler without a model: whoever attends finds its own tokens in its pages, whatever happened before."""

from __future__ import annotations

from quire.engine.params import SamplingParams
from quire.engine.request import Request
from quire.engine.scheduler import Scheduler


def request(rng, starts, longest):
    prompt = rng.choice(starts)[: rng.randint(1, 20)] + [rng.randrange(5) for _ in range(rng.randint(1, 9))]
    params = SamplingParams(max_tokens=rng.randint(1, longest - len(prompt)))
    made = Request(prompt, params, None, frozenset(), lambda update: None)
    made.group = rng.choice((made, 0, 1))
    return made


def run_step(scheduler, slots, rng):
    """Write all chunks' tokens, as a layer does, then look at what each chunk attends to; sample at random."""
    chunks = scheduler.schedule()
    size = scheduler.page_size
    assert sum(c.count for c in chunks) <= scheduler.max_batched_tokens
    assert len(scheduler.running) <= scheduler.max_num_seqs
    assert len({id(c.request) for c in chunks}) == len(chunks)
    for chunk in chunks:
        assert chunk.count > 0
        assert chunk.start == chunk.request.num_computed_tokens
        for i in range(chunk.start, chunk.start + chunk.count):
            slots[chunk.request.pages[i // size], i % size] = chunk.request.tokens[i]
    for chunk in chunks:
        end = chunk.start + chunk.count
        seen = [slots[chunk.request.pages[i // size], i % size] for i in range(end)]
        assert seen == chunk.request.tokens[:end]
        chunk.request.num_computed_tokens = end
        if chunk.samples:
            chunk.request.num_total_tokens += 1
            chunk.request.push([rng.randrange(5)])
            if chunk.request.finish_reason:
                scheduler.remove(chunk.request)
    return chunks


def test_schedule_of_random_requests_computes_each_token_once_in_its_page(rng):
    preemptions = cached = 0
    for _ in range(150):
        size, longest = rng.choice((1, 2, 4, 16)), 60
        pages = -(-longest // size) + rng.randint(0, 12)
        scheduler = Scheduler(pages, size, rng.randint(1, 12), rng.choice((1, 3, 16, 200)))
        starts = [[rng.randrange(5) for _ in range(20)] for _ in range(3)]
        requests = [request(rng, starts, longest) for _ in range(20)]
        waiting, slots, steps = list(requests), {}, 0
        while waiting or scheduler.running or scheduler.waiting:
            for _ in range(rng.choice((0, 0, 1, 5))):
                if waiting:
                    scheduler.add(waiting.pop())
            alive = [*scheduler.running, *scheduler.waiting]
            if alive and rng.random() < 0.03:
                gone = rng.choice(alive)
                gone.fail("cancelled")
                scheduler.remove(gone)
            if scheduler.running or scheduler.waiting:
                assert run_step(scheduler, slots, rng), "nothing was scheduled"
            steps += 1
            assert steps < 20_000
        held = scheduler.allocator.num_pages - scheduler.allocator.num_free
        assert held == len(scheduler.tree)
        assert all(r.finish_reason in ("length", "cancelled") for r in requests)
        preemptions += scheduler.stats.preemptions
        cached += scheduler.stats.cached_tokens
    assert preemptions > 0
    assert cached > 0


def test_schedule_beside_a_long_prompt_goes_on_decoding():
    scheduler = Scheduler(100, 4, 8, 10)
    params = SamplingParams(max_tokens=50)
    short, long = (Request([1] * n, params, None, frozenset(), lambda update: None) for n in (3, 60))
    scheduler.add(short)
    scheduler.add(long)
    counts = []
    for _ in range(8):
        chunks = scheduler.schedule()
        counts.append([c.count for c in chunks])
        for chunk in chunks:
            chunk.request.num_computed_tokens += chunk.count
            if chunk.samples:
                chunk.request.num_total_tokens += 1
                chunk.request.push([2])
    assert counts == [[3, 7], [1, 9], [1, 9], [1, 9], [1, 9], [1, 9], [1, 8], [1, 1]]


def test_schedule_without_pages_preempts_the_latest_arrival():
    scheduler = Scheduler(6, 4, 8, 100)
    params = SamplingParams(max_tokens=12)
    first, second, third = (Request([i] * 4, params, None, frozenset(), lambda update: None) for i in range(3))
    for request in (first, second, third):
        scheduler.add(request)
    order = []
    while not third.finish_reason:
        for chunk in scheduler.schedule():
            chunk.request.num_computed_tokens += chunk.count
            if chunk.samples:
                chunk.request.num_total_tokens += 1
                chunk.request.push([9])
                if chunk.request.finish_reason:
                    order.append(chunk.request)
                    scheduler.remove(chunk.request)
    assert order == [first, second, third]
    assert scheduler.stats.preemptions > 0
