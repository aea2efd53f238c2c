"""Load and faults for `quire serve`: many streams at once, its end under load, random and hostile clients, generated
requests.

    PYTHONPATH=src python tools/soak.py streams ends kills random hostile openapi --out benchmarks/results/soak.json

Each client compares its texts with those that the engine generated for the same requests beforehand. The exit code is 1
if one differs, if a request has no answer, or if pages or connections do not come back. Needs Linux, for /proc.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from soak_clients import Case, Clients, Differs, stream
from soak_ends import run_ends, run_kills
from soak_hostile import MOST, STREAMS, run_hostile
from soak_server import Server, connected

from quire import sampling
from quire.bench.cpu import machine
from quire.engine import LLM, SamplingParams, shipped_model

BEGINNINGS = (
    "import os\n",
    "def add(a, b):\n    return",
    "class Stack:\n    def push(self, item):\n",
    "for i in range(",
)


def make_cases(count: int, rng: random.Random, longest: int) -> list[Case]:
    """Requests for n completions each, greedy or seeded, with the texts that the engine generates for them."""
    bodies: list[dict[str, Any]] = []
    for _ in range(count):
        prompt = f"{rng.choice(BEGINNINGS)}# {rng.randrange(10**9)}\n"
        sampled = {"temperature": rng.choice([0.0, 1.0]), "seed": rng.randrange(1 << 32), "ignore_eos": True}
        n = rng.choice([1, 1, 1, 1, 2, 4])
        bodies.append({"prompt": prompt, "n": n, "max_tokens": rng.randint(1, longest), **sampled})
    with LLM(device="cpu", num_pages=8000) as llm:
        texts = iter(generate(llm, bodies))
    return [Case(body, [next(texts) for _ in range(body["n"])]) for body in bodies]


def generate(llm: LLM, bodies: list[dict[str, Any]]) -> list[str]:
    """The texts that the engine generates for requests, one after the other."""
    prompts = [body["prompt"] for body in bodies for _ in range(body["n"])]
    names = ("max_tokens", "temperature", "ignore_eos")
    params = [
        SamplingParams(seed=body["seed"] + i, **{name: body[name] for name in names})
        for body in bodies
        for i in range(body["n"])
    ]
    completions = llm.generate(prompts, params)
    if failed := next((done.error for done in completions if done.error), None):
        raise RuntimeError(f"the engine failed: {failed}")
    return [done.text for done in completions]


def verdicts(found: list[Differs]) -> list[str]:
    """The outcome of each text that differs: "rounding" if the engine also generates that text when the logits have
    random errors of 1e-5. Rounding in float32 makes errors up to 1e-5 when other requests are in a step, and about one
    of 20,000 random numbers is so near the border between two tokens. Many unlikely tokens may lie between two likely
    ones, and each of them be generated rarely.
    """
    exact = sampling.sample

    def rounded(logits: torch.Tensor, *given: Any, **named: Any) -> Any:
        return exact(logits + 1e-5 * torch.rand_like(logits).mul_(2).sub_(1), *given, **named)

    said = []
    with patch.object(sampling, "sample", rounded):
        for one in found:
            with LLM(device="cpu", num_pages=8000) as llm:
                possible, tries = set(one.case.texts), 0
                while not possible.issuperset(one.texts) and tries < 1024:
                    possible.update(generate(llm, [one.case.body] * 64))
                    tries += 64
            said.append("rounding" if possible.issuperset(one.texts) else str(one))
    return said


def counted(outcomes: Iterable[str | Differs]) -> Counter[str]:
    """How often each outcome occurred, with verdicts on texts that differ."""
    counts, differing = Counter[str](), []
    for outcome in outcomes:
        if isinstance(outcome, Differs):
            differing.append(outcome)
        else:
            counts[outcome] += 1
    return counts + Counter(verdicts(differing))


async def run_streams(server: Server, cases: list[Case]) -> dict[str, Any]:
    """All cases at once as streams, five times: memory is to be compared after the first, which allocates buffers."""
    rounds = []
    async with connected(server) as client:
        for _ in range(5):
            before, begun = await server.idle(client), time.monotonic()
            tasks = [asyncio.ensure_future(stream(client, case)) for case in cases]
            most = {"memory_mib": 0.0, "files": 0}
            while not all(task.done() for task in tasks):
                most = {"memory_mib": max(most["memory_mib"], round(server.memory(), 1)),
                        "files": max(most["files"], server.files())}  # fmt: skip
                await asyncio.wait(tasks, timeout=0.2)
            seconds = time.monotonic() - begun
            errors = [task.exception() for task in tasks]
            results = counted(
                error if isinstance(error, Differs) else f"{type(error).__name__}: {error}" if error else "right"
                for error in errors
            )
            after = await server.idle(client)
            tokens = after["generated_tokens"] - before["generated_tokens"]
            rounds.append({"results": results, "seconds": round(seconds, 1), "tokens": tokens,
                           "tokens_per_second": round(tokens / seconds), "before": before, "most": most,
                           "after": after})  # fmt: skip
    completions = sum(len(case.texts) for case in cases)
    return {"clients": len(cases), "completions": completions, "rounds": rounds}


async def run_random(
    server: Server, cases: list[Case], rng: random.Random, clients: int, minutes: float
) -> dict[str, Any]:
    """Random clients for some minutes; the state of the server every ten seconds."""
    samples = []
    async with connected(server) as client, connected(server) as observer:
        begun = time.monotonic()
        crowd = Clients(server.port, client, cases, rng)
        tasks = [asyncio.ensure_future(crowd.one(begun + minutes * 60)) for _ in range(clients)]
        while not all(task.done() for task in tasks):
            samples.append({"seconds": round(time.monotonic() - begun), **await server.state(observer)})
            await asyncio.wait(tasks, timeout=10)
        await asyncio.gather(*tasks)
        after = await server.idle(observer)
        seconds = time.monotonic() - begun
    for (name, _), verdict in zip(crowd.differing, verdicts([d for _, d in crowd.differing]), strict=True):
        crowd.counts.setdefault(name, Counter())[verdict] += 1
    return {
        "clients": clients,
        "seconds": round(seconds),
        "counts": crowd.counts,
        "actions": sum(counts.total() for counts in crowd.counts.values()),
        "memory_thirds_mib": [
            median(s["memory_mib"] for s in samples if i <= 3 * s["seconds"] / (minutes * 60) < i + 1) for i in range(3)
        ],
        "after": after,
        "samples": samples,
    }


async def run_openapi(server: Server, folder: Path, examples: int, seed: int) -> dict[str, Any]:
    """Requests that schemathesis makes from the server's OpenAPI document, right and wrong ones."""
    report = folder / "report.json"
    config = Path(__file__).resolve().with_name("schemathesis.toml")
    command = ["--config-file", str(config), "run", f"{server.url}/openapi.json"]
    options = ["--max-examples", str(examples), "--seed", str(seed)]
    options += ["--report", "json", "--report-json-path", str(report)]
    arguments = (sys.executable, "-m", "schemathesis.cli", "--no-color", *command, *options)
    process = await asyncio.create_subprocess_exec(*arguments, cwd=folder, stdout=sys.stderr)
    code = await process.wait()
    result = json.loads(report.read_text())
    kept = {name: result[name] for name in ("schemathesis_version", "seed", "test_cases", "failures", "errors")}
    async with connected(server) as client:
        after = await server.idle(client)
    return {**kept, "exit_code": code, "seconds": round(result["running_time"]), "after": after}


def chatting_model(folder: Path) -> Path:
    """The bundled model, with a chat template."""
    model = folder / "model"
    model.mkdir()
    for file in shipped_model().iterdir():
        (model / file.name).symlink_to(file)
    template = "{% for m in messages %}# {{ m.role }}: {{ m.content }}\n{% endfor %}# answer:"
    (model / "chat_template.jinja").write_text(template)
    return model


# How requests may end when a process is killed: those of other processes that speak HTTP end with an error.
_KILLED = {
    "server": {"connection closed", "server unavailable"},
    "engine": {"engine ended"},
    "http": {"connection closed", "server unavailable"},
}


# Of the server.
OPTIONS = {
    # All completions of 1,000 clients may wait.
    "streams": ("--max-queue", "4096"),
    "random": ("--num-pages", "1000"),
    # Beside the streams there is room for the hostile requests that are accepted.
    "hostile": ("--max-num-seqs", str(STREAMS + 64)),
    "openapi": ("--max-model-len", "128"),
}


def _without(counts: dict[str, int], outcomes: set[str]) -> dict[str, int]:
    return {name: count for name, count in counts.items() if name not in outcomes}


def is_right(result: dict[str, Any]) -> bool:
    """Whether all went as it should."""
    ends, streams, crowd, hostile = (result.get(name, {}) for name in ("ends", "streams", "random", "hostile"))
    counters = [r["results"] for r in streams.get("rounds", [])]
    counters += [*crowd.get("counts", {}).values(), *hostile.get("counts", {}).values()]
    if hostile and hostile["hostile_ms"]["p99"] > MOST * hostile["quiet_ms"]["p99"]:
        return False
    counters += [end["after_restart"]["results"] for end in ends.values()]
    kills = result.get("kills", {"results": {}, "exit_codes": {}, "orphans": 0, "after_restart": {}})
    counters += [_without(ended, _KILLED[name]) for name, ended in kills["results"].items()]
    counters.append(kills["after_restart"])
    codes = {"server": -signal.SIGKILL, "engine": 1, "http": 1}
    if kills["orphans"] or any(set(found) - {codes[name]} for name, found in kills["exit_codes"].items()):
        return False
    expected = {"SIGTERM": {"server unavailable"}, "SIGKILL": _KILLED["server"]}
    counters += [_without(end["results"], expected[name]) for name, end in ends.items()]
    if any(end["exit_code"] != {"SIGTERM": 0, "SIGKILL": -signal.SIGKILL}[name] for name, end in ends.items()):
        return False
    if result.get("openapi", {}).get("exit_code"):
        return False
    return all(set(counter) <= {"right", "rounding"} for counter in counters)


def versions(*packages: str) -> dict[str, str | None]:
    """The versions of packages; None for those that are not installed."""
    installed = {found.name: found.version for found in metadata.distributions()}
    return {name: installed.get(name) for name in packages}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="+", choices=("streams", "ends", "kills", "random", "hostile", "openapi"))
    parser.add_argument("--streams", type=int, default=500, help="clients of the part streams")
    parser.add_argument("--clients", type=int, default=24, help="of the part random")
    parser.add_argument(
        "--minutes", type=float, default=30, help="of the parts random and kills, and of half of hostile"
    )
    parser.add_argument("--examples", type=int, default=2000, help="requests to each endpoint of the part openapi")
    parser.add_argument("--api-processes", type=int, default=1, help="of the server")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    parser.add_argument("--out", type=Path, help="a file for the result, whose other parts are kept")
    args = parser.parse_args()
    rng = random.Random(args.seed)
    cases = [] if args.parts == ["openapi"] else make_cases(max(args.streams, 200), rng, 48)
    result = json.loads(args.out.read_text()) if args.out and args.out.exists() else {"runs": {}}
    runs: dict[str, Any] = {}
    result |= {**machine(), "cores": os.cpu_count(), "model": "tiny-python"}
    result |= versions("fastapi", "uvicorn", "h11", "uvloop")
    processes = ("--api-processes", str(args.api_processes))
    result["api_processes"] = args.api_processes
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        for part in args.parts:
            if part == "ends":
                runs[part] = asyncio.run(run_ends(log, cases, counted, processes))
                continue
            if part == "kills":
                runs[part] = asyncio.run(run_kills(log, cases, rng, args.minutes, counted, processes))
                continue
            options = OPTIONS.get(part, ())
            model = (str(chatting_model(Path(folder))),) if part == "openapi" else ()
            server = Server(log, options=(*model, *options, *processes))
            try:
                if part == "streams":
                    runs[part] = asyncio.run(run_streams(server, cases[: args.streams]))
                elif part == "random":
                    runs[part] = asyncio.run(run_random(server, cases, rng, args.clients, args.minutes))
                elif part == "hostile":
                    runs[part] = asyncio.run(run_hostile(server, rng, args.minutes * 60))
                else:
                    runs[part] = asyncio.run(run_openapi(server, Path(folder), args.examples, args.seed))
                runs[part]["log"] = sorted(set(log.read_text().splitlines()))[:20]
            finally:
                server.end()
    result["runs"] |= runs
    result["seeds"] = result.get("seeds", {}) | dict.fromkeys(runs, args.seed)
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({name: {k: v for k, v in run.items() if k != "samples"} for name, run in runs.items()}, indent=1))
    return 0 if is_right(runs) else 1


if __name__ == "__main__":
    sys.exit(main())
