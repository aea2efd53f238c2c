"""`quire bench serve` against a server whose delays and failures are known."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections import Counter

import pytest

pytest.importorskip("httpx")

from helpers.openai_server import FakeServer
from quire.bench import client, server_load
from quire.bench.server_load import LatencyLimits, LoadRequest, RequestRecord
from quire.bench.workloads import zipf
from quire.cli.main import main


@pytest.fixture
def server():
    with FakeServer() as fake:
        yield fake


def loaded(fake, requests, at, timeout=60.0, before=None):
    async def run():
        async with client.connected(fake.url, None) as connection:
            if before is not None:
                asyncio.get_running_loop().call_later(0.1, before)
            return await server_load.load(connection, "fake", requests, at, timeout)

    return asyncio.run(run())


def test_arrivals_of_a_rate_are_a_poisson_process(rng):
    rate, seed, count = rng.uniform(0.5, 50), rng.randrange(1 << 31), 20000
    at = server_load.arrivals(count, rate, seed)
    gaps = [b - a for a, b in zip([0.0, *at], at, strict=False)]
    mean = sum(gaps) / count
    assert at == server_load.arrivals(count, rate, seed) != server_load.arrivals(count, rate, seed + 1)
    assert min(gaps) >= 0
    assert mean * rate == pytest.approx(1, abs=6 / count**0.5)
    # Of an exponential distribution, a part of 1/e is above the mean.
    assert sum(gap > mean for gap in gaps) / count == pytest.approx(math.exp(-1), abs=0.025)
    assert server_load.arrivals(3, math.inf, seed) == [0.0] * 3


def test_load_records_have_the_times_of_the_server(server):
    server.first, server.gap = 0.2, 0.05
    records, _ = loaded(server, [LoadRequest([1, 2], 5), LoadRequest("text", 3), LoadRequest([7], 1)], [0.0, 0.0, 0.1])
    for record in records:
        assert record.error is None
        assert record.output == len(record.times) == record.request.max_tokens
        assert 0.2 <= record.times[0] < 0.4
        assert 0.2 + 0.05 * (record.output - 1) <= record.times[-1] <= record.end
    assert records[0].tpot == pytest.approx(0.05, abs=0.03)
    assert records[2].tpot is None
    bodies = {len(body["prompt"]): body for body in server.bodies}
    assert bodies[2]["prompt"] == [1, 2]
    assert bodies[4]["prompt"] == "text"
    assert all(body["stream"] and body["ignore_eos"] and body["temperature"] == 0 for body in server.bodies)


def test_load_latencies_count_from_the_intended_arrival(server):
    """The client's event loop stands still for half a second, in which requests should have been sent."""
    requests = [LoadRequest([i], 2) for i in range(4)]
    records, late = loaded(server, requests, [0.0, 0.2, 0.25, 0.9], before=lambda: time.sleep(0.5))
    assert records[0].lag < 0.2
    assert records[1].lag > 0.25
    assert all(record.times[0] >= record.lag for record in records)
    assert records[1].times[0] > 0.25
    assert max(late) > 0.35
    row = server_load.summary(4.0, records, late, LatencyLimits(ttft=0.15), [0.0, 0.2, 0.25, 0.9])
    assert row["behind"]
    assert row["good"] < row["completed"] == 4
    assert row["ttft_ms"]["p99"] > 250


def test_load_failures_are_counted_by_kind(server):
    server.scripts = {1: 429, 2: 503, 3: "hang up", 4: "cut", 5: "error", 6: "broken", 7: "slow"}
    kinds = {
        1: "HTTP 429",
        2: "HTTP 503",
        3: "connection lost",
        4: "stream cut off",
        5: "error in the stream",
        6: "broken event",
        7: "timeout",  # it takes 1.8 seconds
        8: None,
    }
    requests = [LoadRequest([i], 3) for i in kinds]
    at = [0.0] * len(requests)
    records, late = loaded(server, requests, at, timeout=1.5)
    assert {record.request.prompt[0]: record.error for record in records} == kinds
    assert "too many" in records[0].message
    row = server_load.summary(math.inf, records, late, LatencyLimits(), at)
    assert (row["requests"], row["completed"], row["failed"], row["good"]) == (8, 1, 7, 1)
    assert row["errors"] == dict.fromkeys(filter(None, kinds.values()), 1)
    assert "1 failed: HTTP 429, such as: HTTP 429: too many" in server_load.table({"runs": [row], "limits": {}})

    with FakeServer() as gone:
        pass
    (record,), _ = loaded(gone, [LoadRequest([1], 1)], [0.0])
    assert record.error == "no connection"


def test_load_without_usage_counts_the_parts_of_a_stream(server):
    server.usage = False
    (record,), _ = loaded(server, [LoadRequest([9], 4)], [0.0])
    assert (record.tokens, record.output) == (0, 4)
    server.text = ""
    (record,), _ = loaded(server, [LoadRequest([9], 4)], [0.0])
    assert len(record.times) == 1, "the end of an answer without text counts"


def record_of(first, gap, tokens=3, error=None, max_tokens=3):
    times = [] if error else [first + i * gap for i in range(tokens)]
    return RequestRecord(
        LoadRequest([1], max_tokens), 0.001, times, times[-1] if times else 0.5, 0 if error else tokens, error, "no"
    )


def test_summary_of_records_equals_numbers_by_hand():
    records = [record_of(i / 100, 0.01 if i % 2 else 0.03) for i in range(1, 101)]
    records += [record_of(0, 0, error="timeout")] * 4 + [record_of(0.005, 0.01, tokens=2)]
    at = [0.0] * 100 + [9.5] * 5
    row = server_load.summary(10.5, records, [0.0], LatencyLimits(0.5, 0.02), at)
    assert row["seconds"] == 10.0, "the last to end failed half a second after 9.5"
    assert (row["requests"], row["completed"], row["failed"], row["ended_early"]) == (105, 101, 4, 1)
    assert row["good"] == 26, "odd ones up to 49, of which there are 25, and the last one"
    assert row["good_requests_s"] == pytest.approx(2.6)
    assert row["requests_s"] == pytest.approx(10.1)
    assert row["output_tokens_s"] == pytest.approx(30.2)
    assert row["ttft_ms"] == pytest.approx({"p50": 500, "p95": 950, "p99": 990})
    assert row["tpot_ms"] == pytest.approx({"p50": 10, "p95": 30, "p99": 30})
    assert row["itl_ms"] == pytest.approx({"p50": 10, "p95": 30, "p99": 30})
    assert row["e2e_ms"]["p99"] == pytest.approx(1040), "of the 98th: that of the 100th is above, 1060"
    assert row["send_lag_ms"]["p99"] == pytest.approx(1)
    assert not row["behind"]


def test_bench_serve_with_several_rates_has_a_run_for_each(server, tmp_path, capsys):
    server.first = 0.02
    file, picture = tmp_path / "result.json", tmp_path / "plot.png"
    given = ["--requests", "6", "--input", "3:9", "--output", "2:4", "--seed", "5", "--api-key", "secret"]
    limits = ["--ttft-limit", "5000", "--itl-limit", "0.000001"]
    common = ["bench", "serve", "--device", "cpu", "--url", server.url + "/v1/", "--json", str(file)]
    pytest.importorskip("matplotlib")
    assert main([*common, *given, *limits, "--rate", "50,inf", "--plot", str(picture)]) == 0
    result = json.loads(file.read_text())
    assert {"device", "date", "quire", "torch", "seed", "url"} <= set(result)
    assert result["model"] == "fake"
    assert [row["rate"] for row in result["runs"]] == [50, "inf"]
    for row in result["runs"]:
        assert (row["completed"], row["failed"], row["good"]) == (6, 0, 0)
        assert 20 <= row["ttft_ms"]["p50"] <= row["ttft_ms"]["p99"] <= row["e2e_ms"]["p99"]
    assert server.keys == {"Bearer secret"}
    timed = server.bodies[1:]  # the first one is not
    assert len(timed) == 12
    assert len({str(body["prompt"]) for body in timed}) == 12, "no prompt is repeated at another rate"
    assert all(3 <= len(body["prompt"]) <= 9 and 2 <= body["max_tokens"] <= 4 for body in timed)
    assert "| inf | 6 | 0 |" in capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_bench_serve_with_several_clients_sends_each_request_once(server, tmp_path):
    file = tmp_path / "result.json"
    given = ["--requests", "7", "--input", "3:9", "--output", "2:4", "--clients", "3", "--rate", "inf"]
    assert main(["bench", "serve", "--device", "cpu", "--url", server.url, "--json", str(file), *given]) == 0
    result = json.loads(file.read_text())
    assert result["clients"] == 3
    (row,) = result["runs"]
    assert (row["requests"], row["completed"], row["failed"]) == (7, 7, 0)
    assert row["ended_early"] == 0
    timed = [body for body in server.bodies if body["max_tokens"] > 1]
    assert len({str(body["prompt"]) for body in timed}) == len(timed) == 7
    # One request was sent to find out whether the server answers, and one by each process before the timed ones.
    assert len(server.bodies) == 7 + 1 + 3
    # They begin together.
    assert row["seconds"] < 5
    assert row["send_lag_ms"]["p99"] < 1000


def test_bench_serve_with_a_file_reports_failures(server, tmp_path, capsys):
    work = tmp_path / "work.jsonl"
    work.write_text('{"prompt": "hello", "max_tokens": 2}\n{"prompt": [3, 4], "max_tokens": 3}\n')
    server.scripts[3] = 500
    common = ["bench", "serve", "--device", "cpu", "--url", server.url, "--rate", "inf"]
    assert main([*common, "--file", str(work), "--model", "org/name", "--json"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert result["runs"][0]["errors"] == {"HTTP 500": 1}
    assert sorted(str(body["prompt"]) for body in server.bodies) == ["[3, 4]", "h", "hello"]
    assert {body["model"] for body in server.bodies} == {"org/name"}

    work.write_text('{"prompt": [3], "max_tokens": 2}\n')
    assert main([*common, "--file", str(work)]) == 2
    assert "HTTP 500: too many" in capsys.readouterr().err


def test_zipf_of_many_draws_has_the_frequencies_of_the_law(rng):
    names, count, seed = [f"a{i}" for i in range(8)], 20000, rng.randrange(1 << 31)
    drawn = zipf(names, count, seed)
    assert drawn == zipf(names, count, seed) != zipf(names, count, seed + 1)
    total = sum(1 / rank for rank in range(1, 9))
    for rank, name in enumerate(names, 1):
        assert drawn.count(name) / count == pytest.approx(1 / rank / total, abs=0.02)


@pytest.mark.parametrize(("given", "names"), [("2", ["b", "a"]), ("c,a", ["c", "a"])])
def test_bench_serve_with_adapters_draws_them_for_the_requests(server, tmp_path, given, names):
    server.models += [{"id": name, "parent": "fake"} for name in ("b", "a", "c")] + [{"id": "x", "parent": None}]
    file = tmp_path / "result.json"
    common = ["bench", "serve", "--device", "cpu", "--url", server.url, "--json", str(file), "--seed", "3"]
    given_work = ["--requests", "20", "--input", "3:9", "--output", "1:2", "--rate", "inf,100"]
    assert main([*common, *given_work, "--adapters", given]) == 0
    result = json.loads(file.read_text())
    assert (result["model"], result["adapters"]) == ("fake", names)
    expected = [Counter(zipf(names, 20, 3 + i)) for i in range(2)]
    assert [row["adapters"] for row in result["runs"]] == expected
    assert Counter(body["model"] for body in server.bodies[1:]) == expected[0] + expected[1]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("2", "--adapters 2: the server lists 1 adapters"),
        ("0", "--adapters 0: the server lists 1 adapters"),
        ("a,b", "--adapters a,b: the server lists no adapter 'b'"),
    ],
)
def test_bench_serve_with_adapters_that_the_server_lacks_is_refused(server, given, message, capsys):
    server.models.append({"id": "a", "parent": "fake"})
    assert main(["bench", "serve", "--device", "cpu", "--url", server.url, "--adapters", given]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rate", "1,x"], "--rate 1,x: 'x' must be a number above 0, or inf"),
        (["--rate", "0"], "must be a number above 0"),
        (["--requests", "0"], "--requests 0"),
        (["--ttft-limit", "-1"], "--ttft-limit -1.0: it must be above 0"),
        (["--vocab-size", "1"], "--vocab-size 1"),
        (["--clients", "0"], "--clients 0: it must be at least 1"),
        (["--url", "ftp://here"], "--url ftp://here: it must be like http"),
        (["--url", "http://127.0.0.1:9"], "no connection"),
    ],
)
def test_bench_serve_with_wrong_arguments_names_them(arguments, message, capsys):
    assert main(["bench", "serve", "--device", "cpu", *arguments]) == 2
    assert message in capsys.readouterr().err
