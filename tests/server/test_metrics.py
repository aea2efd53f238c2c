"""The names of metrics: those in the documents and in the Grafana dashboard are those that the server has."""

from __future__ import annotations

import json
import re

import httpx
import pytest

pytest.importorskip("transformers")
pytest.importorskip("fastapi")

from prometheus_client.parser import text_string_to_metric_families

from helpers.engines import until_idle
from helpers.paths import ROOT
from helpers.server import served
from quire.engine import LLM

DASHBOARD = json.loads((ROOT / "docs" / "grafana" / "quire.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


@pytest.fixture(scope="module")
def scraped():
    """The samples after a few completions, one of which was left by its client."""
    with LLM(num_pages=100, page_size=8) as llm, served(llm, name="tiny") as url:
        body = {"prompt": "import os\nimport sys\n", "max_tokens": 6, "ignore_eos": True}
        for _ in range(2):
            httpx.post(f"{url}/v1/completions", json=body)
        with (
            httpx.Client() as client,
            client.stream(
                "POST", f"{url}/v1/completions", json={**body, "max_tokens": 600, "stream": True}
            ) as response,
        ):
            next(response.iter_lines())
        until_idle(llm)
        text = httpx.get(f"{url}/metrics").text
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


def value(scraped, name, **labels):
    (found,) = [s.value for s in scraped if s.name == f"quire:{name}" and labels.items() <= s.labels.items()]
    return found


def metrics_of(expression):
    """The names of metrics in an expression, and the labels that it groups by or selects."""
    names = re.findall(r"\$\{prefix\}(\w+)", expression)
    labels = re.findall(r"(\w+)\s*=~?", expression)
    for group in re.findall(r"by \(([^)]*)\)", expression):
        labels += re.split(r",\s*", group)
    return names, labels


def test_dashboard_expressions_name_existing_metrics_and_labels(scraped):
    known = {}
    for sample in scraped:
        known.setdefault(sample.name.removeprefix("quire:"), set()).update(sample.labels)
    expressions = [target["expr"] for panel in PANELS for target in panel["targets"]]
    assert len(expressions) > 25
    for expression in expressions:
        names, labels = metrics_of(expression)
        assert names, expression
        for name in names:
            assert name in known, expression
            assert set(labels) <= known[name], expression
        functions = re.sub(r"\$\{prefix\}\w+", "", expression)
        assert set(re.findall(r"\b([a-z_]+) ?\(", functions)) <= {"sum", "max", "rate", "histogram_quantile", "by"}
    models = next(v for v in DASHBOARD["templating"]["list"] if v["name"] == "model_name")
    assert metrics_of(models["definition"])[0] == ["num_requests_running"]


def test_dashboard_has_latencies_load_and_failures():
    names = {name for p in PANELS for t in p["targets"] for name in metrics_of(t["expr"])[0]}
    latencies = {f"{name}_seconds_bucket" for name in ("time_to_first_token", "inter_token_latency")}
    assert latencies | {"e2e_request_latency_seconds_bucket", "num_requests_waiting", "kv_cache_usage_perc"} <= names
    counters = {"generation_tokens", "prompt_tokens", "num_preemptions", "num_rejected", "request_success"}
    assert {f"{name}_total" for name in counters} <= names


def test_dashboard_has_the_fields_for_an_import():
    assert DASHBOARD["uid"]
    assert DASHBOARD["title"]
    assert DASHBOARD["schemaVersion"] >= 36
    assert "id" not in DASHBOARD  # which Grafana gives
    variables = {v["name"]: v for v in DASHBOARD["templating"]["list"]}
    assert {name: v["type"] for name, v in variables.items()} == {
        "datasource": "datasource",
        "prefix": "textbox",
        "model_name": "query",
    }
    assert variables["prefix"]["current"]["value"] == variables["prefix"]["query"] == "quire:"
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in PANELS:
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        refs = [target["refId"] for target in panel["targets"]]
        assert len(set(refs)) == len(refs) > 0
        used = set(re.findall(r"\$\{?(\w+)", " ".join(target["expr"] for target in panel["targets"])))
        assert used <= {*variables, "__rate_interval"}


def test_dashboard_panels_do_not_overlap():
    taken = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells


def test_documents_name_exactly_the_metrics_of_the_server(scraped):
    section = (ROOT / "docs" / "server.md").read_text().split("\n## Metrics\n")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    documented = {name for row in rows for name in re.findall(r"`(\w+)`", row.split(" | ")[0])}
    suffixes = r"_(bucket|sum|count|created)$"
    histograms = {re.sub(suffixes, "", s.name) for s in scraped if s.name.endswith("_bucket")}
    names = {re.sub(suffixes, "", s.name) if re.sub(suffixes, "", s.name) in histograms else s.name for s in scraped}
    assert documented == {name.removeprefix("quire:") for name in names if not name.endswith("_created")}


def test_metrics_of_known_requests_have_their_values(scraped):
    assert value(scraped, "request_success_total", finished_reason="length") == 2
    assert value(scraped, "request_success_total", finished_reason="abort") == 1
    tokens = value(scraped, "request_prompt_tokens_sum")
    assert value(scraped, "prompt_tokens_total") == value(scraped, "prefix_cache_queries_total") == tokens
    assert value(scraped, "cache_hit_rate") == value(scraped, "prefix_cache_hits_total") / tokens
    for theirs, ours in (("num_running_reqs", "num_requests_running"), ("num_queue_reqs", "num_requests_waiting")):
        assert value(scraped, theirs) == value(scraped, ours) == 0
    assert value(scraped, "token_usage") == value(scraped, "kv_cache_usage_perc") == 0
    assert {sample.labels["model_name"] for sample in scraped} == {"tiny"}
