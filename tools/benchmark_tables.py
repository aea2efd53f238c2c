"""Put the tables of benchmarks/results/*.json into documents, between the markers that name the files.

python tools/benchmark_tables.py            write them
python tools/benchmark_tables.py --check    exit with 1 if a document shows something else
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

from quire.bench import cpu, engine_timing, gpu, layers_table, peers

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"(<!-- (benchmarks/results/\S+\.json(?: \S+\.json)*) -->\n).*?(<!-- end -->)", re.DOTALL)


def rendered(names: str) -> str:
    """A line that names the machine, versions and date of a result file, and its table; or the table of several results
    of tools/quantized_products.py.
    """
    name, *others = names.split()
    result = json.loads((ROOT / name).read_text())
    if result.get("operation") == "products":
        return products([result, *(json.loads((ROOT / other).read_text()) for other in others)])
    of_tools = {
        "lora": lora, "transformers": transformers, "mini-sglang": mini_sglang, "http_throughput": http,
        "exchanges": exchanges, "few-codes": few_codes, "skinny": skinny,
    }  # fmt: skip
    operation = result.get("operation", "").partition(" ")[0]
    if operation in of_tools:
        return of_tools[operation](result)
    if "runs" in result:
        return soak(result)
    if "vllm" in result and "kv_cache_dtype" in result:
        return vllm(result)
    on_gpu = "triton" in result
    compiler = "triton" if on_gpu else "numba"
    machine = (
        result["device"] if on_gpu else f"{result['device']}, {result['threads']} threads",
        f"Python {result['python']}, torch {result['torch']}, {compiler} {result[compiler]}",
        *(f"{title} {result[name]}" for name, title in peers.TITLES.items() if name in result),
        *dict.fromkeys(
            f"{row['engine'].partition(',')[0]} {row['version']}" for row in result["cells"] if "version" in row
        ),
        result["date"],
    )
    module: Any = gpu if on_gpu else cpu
    if "operation" in result:
        module = engine_timing
    elif "copy_gb_s" in result["ceilings"]:
        module = layers_table
    return f"{', '.join(machine)}:\n\n{module.table(result)}\n"


def products(results: list[dict[str, Any]]) -> str:
    """The machines, and a table of results of tools/quantized_products.py: for each layout and shape, the error of the
    weights and, on each machine, microseconds, their share of the floor, and error of products.
    """
    lines, columns = [], []
    for result in results:
        compiler = "triton" if "triton" in result else "numba"
        versions = f"torch {result['torch']}, {compiler} {result[compiler]}, {result['date']}"
        lines.append(f"- {result['device']}, {versions}: the floor is at {result['ceilings']['read_gb_s']:,.0f} GB/s")
        columns += [(result, rows) for rows in dict.fromkeys(cell["rows"] for cell in result["cells"])]
    heads = [f"{' '.join(result['device'].split()[:2])}, {rows} row{'s' * (rows > 1)}" for result, rows in columns]
    lines += ["", f"| weights | shape | error | {' | '.join(heads)} |", "|---|---|--:|" + "--:|" * len(heads)]
    cells = [cell for result in results for cell in result["cells"]]
    errors = {(cell["layout"], cell["shape"]): cell["weight_error"] for cell in cells}
    for (layout, shape), error in errors.items():
        texts = []
        for result, rows in columns:
            found = [c for c in result["cells"] if (c["layout"], c["shape"], c["rows"]) == (layout, shape, rows)]
            texts.append("-")
            for cell in found:
                ours = cell["products"]["quire"]
                texts[-1] = f"{ours['us']:,.0f} µs ({cell['floor_us'] / ours['us']:.0%}), {ours['error']:.0e}"
        lines.append(f"| {layout} | {shape} | {error:.1e} | {' | '.join(texts)} |")
    return "\n".join(lines) + "\n"


def few_codes(result: dict[str, Any]) -> str:
    """The machine, and the microseconds of the kernels for any number of rows and for up to 8."""
    lines = [
        f"{result['device']}, torch {result['torch']}, triton {result['triton']}, {result['date']}; the floor is at "
        f"{result['ceilings']['read_gb_s']:,.0f} GB/s:\n",
        "| weights | shape | floor µs | `multiply_codes` µs | `multiply_few_codes` µs |",
        "|---|---|--:|--:|--:|",
    ]
    for cell in result["cells"]:
        times = [cell["floor_us"], cell["us"]["multiply_codes"], cell["us"]["multiply_few_codes"]]
        lines.append(
            f"| {cell['layout']} | {' x '.join(map(str, cell['shape']))} | {' | '.join(f'{x:.1f}' for x in times)} |"
        )
    return "\n".join(lines) + "\n"


def lora(result: dict[str, Any]) -> str:
    """The machine, and the table of a result of tools/lora_products.py, over the four products of a layer."""
    keys = ("model", "rows", "adapters", "rank")
    lines = [
        f"{result['device']}, torch {result['torch']}, triton {result['triton']}, {result['date']}; the floor is at "
        f"{result['ceilings']['read_gb_s']:,.0f} GB/s:\n",
        "| model | rows | adapters | rank | a layer's products µs | adapters add µs | floor µs |",
        "|---|" + "--:|" * 6,
    ]
    for case in dict.fromkeys(tuple(cell[key] for key in keys) for cell in result["cells"]):
        cells = [cell for cell in result["cells"] if tuple(cell[key] for key in keys) == case]
        base, total, floor = (sum(cell[name] for cell in cells) for name in ("base_us", "with_us", "floor_us"))
        times = f"{base:,.1f} | {total - base:,.1f} | {floor:,.1f}"
        lines.append(f"| {' | '.join(str(value) for value in case)} | {times} |")
    return "\n".join(lines) + "\n"


def soak(result: dict[str, Any]) -> str:
    """The machine, and the table of a result of tools/soak.py, with the parts that it has."""
    rows: dict[str, str] = {}
    for part, rows_of in SOAK_ROWS.items():
        if part in result["runs"]:
            rows |= rows_of(result["runs"][part])
    packages = ("fastapi", "uvicorn", "h11", "uvloop")
    machine = f"{result['device']}, {result['cores']} cores, Python {result['python']}, torch {result['torch']}"
    versions = ", ".join(f"{name} {result[name]}" for name in packages if result[name])
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    return f"{machine}, {versions}, {result['date']}:\n\n| load | result |\n|---|---|\n{table}\n"


def streams_row(streams: dict[str, Any]) -> dict[str, str]:
    """Many streams at once."""
    rounds = streams["rounds"]
    right, rounding = (sum(one["results"].get(name, 0) for one in rounds) for name in ("right", "rounding"))
    rates = [one["tokens_per_second"] for one in rounds]
    levels = ", ".join(f"{one['after']['memory_mib']:.0f}" for one in rounds)
    value = f"{right:,} of {streams['clients'] * len(rounds):,} have their own text, "
    value += f"and {rounding} with a token that rounding decides, " if rounding else ""
    value += f"at {min(rates):,} to {max(rates):,} tokens per second; {levels} MiB after each time"
    return {f"{streams['clients']} streams at once, {len(rounds)} times": value}


def random_row(crowd: dict[str, Any]) -> dict[str, str]:
    """Random clients."""
    counts = [count for counts in crowd["counts"].values() for count in counts.items()]
    rounded = sum(number for verdict, number in counts if verdict == "rounding")
    good = sum(number for verdict, number in counts if verdict == "right")
    thirds = ", ".join(f"{x:.0f}" for x in crowd["memory_thirds_mib"])
    files = sorted(sample["files"] for sample in crowd["samples"])
    value = f"{good:,} of {crowd['actions']:,} actions end as they should, and {rounded} with a token that rounding "
    value += f"decides; {thirds} MiB (medians of thirds of the time); {files[0]} to {files[-1]} open files"
    return {f"{crowd['clients']} random clients for {crowd['seconds'] / 60:.0f} minutes": value}


def ends_rows(ends: dict[str, Any]) -> dict[str, str]:
    """The end of a server under load."""
    term, kill = ends["SIGTERM"], ends["SIGKILL"]
    value = f"{term['results']['right']} end, {term['results']['server unavailable']} are answered with the "
    value += f"reason after the grace time of 5 s; exit code {term['exit_code']}"
    rows = {f"SIGTERM, {sum(term['results'].values())} requests": value}
    value = f"{kill['results']['connection closed']} see a closed connection, {kill['results'].get('right', 0)} had "
    value += f"ended; a new server on the same port is there in {kill['after_restart']['seconds_to_start']} s"
    return rows | {f"SIGKILL, {sum(kill['results'].values())} requests": value}


def kills_rows(kills: dict[str, Any]) -> dict[str, str]:
    """Processes of a server that are killed at random times."""
    names = {"server": "the server's process", "engine": "the engine's", "http": "a further one of HTTP"}
    rows = {}
    for part, results in kills["results"].items():
        ((code, times),) = kills["exit_codes"][part].items()
        lost = [f"{number:,} “{name}”" for name, number in results.items() if name not in ("right", "rounding")]
        value = f"exit code {code}; of {sum(results.values()):,} requests, {results['right']:,} had ended"
        if "rounding" in results:
            value += f", {results['rounding']} with a token that rounding decides"
        rows[f"SIGKILL of {names[part]}, {times} times"] = f"{value}, {', '.join(lost)}"
    after = kills["after_restart"]
    value = f"{after['right']:,} of {sum(after.values()):,} requests have their text, and {after.get('rounding', 0)} a "
    value += f"token that rounding decides; {kills['orphans']} processes were left"
    return rows | {f"the servers after these, in {kills['seconds'] / 60:.0f} minutes": value}


def openapi_row(fuzz: dict[str, Any]) -> dict[str, str]:
    """Requests from the OpenAPI document."""
    cases = fuzz["test_cases"]
    failures = f"{cases['with_failures']} failure{'s' * (cases['with_failures'] != 1)}"
    value = f"{failures}; {fuzz['after']['memory_mib']:.0f} MiB afterwards"
    return {f"{cases['generated']:,} requests by schemathesis {fuzz['schemathesis_version']}": value}


def hostile_row(attack: dict[str, Any]) -> dict[str, str]:
    """Hostile requests beside streams."""
    right = sum(count.get("right", 0) for count in attack["counts"].values())
    total = sum(number for count in attack["counts"].values() for number in count.values())
    quiet, hostile = attack["quiet_ms"], attack["hostile_ms"]
    value = f"{right:,} of {total:,} hostile requests are answered as they should be; gaps of the streams p50 "
    value += f"{quiet['p50']:.0f} ms without them and {hostile['p50']:.0f} with them, p99 {quiet['p99']:.0f} and "
    value += f"{hostile['p99']:.0f}"
    return {f"hostile requests beside {attack['streams']} streams, {attack['seconds']:.0f} s": value}


SOAK_ROWS = {
    "streams": streams_row,
    "random": random_row,
    "ends": ends_rows,
    "kills": kills_rows,
    "hostile": hostile_row,
    "openapi": openapi_row,
}


def vllm(result: dict[str, Any]) -> str:
    """The machine, and the table of a result of tools/vllm_backends.py: each backend's figures, and how many times as
    fast as the first one it is.
    """
    cells, names = result["cells"], {"CUSTOM": "CUSTOM (Quire)", "FLASHINFER": "FLASHINFER (over `quire.compat`)"}
    backends = list(dict.fromkeys(one["backend"] for one in cells))
    drafts = f", {result['draft_tokens']} drafts per step" if result["draft_tokens"] else ""
    lines = [
        f"{result['device']}, vLLM {result['vllm']}, torch {result['torch']}, {result['date']}; {result['model']}, "
        f"cache {result['kv_cache_dtype']}{drafts}:\n",
        "| cell | " + " | ".join(names.get(name, name) for name in backends) + " |",
        "|---" * (len(backends) + 1) + "|",
    ]
    for cell in dict.fromkeys(one["cell"] for one in cells):
        of = {one["backend"]: one for one in cells if one["cell"] == cell}
        first, texts = of.get(backends[0]), []
        for name in backends:
            one = of.get(name)
            if one is None:
                texts.append("no result")
                continue
            key, unit = ("ms", "ms per step") if "ms" in one else ("tokens_s", "tokens/s")
            ratio = ""
            if first is not None and one is not first:
                ratio = f", {first[key] / one[key] if key == 'ms' else one[key] / first[key]:.2f} times as fast"
            texts.append(f"{one[key]:,.2f} {unit}{ratio}" if key == "ms" else f"{one[key]:,.0f} {unit}{ratio}")
        lines.append(f"| {cell} | {' | '.join(texts)} |")
    return "\n".join(lines) + "\n"


def transformers(result: dict[str, Any]) -> str:
    """The machine, and the table of a result of tools/transformers_attention.py: each implementation's times, and how
    many times as fast as "sdpa" Quire is.
    """
    runs = result["runs"]
    names = [name for name in runs[0] if name != "cell"]
    unit, key = ("µs per layer", "us") if result["operation"].endswith("layers") else ("ms", "ms")
    lines = [
        f"{result['device']}, Transformers {result['transformers']}, torch {result['torch']}, "
        f"triton {result['triton']}, {result['date']}; {unit}:\n",
        f"| cell | {' | '.join(names)} | Quire is |",
        "|---" * (len(names) + 2) + "|",
    ]
    for one in runs:
        times = [f"{one[name][key]:,.1f}" if key in one[name] else "no result" for name in names]
        is_comparable = key in one["quire"] and key in one["sdpa"]
        ratio = f"{one['sdpa'][key] / one['quire'][key]:.2f} times as fast as sdpa" if is_comparable else ""
        lines.append(f"| {one['cell']} | {' | '.join(times)} | {ratio} |")
    return "\n".join(lines) + "\n"


def mini_sglang(result: dict[str, Any]) -> str:
    """The machine, and the table of a result of tools/mini_sglang.py."""
    cells = list(result["runs"][0]["milliseconds_per_token"])
    lines = [
        f"{result['device']}, torch {result['torch']}, triton {result['triton']}, {result['date']}; {result['shape']}, "
        "random weights:\n",
        f"| kernels | {' | '.join(f'{cell}, ms per step' for cell in cells)} | random requests, tokens/s |",
        "|---" * (len(cells) + 2) + "|",
    ]
    for one in result["runs"]:
        steps = " | ".join(f"{one['milliseconds_per_token'][cell]:.2f}" for cell in cells)
        lines.append(f"| {one['kernels']} | {steps} | {one['tokens_per_second']:,.0f} |")
    return "\n".join(lines) + "\n"


def http(result: dict[str, Any]) -> str:
    """The machine, the throughput of the engine alone, and the table of a result of tools/http_throughput.py."""
    cell = result["cells"][0]
    heads = ["server", "HTTP processes", "client", "rate", "output tokens/s", "first token ms p50", "p99"]
    heads += ["per token ms p50", "p99", "of the engine"]
    lines = [
        f"{result['device']}, torch {result['torch']}, {result['date']}; {result['model']}, {cell['cell']}: "
        f"{cell['output_tokens_s']:,.0f} output tokens/s by the engine alone:\n",
        f"| {' | '.join(heads)} |",
        f"|---|--:|---|{'--:|' * (len(heads) - 3)}",
    ]
    for row in result["runs"]:
        times = [f"{row[name][p]:.2f}" for name in ("ttft_ms", "tpot_ms") for p in ("p50", "p99")]
        part = f"{row['part']:.2f}" if row["rate"] == "inf" else ""
        names = [row["server"], str(row["api_processes"]), row["client"], str(row["rate"])]
        lines.append(f"| {' | '.join([*names, format(row['output_tokens_s'], ',.0f'), *times, part])} |")
    return "\n".join(lines) + "\n"


def exchanges(result: dict[str, Any]) -> str:
    """The machine, and the tables of a result of tools/exchange_times.py."""
    names = {"quire": "Quire", "one_shot": "torch, one-shot", "two_shot": "torch, two-shot", "nccl": "NCCL"}
    lines = [
        f"{result['gpus']} {result['device']}, torch {result['torch']}, triton {result['triton']}, {result['date']}; a "
        f"copy from one to the other is at {result['ceilings']['peer_copy_gb_s']:,.0f} GB/s:\n",
        f"| sum of, µs | {' | '.join(names.values())} |",
        "|---|" + "--:|" * len(names),
    ]
    for cell in result["cells"]:
        lines.append(f"| {cell['bytes'] >> 10:,} KiB | {' | '.join(f'{cell[name]:.1f}' for name in names)} |")
    lines += ["", "| rows of 4,096, µs | sum and norm in one kernel | in two |", "|---|--:|--:|"]
    lines += [f"| {row['rows']} | {row['fused']:.1f} | {row['apart']:.1f} |" for row in result["norms"]]
    return "\n".join(lines) + "\n"


def skinny(result: dict[str, Any]) -> str:
    """The machine, and the table of a result of tools/skinny_products.py."""
    names = {"floor_us": "floor", "cublas": "cuBLAS", "multiply_few": "`multiply_few`", "quire": "Quire"}
    names = {name: title for name, title in names.items() if name in result["cells"][0]}
    lines = [
        f"{result['device']}, torch {result['torch']}, triton {result['triton']}, {result['date']}; the floor is at "
        f"{result['ceilings']['read_gb_s']:,.0f} GB/s:\n",
        f"| layer | rows | {' | '.join(f'{title} µs' for title in names.values())} | error |",
        f"|---|--:|{'--:|' * len(names)}--:|",
    ]
    for cell in result["cells"]:
        times = " | ".join(f"{cell[name]:.1f}" for name in names)
        lines.append(f"| {cell['shape']} | {cell['rows']} | {times} | {cell['error']:.1e} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    old = {page: page.read_text() for page in PAGES}
    new = {
        page: BLOCK.sub(lambda found: f"{found[1]}{rendered(found[2])}{found[3]}", text) for page, text in old.items()
    }
    if args.check:
        return int(new != old)
    for page, text in new.items():
        page.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
