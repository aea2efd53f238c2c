"""The command line: what it prints, and what it says to mistakes. Never a traceback."""

from __future__ import annotations

import importlib
import io
import json
import os
import signal
import subprocess
import sys
import warnings
from importlib.metadata import version

import pytest
import torch

pytest.importorskip("transformers")

from helpers.paths import ROOT
from quire.cli import main
from quire.cli.loading import loading
from quire.engine import LLM, SamplingParams

EXAMPLES = ROOT / "examples"


def quire(*arguments, stdin=""):
    return subprocess.run([sys.executable, "-m", "quire", *arguments], input=stdin, capture_output=True, text=True)


def test_generate_of_one_prompt_streams_its_text(capsys):
    prompt = "def add(a, b):\n    return"
    assert main(["generate", prompt, "--max-tokens", "8"]) == 0
    out, err = capsys.readouterr()
    with LLM() as llm:
        assert out == prompt + llm.generate(prompt, SamplingParams(temperature=0, max_tokens=8))[0].text + "\n"
    assert "8 generated" in err
    assert "preemptions" in err


def test_generate_of_the_example_file_has_text_for_all_prompts(capsys):
    file = EXAMPLES / "prompts.txt"
    prompts = [p.strip("\n") for p in file.read_text().split("---\n")]
    assert main(["generate", "--file", str(file), "--max-tokens", "12", "--ignore-eos"]) == 0
    out, err = capsys.readouterr()
    for i, prompt in enumerate(prompts):
        assert f"--- {i}: length, 12 tokens\n{prompt}" in out
    assert f"{len(prompts)} prompts in" in err
    assert f"{12 * len(prompts)} generated" in err
    assert "32 of them reused" in err


def test_generate_json_has_a_line_per_prompt_and_a_summary(capsys):
    options = ["--json", "--max-tokens", "5", "--logprobs", "2", "--temperature", "0.7", "--seed", "3", "--ignore-eos"]
    assert main(["generate", "import os", "import sys", *options]) == 0
    *lines, summary = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["prompt"] for line in lines] == ["import os", "import sys"]
    for line in lines:
        assert len(line["token_ids"]) == len(line["logprobs"]) == 5
        assert all(len(report) >= 2 for report in line["logprobs"])
        assert line["finish_reason"] == "length"
    assert summary["summary"]["generated_tokens"] == 10
    assert summary["summary"]["pages_used"] >= 2


def test_generate_from_stdin_splits_prompts():
    given = ("generate", "--max-tokens", "3", "--json", "--device", "cpu")
    done = quire(*given, stdin="import os\n\nimport sys\n")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 3
    done = quire(*given, stdin="a\f\u2028\nb\n---\nc\n")
    assert [json.loads(line).get("prompt") for line in done.stdout.split("\n") if line] == ["a\f\u2028\nb", "c", None]


def test_generate_sampling_options_reach_the_engine(capsys):
    free = ["generate", "x = 1\n", "--json", "--max-tokens", "20", "--temperature", "1.0", "--seed", "5"]
    assert main(free) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert main(free) == 0
    assert capsys.readouterr().out.splitlines()[0] == first
    assert main([*free, "--top-k", "1"]) == 0
    greedy = json.loads(capsys.readouterr().out.splitlines()[0])
    assert main(["generate", "x = 1\n", "--json", "--max-tokens", "20"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[0])["token_ids"] == greedy["token_ids"]
    assert main([*free, "--stop", json.loads(first)["text"][3:5]]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[0])["finish_reason"] == "stop"


def test_generate_with_one_refused_prompt_completes_the_others(capsys):
    assert main(["generate", "import os", "y" * 9000, "--max-tokens", "4", "--json"]) == 1
    out, err = capsys.readouterr()
    assert [json.loads(line).get("prompt") for line in out.splitlines()] == ["import os", None]
    assert "quire: error: prompt 1 has" in err


def test_generate_without_options_uses_the_checkpoints_settings(capsys, tmp_path):
    from quire.engine import shipped_model

    for file in shipped_model().iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "generation_config.json").unlink()
    settings = {"do_sample": True, "temperature": 1.5, "max_new_tokens": 6, "eos_token_id": 0}
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    given = ["generate", "x = 1\n", "--model", str(tmp_path), "--json", "--seed", "1", "--ignore-eos"]

    def tokens(*options):
        assert main([*given, *options]) == 0
        return json.loads(capsys.readouterr().out.splitlines()[0])["token_ids"]

    assert len(tokens()) == 6
    assert tokens() == tokens("--temperature", "1.5", "--top-k", "50", "--max-tokens", "6")
    assert tokens() != tokens("--temperature", "0")
    assert len(tokens("--max-tokens", "9")) == 9


def test_generate_of_bytes_that_are_no_text_is_refused(tmp_path, capsys):
    assert main(["generate", "import os", os.fsdecode(b"abc\xff"), "--max-tokens", "3", "--json"]) == 1
    out, err = capsys.readouterr()
    assert err.startswith("quire: error: prompt 1 is not text: '\\udcff' at 3 is half a character or a byte")
    assert len(err.splitlines()) == 1
    assert [json.loads(line).get("prompt") for line in out.splitlines()] == ["import os", None]
    assert main(["generate", "x", "--stop", os.fsdecode(b"\xff")]) == 2
    assert "stop = ('\\udcff',)" in capsys.readouterr().err
    file = tmp_path / "prompts.txt"
    file.write_bytes(b"import os\nabc\xff\n")
    assert main(["generate", "--file", str(file)]) == 2
    assert f"--file {file} is not text: 'utf-8' codec can't decode byte 0xff" in capsys.readouterr().err


HEAVY = {"torch", "numpy", "numba", "transformers", "triton"}


def test_help_and_usage_errors_do_not_import_torch():
    code = f"""if True:
        import sys
        from quire.cli import main
        commands = ["generate"], ["check"], ["env"], ["bench"], []
        for arguments in [[*c, "--help"] for c in commands] + [["--version"], ["paint"], ["bench", "paint"]]:
            try:
                main(arguments)
            except SystemExit:
                pass
        assert main(["generate", "x", "--temperature", "nan"]) == 2
        assert main(["generate", "--file", "/nowhere.txt"]) == 2
        found = {HEAVY} & set(sys.modules)
        assert not found, found
        """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "complete prompts" in done.stdout
    assert "--max-batched-tokens" in done.stdout


@pytest.fixture
def interruptible():
    """Ctrl-C is Python's own affair, also where the tests run in the background of a shell, which ignores it there."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    "moment",
    ["quire.cli.generate", "torch.nn", pytest.param("transformers.modeling_utils", marks=pytest.mark.slow)],
)
def test_ctrl_c_during_imports_ends_without_a_traceback(moment):
    """The signal comes while a module is imported: the command, a part of torch, what a model is loaded with."""
    code = f"""if True:
        import os, signal, sys
        signal.signal(signal.SIGINT, signal.default_int_handler)
        class Finder:
            def find_spec(self, name, path=None, target=None):
                if name == {moment!r}:
                    print(name, flush=True)
                    os.kill(os.getpid(), signal.SIGINT)
        sys.meta_path.insert(0, Finder())
        sys.argv = ["quire", "generate", "x = 1"]
        from quire.cli import main
        sys.exit(main())
        """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 130
    assert (done.stdout, done.stderr) == (f"{moment}\n", "")


def test_ctrl_c_while_text_streams_ends_in_order(capsys, monkeypatch, interruptible):
    from quire.engine import llm

    part, handler = llm._delta, signal.getsignal(signal.SIGINT)
    parts = []

    def interrupted(update):
        parts.append(part(update))
        if len(parts) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return parts[-1]

    monkeypatch.setattr(llm, "_delta", interrupted)
    assert main(["generate", "def add(a, b):\n    return", "--max-tokens", "1000", "--ignore-eos"]) == 130
    out, err = capsys.readouterr()
    assert out.endswith("\n")
    assert err == ""
    assert len(parts) == 3
    assert signal.getsignal(signal.SIGINT) is handler


def test_ctrl_c_ignored_by_the_caller_stays_ignored():
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with loading():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, handler)


MISTAKES = {
    "no prompt": (["generate"], "there are no prompts"),
    "no folder": (["generate", "x", "--model", "/nowhere"], "there is no model folder /nowhere"),
    "no file": (["generate", "--file", "/nowhere.txt"], "/nowhere.txt"),
    "negative max tokens": (["generate", "x", "--max-tokens", "-3"], "max_tokens = -3"),
    "NaN temperature": (["generate", "x", "--temperature", "nan"], "temperature = nan"),
    "backend": (["generate", "x", "--backend", "fast"], "backend = 'fast' is unknown"),
    "device": (["generate", "x", "--device", "abacus"], "device = 'abacus' can't be used"),
    "dtype": (["generate", "x", "--dtype", "int3"], "int3"),
    "pages": (["generate", "x", "--num-pages", "0"], "num_pages = 0"),
    "no scales": (
        ["serve", "--port", "0", "--kv-cache-dtype", "fp8", "--kv-cache-scales", "/nowhere"],
        "kv_cache_scales = '/nowhere': there is no such file",
    ),
    "nothing to scale": (
        ["serve", "--port", "0", "--kv-cache-scales", "/nowhere"],
        "only an fp8 cache (kv_cache_dtype) has scales",
    ),
    "nothing to measure": (["calibrate", "/tmp/scales"], "there are no prompts"),
    "nowhere to write": (["calibrate", "/nowhere/scales", "import os", "--num-pages", "9"], "/nowhere/scales"),
    "no folder to serve": (["serve", "/nowhere", "--port", "0"], "there is no model folder /nowhere"),
    "limit": (["serve", "--max-n", "0"], "max_n = 0: it must be above 0"),
    "grace": (["serve", "--grace", "inf"], "grace = inf"),
    "port": (["serve", "--port", "70000", "--num-pages", "2"], "port = 70000: it must be from 0 to 65535"),
    "check backend": (["check", "--backend", "fast"], "backend = 'fast' is unknown"),
    "check batches": (["check", "--batches", "0"], "--batches 0"),
    "cell": (["bench", "decode", "--cell", "8x"], "'8x' is not understood"),
    "page size of a cell": (["bench", "decode", "--cell", "p0 2x16"], "cell 'decode p0 2x16': page_size = 0"),
    "rounds": (["bench", "decode", "--rounds", "0"], "--rounds 0"),
    "peers": (["bench", "decode", "--device", "cpu", "--peers", "fa3"], "--peers fa3: on a CPU only torch is timed"),
    "plot": (["bench", "decode", "--plot", "rates.jpg"], "must end in .png"),
    "weights": (["bench", "latency", "--shape", "qwen3-0.6b", "--weights", "fp8,"], "it must be of bf16, fp8"),
    "json's folder": (["bench", "decode", "--json", "no/such/folder/rates.json"], "--json no/such/folder/rates.json"),
    "json is a folder": (["bench", "latency", "--json", "/tmp"], "it must be a file in a folder that exists"),
    "plot's folder": (["bench", "decode", "--plot", "no/such/folder/rates.png"], "in a folder that exists"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_command_with_wrong_arguments_prints_one_line(case, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO())
    arguments, message = MISTAKES[case]
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("quire: error: ")
    assert message in err
    assert len(err.splitlines()) == 1


def test_command_with_unknown_words_prints_the_usage():
    for arguments in (["paint"], ["generate", "--hot"], []):
        done = quire(*arguments)
        assert done.returncode == 2
        assert "usage: quire" in done.stderr
        assert "Traceback" not in done.stderr


def test_calibrate_writes_scales_that_the_engine_loads(tmp_path, capsys):
    file, texts = tmp_path / "scales", tmp_path / "texts"
    texts.write_text("import os\n\n---\ndef add(a, b):\n    return a + b\n")
    assert main(["calibrate", str(file), "--file", str(texts), "--num-pages", "20", "--page-size", "4"]) == 0
    assert f"{file} has the scales of 6 layers: keys 0.0" in capsys.readouterr().err
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        LLM(num_pages=20, kv_cache_dtype="fp8", kv_cache_scales=file).close()


@pytest.mark.slow
def test_check_with_a_seed_passes_and_repeats(capsys):
    assert main(["check", "--backend", "cpu", "--batches", "1", "--seed", "4", "--json"]) == 0
    first = json.loads(capsys.readouterr().out)
    assert first["seed"] == 4
    assert {row["family"] for row in first["rows"]} == {"cpu"}
    assert len(first["rows"]) == 60
    assert all(row["ok"] for row in first["rows"])
    assert main(["check", "--backend", "cpu", "--batches", "1", "--seed", "4"]) == 0
    table = capsys.readouterr().out
    assert "60 rows, 0 missed; --seed 4 repeats this run" in table


@pytest.mark.slow
def test_check_with_a_wrong_kernel_fails(capsys, monkeypatch):
    from quire.kernels.cpu import host as cpu

    attend = cpu.FAMILY.attend

    def wrong(call, out, lse):
        attend(call, out, lse)
        out[-1:] *= 1.02

    monkeypatch.setattr(cpu.FAMILY, "attend", wrong)
    assert main(["check", "--batches", "3", "--json"]) == 1  # a row misses if one of its batches does
    found = json.loads(capsys.readouterr().out)
    rows = found["rows"]
    assert len(found["layers"]) == 30 * (1 + torch.cuda.is_available())
    assert all(row["ok"] for row in found["layers"])
    assert sum(not row["ok"] for row in rows) > len(rows) // 2


def test_check_layers_with_a_wrong_activation_fails(monkeypatch):
    from quire import activation
    from quire.cli.check_layers import BOUNDS, check_layers

    rows = list(check_layers(5, 1, torch.device("cpu")))
    assert len(rows) == 10 * len(BOUNDS)
    assert all(row["ok"] for row in rows)
    monkeypatch.setattr(activation, "gelu_and_mul", activation.gelu_tanh_and_mul)
    rows = list(check_layers(5, 1, torch.device("cpu")))
    assert {row["operation"] for row in rows if not row["ok"]} == {"gelu_and_mul"}


def test_env_lists_versions_and_families(capsys):
    assert main(["env", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["versions"]["torch"] == version("torch")
    assert found["families"]["cpu"]["cpu"] is None
    assert "it needs a GPU" in found["families"]["cpu"]["triton"]
    assert main(["env"]) == 0
    out = capsys.readouterr().out
    assert "numba" in out
    assert "available" in out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("operation", "cell"), [("decode", "8:2 d64 3x40"), ("prefill", "4:4 d64 2x33"), ("prefill", "4:2 d64 2x9@50")]
)
def test_bench_on_a_cpu_times_quire_and_torch(operation, cell, capsys, tmp_path):
    file, picture = tmp_path / "out.json", tmp_path / "out.png"
    given = ["--device", "cpu", "--cell", cell, "--rounds", "1", "--json", str(file), "--plot", str(picture)]
    assert main(["bench", operation, *given]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    out = capsys.readouterr().out
    result = json.loads(file.read_text())
    assert result["ceilings"]["read_gb_s"] > 0.1
    (row,) = result["cells"]
    assert row["cell"] == f"{operation} {cell}"
    assert row["ms"] > 0
    assert row["torch_ms"] > 0
    assert row["error"] < 3e-3
    assert f"| {operation} {cell} |" in out


@pytest.mark.parametrize(("there_is", "timed"), [(False, "cpu"), (True, "gpu")])
def test_bench_without_a_device_takes_the_gpu_if_there_is_one(there_is, timed, monkeypatch, capsys):
    pytest.importorskip("triton")
    module = importlib.import_module(f"quire.bench.{timed}")
    timed_cells = []

    def bench(names, backend, rounds):
        timed_cells.extend(names)
        yield {"cells": [{"cell": name} for name in names]}

    monkeypatch.setattr(torch.cuda, "is_available", lambda: there_is)
    monkeypatch.setattr(module, "bench", bench)
    monkeypatch.setattr(module, "table", lambda result: "a table")
    assert main(["bench", "decode"]) == 0
    assert timed_cells == list(module.DECODE)
    assert capsys.readouterr().out == "a table\n"


def test_bench_with_named_peers_passes_them_on(monkeypatch, capsys):
    gpu = pytest.importorskip("triton") and importlib.import_module("quire.bench.gpu")
    given = []

    def bench(names, backend, rounds, chosen_peers):
        given.append((backend, chosen_peers))
        yield {"cells": [{"cell": names[0]}]}

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu, "bench", bench)
    monkeypatch.setattr(gpu, "table", lambda result: "a table")
    assert main(["bench", "prefill", "--cell", "2x9", "--backend", "triton", "--peers", "fa3,sdpa"]) == 0
    assert given == [("triton", ("fa3", "sdpa"))]
    assert main(["bench", "prefill", "--cell", "2x9", "--peers", "fa5"]) == 2
    assert "'fa5' is unknown" in capsys.readouterr().err


def test_bench_on_cuda_without_a_gpu_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench", "decode", "--device", "cuda"]) == 2
    assert "--device cuda: there is no GPU" in capsys.readouterr().err


@pytest.mark.slow
def test_bench_interrupted_keeps_the_rows_so_far(monkeypatch, capsys, tmp_path):
    from quire.bench import cpu

    measure, file = cpu.measure, tmp_path / "out.json"

    def interrupted(name, *given):
        if name.endswith("2x30"):
            raise KeyboardInterrupt
        return measure(name, *given)

    monkeypatch.setattr(cpu, "measure", interrupted)
    cells = ["--cell", "4:2 d64 3x40", "--cell", "4:2 d64 2x30"]
    assert main(["bench", "decode", "--device", "cpu", *cells, "--rounds", "1", "--json", str(file)]) == 130
    assert [row["cell"] for row in json.loads(file.read_text())["cells"]] == ["decode 4:2 d64 3x40"]
    assert "1 of 2: decode 4:2 d64 3x40" in capsys.readouterr().err
