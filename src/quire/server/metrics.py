"""Metrics for Prometheus, with the names that vLLM's and SGLang's have after their prefix where they mean the same."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from quire.engine.model_info import NUMBERED, AdapterInfo
from quire.server.counts import Counts
from quire.server.engine_client import EngineClient

_LATENCY = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 0.75, 1, 2.5, 5, 10, 30, 60, 120)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
# The finish reasons of the engine, and vLLM's names for them.
_REASONS = {"stop": "stop", "length": "length", "cancelled": "abort", "error": "error"}


# The label of adapters that have none of their own.
_OTHER = "other"


class EventCounter:
    """A count of events, which this process adds to and all processes of the server have."""

    def __init__(self, counts: Counts) -> None:
        self._cells = counts.allocate()

    def inc(self, amount: int = 1) -> None:
        """Count so many events."""
        self._cells.add(amount)

    @property
    def total(self) -> int:
        """Those of all processes."""
        return self._cells.total


class ValueHistogram:
    """The number of values up to each bound, and their sum."""

    def __init__(self, counts: Counts, bounds: Sequence[float]) -> None:
        self._bounds = [float(bound) for bound in bounds]
        # Two more numbers: the count of values above all bounds, and the sum of all values.
        self._cells = counts.allocate(len(bounds) + 2)
        self._local = self._cells.local

    def observe(self, value: float) -> None:
        """Count a value."""
        self._local[bisect_left(self._bounds, value)] += 1
        self._local[-1] += value

    def buckets(self) -> tuple[list[tuple[str, float]], float]:
        """The values of all processes up to each bound, as Prometheus writes it, and the sum of the values."""
        *numbers, total = self._cells.totals()
        bounds = [*map(str, self._bounds), "+Inf"]
        return list(zip(bounds, accumulate(numbers), strict=True)), total


class AdapterCounts:
    """Requests that have ended, and their tokens, by adapter: of each name that has a number, and of all others. An
    adapter that has been unloaded keeps its counts.
    """

    _KINDS = 3

    def __init__(self, counts: Counts) -> None:
        # For each numbered name, and at the end for all others: requests, tokens of prompts, generated tokens.
        self._cells = counts.allocate(self._KINDS * (NUMBERED + 1))
        self._names: dict[int, str] = {}

    def set_names(self, infos: Iterable[AdapterInfo]) -> None:
        """Add the names of adapters that are loaded."""
        self._names |= {info.number: info.name for info in infos if info.number is not None and info.name != _OTHER}

    def add(self, adapter: AdapterInfo, prompt: int, output: int) -> None:
        """Count a request of so many tokens."""
        known = adapter.number if adapter.number in self._names else None
        start = self._KINDS * (NUMBERED if known is None else known)
        for i, amount in enumerate((1, prompt, output), start):
            self._cells.local[i] += amount

    def totals(self) -> Iterator[tuple[str, list[float]]]:
        """The counts of each name, and of the others."""
        numbers, kinds = self._cells.totals(), self._KINDS
        for place, name in (*self._names.items(), (NUMBERED, _OTHER)):
            yield name, numbers[kinds * place : kinds * (place + 1)]


class Metrics:
    """What a server counts, and the engine's state, in a registry of their own.

    Args:
        engine: the engine, whose counts are those that it has last brought.
        counts: where the server counts.
        model: the value of the label model_name.
        prefix: of all names, before a colon.
    """

    def __init__(self, engine: EngineClient, counts: Counts, model: str, prefix: str = "quire") -> None:
        self.first_token = ValueHistogram(counts, _LATENCY)
        self.inter_token = ValueHistogram(counts, _LATENCY)
        self.whole = ValueHistogram(counts, _LATENCY)
        self.prompt = ValueHistogram(counts, _TOKENS)
        self.output = ValueHistogram(counts, _TOKENS)
        self.rejected = EventCounter(counts)
        self.late = EventCounter(counts)
        self.ended = {reason: EventCounter(counts) for reason in _REASONS}
        self.adapters = AdapterCounts(counts)
        self.adapters.set_names(engine.adapters)
        self.registry = CollectorRegistry()
        self.registry.register(_EngineState(engine, model, prefix))
        self.registry.register(_ServerCounts(self, counts.started, model, prefix))


class _ServerCounts(Collector):
    """What the server counts."""

    def __init__(self, metrics: Metrics, started: float, model: str, prefix: str) -> None:
        self._metrics, self._started = metrics, started
        self._model, self._prefix = model, prefix

    def describe(self) -> list[Metric]:
        # The names do not depend on a scrape, and no other collector has them.
        return []

    def collect(self) -> Iterator[Metric]:
        metrics, label = self._metrics, ["model_name"]
        histograms = {
            "time_to_first_token_seconds": ("From admission to the first token.", metrics.first_token),
            "inter_token_latency_seconds": ("Between two tokens of a completion.", metrics.inter_token),
            "e2e_request_latency_seconds": ("From admission to the end of a completion.", metrics.whole),
            "request_prompt_tokens": ("Tokens of a prompt.", metrics.prompt),
            "request_generation_tokens": ("Tokens of a completion.", metrics.output),
        }
        for name, (text, histogram) in histograms.items():
            family = HistogramMetricFamily(f"{self._prefix}:{name}", text, labels=label)
            family.add_metric([self._model], *histogram.buckets())
            family.add_sample(f"{family.name}_created", {"model_name": self._model}, self._started)
            yield family
        late = "Parts of completions that were sent with the next one, since the server or the client was late."
        counters = {
            "num_rejected": ("Completions that were answered 429.", metrics.rejected),
            "num_late_parts": (late, metrics.late),
        }
        for name, (text, counter) in counters.items():
            total = CounterMetricFamily(f"{self._prefix}:{name}", text, labels=label)
            total.add_metric([self._model], counter.total, self._started)
            yield total
        text = "Completions that have ended; a reason may be abort or error."
        ended = CounterMetricFamily(f"{self._prefix}:request_success", text, labels=[*label, "finished_reason"])
        for reason, counter in metrics.ended.items():
            ended.add_metric([self._model, _REASONS[reason]], counter.total, self._started)
        yield ended
        yield from self._of_adapters()

    def _of_adapters(self) -> Iterator[Metric]:
        totals = list(self._metrics.adapters.totals())
        texts = {
            "adapter_requests": "Completions and embeddings with an adapter that have ended.",
            "adapter_prompt_tokens": "Tokens of their prompts.",
            "adapter_generation_tokens": "Tokens that were generated for them.",
        }
        for i, (name, text) in enumerate(texts.items()):
            family = CounterMetricFamily(f"{self._prefix}:{name}", text, labels=["model_name", "adapter"])
            for adapter, counts in totals:
                family.add_metric([self._model, adapter], counts[i], self._started)
            yield family


class _EngineState(Collector):
    """The engine's counts and state."""

    def __init__(self, engine: EngineClient, model: str, prefix: str) -> None:
        self._engine, self._model = engine, model
        self._prefix = prefix

    def describe(self) -> list[Metric]:
        # The names do not depend on a scrape, and no other collector has them.
        return []

    def collect(self) -> Iterator[Metric]:
        stats, slots = self._engine.stats, self._engine.info.max_adapters
        gauges = {
            "num_requests_running": ("Completions that the engine computes.", stats.running),
            "num_requests_waiting": ("Completions that wait for the engine.", stats.waiting),
            "kv_cache_usage_perc": ("The part of the pages that running requests hold; 1: all.", _held(stats)),
            "num_running_reqs": ("num_requests_running, by SGLang's name.", stats.running),
            "num_queue_reqs": ("num_requests_waiting, by SGLang's name.", stats.waiting),
            "token_usage": ("kv_cache_usage_perc, by SGLang's name.", _held(stats)),
            "cache_hit_rate": ("The part of the admitted prompts' tokens that was in the cache.", stats.hit_rate),
            "num_adapters": ("Adapters that requests can name.", len(self._engine.adapters)),
            "num_device_adapters": ("Adapters on the device.", stats.device_adapters),
            "lora_pool_slots_used": ("Adapters that running requests have.", stats.held_adapters),
            "lora_pool_slots_total": ("The most adapters on the device.", slots),
            "num_free_rank_pages": ("Rank pages on the device without an adapter.", stats.free_rank_pages),
            "num_requests_passed_over": ("Requests that wait for their adapter.", stats.passed_over),
            "num_pages": ("Pages of the cache.", stats.pages),
            "num_free_pages": ("Pages that neither a request nor the prefix tree holds.", stats.free_pages),
        }
        counters = {
            "prompt_tokens": ("Tokens of admitted prompts, those in the cache included.", stats.admitted_tokens),
            "generation_tokens": ("Tokens that were generated.", stats.generated_tokens),
            "prefix_cache_queries": ("Tokens of admitted prompts.", stats.admitted_tokens),
            "prefix_cache_hits": ("Those of them that were in the cache.", stats.cached_tokens),
            "num_preemptions": ("Requests whose pages were released before they ended.", stats.preemptions),
            "adapter_copies": ("Copies of adapters to the device.", stats.adapter_copies),
            "engine_steps": ("Steps that the engine has computed.", stats.steps),
        }
        for family, metrics in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for name, (text, value) in metrics.items():
                metric = family(f"{self._prefix}:{name}", text, labels=["model_name"])
                metric.add_metric([self._model], value)
                yield metric


def _held(stats: Any) -> float:
    return stats.held_pages / stats.pages
