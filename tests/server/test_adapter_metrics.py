"""Metrics of adapters: the requests and tokens of each, and those that are on the device."""

from __future__ import annotations

import httpx
import pytest

pytest.importorskip("transformers")
pytest.importorskip("fastapi")

from prometheus_client.parser import text_string_to_metric_families

from helpers.engines import until_idle
from helpers.paths import ROOT
from helpers.server import served
from quire.engine import LLM
from quire.engine.model_info import NUMBERED, AdapterInfo
from quire.server.counts import Counts
from quire.server.metrics import AdapterCounts

ADAPTERS = {name: ROOT / "examples" / "adapters" / name for name in ("typed", "tests")}


@pytest.fixture(scope="module")
def answers():
    """The samples of /metrics and the counts of /engine_state after requests with adapters, in turns on one place."""
    with LLM(num_pages=100, max_adapters=1, adapters=ADAPTERS) as llm, served(llm, name="base") as url:
        for model, n in (("typed", 2), ("base", 1), ("tests", 1), ("typed", 1)):
            body = {"model": model, "prompt": [5, 6, 7], "max_tokens": 4, "n": n, "ignore_eos": True}
            assert httpx.post(f"{url}/v1/completions", json=body).status_code == 200
        assert httpx.post(f"{url}/v1/embeddings", json={"model": "typed", "input": [5, 6]}).status_code == 200
        until_idle(llm)
        text, state = httpx.get(f"{url}/metrics").text, httpx.get(f"{url}/engine_state").json()
        assert httpx.get(f"{url}/load").json() == {"server_load": 0}
    families = text_string_to_metric_families(text)
    return [sample for family in families for sample in family.samples], state["stats"]


def test_metrics_have_the_requests_and_tokens_of_each_adapter(answers):
    found = {
        (sample.name.removeprefix("quire:adapter_"), sample.labels["adapter"]): sample.value
        for sample in answers[0]
        if "adapter" in sample.labels and sample.name.endswith("_total")
    }
    counts = {"typed": (4, 11, 12), "tests": (1, 3, 4), "other": (0, 0, 0)}
    kinds = ("requests_total", "prompt_tokens_total", "generation_tokens_total")
    assert found == {
        (kind, name): value for name, values in counts.items() for kind, value in zip(kinds, values, strict=True)
    }


def test_metrics_and_engine_state_have_the_adapters_on_the_device_and_their_copies(answers):
    samples, stats = answers
    found = {sample.name.removeprefix("quire:"): sample.value for sample in samples}
    expected = {
        "device_adapters": ("num_device_adapters", 1),
        "held_adapters": ("lora_pool_slots_used", 0),
        "free_rank_pages": ("num_free_rank_pages", 0),
        "passed_over": ("num_requests_passed_over", 0),
        "adapter_copies": ("adapter_copies_total", 3),
    }
    for field, (name, value) in expected.items():
        assert found[name] == stats[field] == value, field
    assert (found["num_adapters"], found["lora_pool_slots_total"]) == (2, 1)


def info(name, number):
    return AdapterInfo(name=name, folder="", digest="", rank=1, base_model_name="", number=number)


def test_adapter_counts_of_many_names_are_bounded():
    first = Counts(2)
    own, other = (AdapterCounts(counts) for counts in (first, Counts(2, 1, first.descriptor)))
    infos = [info(f"a{i}", i if i < NUMBERED else None) for i in range(NUMBERED + 6)] + [info("other", 3)]
    infos[3] = info("b", None)
    for counts in (own, other):
        counts.set_names(infos)
        for each in infos:
            counts.add(each, 5, 2)
    found = dict(own.totals())
    assert found == dict(other.totals())
    assert len(found) == NUMBERED
    assert found.pop("other") == [16, 80, 32]
    assert all(values == [2, 10, 4] for values in found.values())
    first.close()
