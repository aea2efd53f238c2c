"""Metrics for Prometheus, with the names that vLLM's and SGLang's have after their prefix where they mean the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from quire.server.engine_client import EngineClient

_LATENCY = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 0.75, 1, 2.5, 5, 10, 30, 60, 120)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


class Metrics:
    """Counts of one server in a registry of their own, and the engine's state.

    Args:
        engine: the engine, whose counts are those that it has last brought.
        model: the value of the label model_name.
        prefix: of all names, before a colon.
    """

    def __init__(self, engine: EngineClient, model: str, prefix: str = "quire") -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_EngineState(engine, model, prefix))

        def labelled(kind: Any, name: str, text: str, **options: Any) -> Any:
            metric = kind(f"{prefix}:{name}", text, ["model_name"], registry=self.registry, **options)
            return metric.labels(model_name=model)

        def seconds(name: str, text: str) -> Any:
            return labelled(Histogram, name, text, buckets=_LATENCY)

        self.first_token = seconds("time_to_first_token_seconds", "From admission to the first token.")
        self.inter_token = seconds("inter_token_latency_seconds", "Between two tokens of a completion.")
        self.whole = seconds("e2e_request_latency_seconds", "From admission to the end of a completion.")
        self.prompt = labelled(Histogram, "request_prompt_tokens", "Tokens of a prompt.", buckets=_TOKENS)
        self.output = labelled(Histogram, "request_generation_tokens", "Tokens of a completion.", buckets=_TOKENS)
        self.rejected = labelled(Counter, "num_rejected", "Completions that were answered 429.")
        ended = Counter(
            f"{prefix}:request_success",
            "Completions that have ended; a reason may be abort or error.",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        # The finish reasons of the engine, and vLLM's names for them.
        reasons = {"stop": "stop", "length": "length", "cancelled": "abort", "error": "error"}
        self.ended = {ours: ended.labels(model_name=model, finished_reason=theirs) for ours, theirs in reasons.items()}


class _EngineState(Collector):
    """The engine's counts and state."""

    def __init__(self, engine: EngineClient, model: str, prefix: str) -> None:
        self._engine, self._model = engine, model
        self._prefix = prefix

    def describe(self) -> list[Metric]:
        # The names do not depend on a scrape, and no other collector has them.
        return []

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats
        gauges = {
            "num_requests_running": ("Completions that the engine computes.", stats.running),
            "num_requests_waiting": ("Completions that wait for the engine.", stats.waiting),
            "kv_cache_usage_perc": ("The part of the pages that running requests hold; 1: all.", _held(stats)),
            "num_running_reqs": ("num_requests_running, by SGLang's name.", stats.running),
            "num_queue_reqs": ("num_requests_waiting, by SGLang's name.", stats.waiting),
            "token_usage": ("kv_cache_usage_perc, by SGLang's name.", _held(stats)),
            "cache_hit_rate": ("The part of the admitted prompts' tokens that was in the cache.", stats.hit_rate),
            "num_pages": ("Pages of the cache.", stats.pages),
            "num_free_pages": ("Pages that neither a request nor the prefix tree holds.", stats.free_pages),
        }
        counters = {
            "prompt_tokens": ("Tokens of admitted prompts, those in the cache included.", stats.admitted_tokens),
            "generation_tokens": ("Tokens that were generated.", stats.generated_tokens),
            "prefix_cache_queries": ("Tokens of admitted prompts.", stats.admitted_tokens),
            "prefix_cache_hits": ("Those of them that were in the cache.", stats.cached_tokens),
            "num_preemptions": ("Requests whose pages were released before they ended.", stats.preemptions),
            "engine_steps": ("Steps that the engine has computed.", stats.steps),
        }
        for family, metrics in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for name, (text, value) in metrics.items():
                metric = family(f"{self._prefix}:{name}", text, labels=["model_name"])
                metric.add_metric([self._model], value)
                yield metric


def _held(stats: Any) -> float:
    return stats.held_pages / stats.pages
