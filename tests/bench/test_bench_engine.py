"""Workloads, numbers and tables of `quire bench throughput` and `latency`, and both on the CPU."""

from __future__ import annotations

import json
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")

from safetensors.torch import load_file
from transformers import AutoConfig

from helpers.checkpoints import save
from quire.bench import engine_timing, engines
from quire.bench.figures import percentiles
from quire.bench.random_adapters import write_adapters
from quire.bench.workloads import SHAPES, LatencyCell, Work, as_range, random_work, read_work, write_shape
from quire.cli.main import main


def test_latency_cell_parse_of_names_returns_their_fields():
    assert LatencyCell.parse("64x1k+128") == LatencyCell(64, 1024, 128)
    assert LatencyCell.parse("1k into 64x512") == LatencyCell(64, 512, 0, 1024)
    for bad in ("", "64x1k", "0x5+5", "5x5+0", "1k into 64", "1k into 0x5", "x5+5", "5x5+5k+1"):
        with pytest.raises(ValueError, match="it must be like 64x1k"):
            LatencyCell.parse(bad)


def test_as_range_of_an_invalid_range_is_refused():
    assert as_range("100:1024", "--input") == (100, 1024)
    assert as_range("7", "--input") == (7, 7)
    for bad in ("", "0", "5:4", "a:b", "1:2:3", "-1"):
        with pytest.raises(ValueError, match=f"--output {bad}: it must be a length"):
            as_range(bad, "--output")


def test_random_work_with_a_seed_repeats_within_its_ranges(rng):
    vocab, seed = rng.choice((97, 4096, 150000)), rng.randrange(1 << 31)
    work = random_work(200, (3, 9), (2, 5), vocab, seed)
    assert work == random_work(200, (3, 9), (2, 5), vocab, seed)
    assert work != random_work(200, (3, 9), (2, 5), vocab, seed + 1)
    assert {len(w.prompt) for w in work} == set(range(3, 10))
    assert {w.max_tokens for w in work} == set(range(2, 6))
    assert all(0 <= token < vocab for w in work for token in w.prompt)


def test_read_work_of_a_file_names_invalid_lines(tmp_path):
    file = tmp_path / "work.jsonl"
    # JSON may have other line ends of Unicode within a string.
    file.write_text('{"prompt": [1, 2], "max_tokens": 3}\n\n{"prompt": "a\u2028"}\n', encoding="utf-8")
    assert read_work(file, lambda text: {"input_ids": [9] * len(text)}) == [Work([1, 2], 3), Work([9, 9], 128)]
    with pytest.raises(ValueError, match="jsonl:3: the prompt is a string"):
        read_work(file, None)
    for bad in ("[1]", "{}", '{"prompt": []}', '{"prompt": [1.5]}', '{"prompt": [1], "max_tokens": 0}', "nonsense"):
        file.write_text(bad)
        with pytest.raises(ValueError, match=r"work\.jsonl:1: "):
            read_work(file, None)
    file.write_text("\n")
    with pytest.raises(ValueError, match="has no requests"):
        read_work(file, None)


@pytest.mark.parametrize("name", SHAPES)
def test_write_shape_of_each_name_is_a_configuration_of_its_size(name, tmp_path):
    config = AutoConfig.from_pretrained(write_shape(name, tmp_path))
    assert config.dtype == torch.bfloat16
    assert (config.num_attention_heads, config.head_dim) in ((16, 128), (32, 128), (64, 128), (64, 64))
    assert config.rope_parameters["rope_theta"] == SHAPES[name]["rope_theta"]
    assert config.max_position_embeddings == SHAPES[name]["max_position_embeddings"]
    longer = AutoConfig.from_pretrained(write_shape(name, tmp_path, context=1 << 20))
    assert longer.max_position_embeddings == 1 << 20
    with pytest.raises(ValueError, match="--shape large: it must be one of"):
        write_shape("large", tmp_path)


def test_percentiles_and_steady_steps_equal_numbers_by_hand():
    assert percentiles([]) == {}
    assert percentiles([0.003]) == {"p50": 3.0, "p95": 3.0, "p99": 3.0}
    hundred = percentiles([i / 1e3 for i in range(100, 0, -1)])
    assert hundred == pytest.approx({"p50": 50.0, "p95": 95.0, "p99": 99.0})
    # All decode from 2, when the second begins, to 4, when the first ends.
    assert engine_timing.steady_steps([[1.0, 2.0, 3.0, 4.0], [2.0, 3.0, 4.0, 9.0]]) == [1.0, 1.0]


def test_latency_of_a_long_cell_has_shorter_prompts_in_the_round_that_is_not_timed(monkeypatch):
    monkeypatch.setattr(engine_timing, "_MAX_UNTIMED_INPUT", 7)
    lengths = []

    def run(work):
        lengths.append([len(each.prompt) for each in work])
        return [[1.0, 2.0, 3.0]] * len(work)

    setup = engine_timing.Setup(Path("a folder"), "a model", "cpu")
    found = engine_timing._latency(SimpleNamespace(run=run), LatencyCell(2, 30, 3), 2, 100, setup, None, 0)
    assert lengths == [[7, 7], [30, 30], [30, 30]]
    assert found["step_ms"]["p50"] == 1000


def test_floor_bytes_of_a_step_equal_numbers_by_hand(tmp_path):
    with engines.LLM(save("mistral", tmp_path), num_pages=64) as llm:
        tokens = 2 * 2 * 16 * 4 * 4  # keys and values of a token: 2 heads of 16 floats in 4 layers
        weights = sum(p.numel() for p in llm.model.network.parameters()) - 97 * 32  # the table of embeddings
        assert engine_timing.floor_bytes(llm.model, 3, 5) == 4 * weights + 3 * 5 * tokens
        assert engine_timing.floor_bytes(llm.model, 3, 100) == 4 * weights + 3 * 9 * tokens  # the window


def test_floor_bytes_of_experts_equal_numbers_by_hand(tmp_path):
    """One request reads 2 of 4 experts, and two read 3 in the mean."""
    with engines.LLM(save("mixtral", tmp_path), num_pages=64) as llm:
        network = llm.model.network
        experts = sum(p.numel() for name, p in network.named_parameters() if ".experts." in name)
        others = sum(p.numel() for p in network.parameters()) - 97 * 32 - experts
        tokens = 2 * 2 * 16 * 4 * llm.model.config.num_hidden_layers
        for batch, read in ((1, 2 / 4), (2, 3 / 4)):
            assert engine_timing.floor_bytes(llm.model, batch, 5) == 4 * (others + experts * read) + batch * 5 * tokens


def test_bench_throughput_and_latency_write_their_results(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("quire.bench.cpu.ceilings", lambda: {"read_gb_s": 10.0})
    file, folder = tmp_path / "result.json", str(save("llama", tmp_path / "llama"))
    common = ["--device", "cpu", "--model", folder, "--num-pages", "200", "--json", str(file)]
    given = ["--requests", "7", "--input", "3:9", "--output", "2:5"]
    assert main(["bench", "throughput", *common, *given, "--seed", "5"]) == 0
    result = json.loads(file.read_text())
    (row,) = result["cells"]
    work = random_work(7, (3, 9), (2, 5), 97, 5)
    out, total = sum(w.max_tokens for w in work), sum(w.max_tokens + len(w.prompt) for w in work)
    assert row["output_tokens_s"] * row["seconds"] == pytest.approx(out)
    assert row["total_tokens_s"] * row["seconds"] == pytest.approx(total)
    assert 0 < row["ttft_ms"]["p50"] <= row["ttft_ms"]["p99"] <= row["seconds"] * 1e3
    assert row["tpot_ms"]["p50"] > 0
    assert {"device", "date", "quire", "torch", "seed", "ceilings", "model"} <= set(result)
    assert "| 7 requests, 3:9 in, 2:5 out | Quire |" in capsys.readouterr().out

    cells = ["--cell", "3x5+6", "--cell", "4 into 2x5", "--rounds", "1", "--peers", "invariant,transformers,vllm"]
    assert main(["bench", "latency", *common, *cells]) == 0
    rows = {(row["cell"], row["engine"]): row for row in json.loads(file.read_text())["cells"]}
    ours, theirs = rows["3x5+6", "Quire"], rows["3x5+6", "Transformers"]
    assert ours["step_ms"]["p50"] > 0
    assert theirs["step_ms"]["p50"] > 0
    assert rows["3x5+6", "Quire, batch-invariant"]["step_ms"]["p50"] > 0
    assert ours["output_tokens_s"] == pytest.approx(3e3 / ours["step_ms"]["p50"])
    assert 0 < ours["floor_ms"] < ours["step_ms"]["p50"]
    assert rows["4 into 2x5", "Quire"]["ttft_ms"]["p50"] > 0
    assert "no requests while others run" in rows["4 into 2x5", "Transformers"]["failed"]
    printed = capsys.readouterr().out
    if "failed" in rows["3x5+6", "vLLM"]:
        assert "vLLM failed: " in printed

    pytest.importorskip("matplotlib")
    from quire.bench.plot_engines import plot

    plot(json.loads(file.read_text()), tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


SMALL = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "formats"), [("llama-3.1-8b", "bf16,fp8,fp8-block,int4"), ("gpt-oss-20b", "bf16,mxfp4")]
)
def test_bench_latency_of_weight_formats_has_a_row_for_each(shape, formats, tmp_path, monkeypatch):
    small = SMALL | {"intermediate_size": 256, "vocab_size": 256, "num_local_experts": 4, "num_experts_per_tok": 2}
    monkeypatch.setitem(SHAPES, shape, SHAPES[shape] | small)
    monkeypatch.setattr("quire.bench.cpu.ceilings", lambda: {"read_gb_s": 10.0})
    file = tmp_path / "result.json"
    options = ["--cell", "2x5+4", "--rounds", "1", "--num-pages", "50", "--json", str(file), "--device", "cpu"]
    assert main(["bench", "latency", "--shape", shape, "--weights", formats, *options]) == 0
    result = json.loads(file.read_text())
    rows = {row["weights"]: row for row in result["cells"]}
    assert list(rows) == formats.split(",")
    assert [row["engine"] for row in result["cells"]] == [f"Quire, {name}" for name in rows]
    assert all(row["step_ms"]["p50"] > 0 for row in rows.values())
    others = rows["bf16"]["floor_ms"]
    assert all(row["floor_ms"] < others for name, row in rows.items() if name != "bf16")
    assert {"device", "date", "torch"} <= set(result)


def test_measured_failed_peer_has_its_error_and_failed_quire_raises():
    def fails():
        raise OverflowError("too much")

    assert engine_timing._measured({"engine": "vLLM"}, fails) == {"failed": "OverflowError: too much"}
    with pytest.raises(OverflowError):
        engine_timing._measured({"engine": "Quire"}, fails)


def test_bench_engine_with_wrong_arguments_names_them(capsys, tmp_path):
    for arguments, message in (
        (["throughput", "--peers", "fa3"], "--peers fa3: it must be of invariant, transformers, vllm"),
        (["throughput", "--shape", "huge"], "--shape huge: it must be one of qwen3-0.6b"),
        (["throughput", "--shape", "qwen3-0.6b", "--model", str(tmp_path)], "--model names a model already"),
        (["latency", "--weights", "fp8"], "--weights fp8: only a --shape has weights of any format"),
        (["latency", "--shape", "qwen3-8b", "--weights", "fp8,fp4"], "--weights fp4: it must be of bf16, fp8,"),
        (["latency", "--shape", "qwen3-8b", "--weights", "mxfp4"], "of experts, which qwen3-8b does not have"),
        (["latency", "--cell", "gqa4 8x2k"], "it must be like 64x1k"),
        (["latency", "--context-parallel-size", "2", "--peers", "vllm"], "--peers don't divide a cache"),
    ):
        assert main(["bench", *arguments, "--device", "cpu"]) == 2
        assert message in capsys.readouterr().err


def test_quire_engine_with_impossible_requests_raises(tmp_path):
    engine = engines.Quire(save("llama", tmp_path), "cpu", 60, 4, num_pages=64)
    with pytest.raises(ValueError, match="token 97"):
        engine.arrivals([Work([97], 1)], [Work([1], 1)])
    assert engine.run([Work([1, 2], 3), Work([3], 2)])[0][-1] > 0
    engine.close()
    with pytest.raises(ValueError, match="requests have 300 tokens: the context of the model is 256"):
        engines.Quire(tmp_path, "cpu", 300, 4, num_pages=64)


def test_quire_engine_after_close_is_collected(tmp_path):
    """Also objects that were frozen with the engine and refer to each other, as its captured graphs do."""
    engine = engines.Quire(save("llama", tmp_path), "cpu", 60, 4, num_pages=64)
    network = engine.llm.model.network
    network.itself, weights = [network], weakref.ref(next(network.parameters()))
    del network
    engine.close()
    assert weights() is None


def test_vllm_engine_of_a_stand_in_counts_reported_tokens(monkeypatch):
    """vLLM reports all tokens of a request so far, under a name that it may extend."""

    class Engine:
        def __init__(self):
            self.left, self.count = {}, {}
            self.loaded, self.loras = [], []
            self.engine_core = SimpleNamespace(shutdown=lambda: ended.append(self))

        def add_request(self, name, prompt, params, lora_request):
            self.left[name] = params["max_tokens"]
            self.loras.append(lora_request)

        def add_lora(self, lora_request):
            self.loaded.append(lora_request)

        def has_unfinished_requests(self):
            return bool(self.left)

        def abort_request(self, names):
            for name in names:
                self.left.pop(name, None)

        def step(self):
            found = []
            for name in list(self.left):
                self.left[name] -= 1
                self.count[name] = self.count.get(name, 0) + 1
                tokens = SimpleNamespace(token_ids=[0] * self.count[name])
                found.append(SimpleNamespace(request_id=f"{name}-ab12", outputs=[tokens]))
                if not self.left[name]:
                    del self.left[name]
            return found

    def llm(folder, **options):
        given.update(options)
        return SimpleNamespace(llm_engine=Engine())

    given, ended = {}, []
    stand_in = SimpleNamespace(SamplingParams=dict, LLM=llm)
    for name, module in (("vllm", stand_in), ("vllm.lora", stand_in), ("vllm.lora.request", stand_in)):
        monkeypatch.setitem(sys.modules, name, module)
    stand_in.LoRARequest = lambda *fields: fields
    engine = engines.VLLM(Path("folder"), "cuda", 50, 4)
    assert "enable_lora" not in given
    assert [len(times) for times in engine.run([Work([1], 3), Work([1, 2], 5)])] == [3, 5]
    assert len(engine.arrivals([Work([1], 1)] * 2, [Work([5], 1)] * 3)) == 3
    assert not engine.llm.llm_engine.left
    assert set(engine.llm.llm_engine.loras) == {None}
    inner = engine.llm.llm_engine
    engine.close()
    assert ended == [inner]

    adapters = {name: Path(name) for name in ("a", "b", "c")}
    engine = engines.VLLM(Path("folder"), "cuda", 50, 4, adapters=adapters, max_adapters=2, max_adapter_rank=20)
    loras = {"enable_lora": True, "max_lora_rank": 32, "max_loras": 2, "max_cpu_loras": 3}
    assert {name: given[name] for name in loras} == loras
    engine.run([Work([1], 3, "b"), Work([1], 3), Work([1], 3, "a")])
    inner = engine.llm.llm_engine
    assert inner.loaded == [("a", 1, "a"), ("b", 2, "b"), ("c", 3, "c")]
    assert inner.loras == [inner.loaded[1], None, inner.loaded[0]]


def test_write_adapters_are_of_all_linear_layers_and_differ(tmp_path):
    folder = save("llama", tmp_path / "llama")
    made = write_adapters(AutoConfig.from_pretrained(folder), tmp_path / "adapters", 3, 20, seed=1)
    again = write_adapters(AutoConfig.from_pretrained(folder), tmp_path / "again", 3, 20, seed=1)
    assert list(made) == ["adapter-0", "adapter-1", "adapter-2"]
    with engines.LLM(folder, num_pages=64, max_adapters=3, adapter_rank_pages=6, adapters=made) as llm:
        assert [info.rank for info in llm.adapters] == [20] * 3
        digests = [info.digest for info in llm.adapters]
        assert len(set(digests)) == 3
        assert [llm.load_adapter(name, at).digest for name, at in again.items()] == digests
        params = engines.SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        # For some prompts, the most likely tokens are those of the base.
        prompts = [[first, 6, 7] for first in range(5, 25)]
        found = [llm.generate(prompts, params, adapter=name) for name in (None, *made)]
        assert any(len({tuple(each.token_ids) for each in of_prompt}) > 1 for of_prompt in zip(*found, strict=True))
    tensors = load_file(made["adapter-0"] / "adapter_model.safetensors")
    layers = [name for name, module in llm.model.network.named_modules() if name.endswith(("_proj",))]
    assert {name.split(".lora_")[0] for name in tensors} == {f"base_model.model.{name}" for name in layers}
    for count, rank, name in ((0, 4, "adapters"), (2, 0, "adapter_rank")):
        with pytest.raises(ValueError, match=f"{name} = 0: it must be 1 or more"):
            write_adapters(AutoConfig.from_pretrained(folder), tmp_path / "none", count, rank)


@pytest.mark.slow
def test_bench_throughput_and_latency_with_adapters_give_each_request_one(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("quire.bench.cpu.ceilings", lambda: {"read_gb_s": 10.0})
    seen, generate = [], engines.LLM.generate

    def noted(llm, prompts, params, *, adapter, on_update):
        seen.append(adapter)
        return generate(llm, prompts, params, adapter=adapter, on_update=on_update)

    monkeypatch.setattr(engines.LLM, "generate", noted)
    file, folder = tmp_path / "result.json", str(save("llama", tmp_path / "llama"))
    common = ["--device", "cpu", "--model", folder, "--num-pages", "200", "--json", str(file)]
    given = ["--adapters", "3", "--adapter-rank", "17"]
    work = ["--requests", "7", "--input", "3:9", "--output", "2:5", "--peers", "transformers", "--max-adapters", "2"]
    assert main(["bench", "throughput", *common, *given, *work]) == 0
    result = json.loads(file.read_text())
    assert (result["adapters"], result["adapter_rank"]) == (3, 17)
    assert (result["options"]["max_adapters"], result["options"]["adapter_rank_pages"]) == ("2", "4")
    ours, theirs = result["cells"]
    assert ours["output_tokens_s"] > 0
    assert theirs["failed"] == "ValueError: it is not timed with adapters"
    names = [f"adapter-{i % 3}" for i in range(7)]
    assert seen[-1] == names
    cells = ["--cell", "4x5+6", "--cell", "4 into 2x5", "--rounds", "1"]
    assert main(["bench", "latency", *common, *given, *cells]) == 0
    assert names[:4] in seen
    assert names[:2] in seen
    seen.clear()
    assert main(["bench", "latency", *common, "--adapters", "0,3,2", "--cell", "4x5+6", "--rounds", "1"]) == 0
    assert seen[1::2] == [[None] * 4, [*names[:3], names[0]], names[:2] * 2]
    rows = [(row["engine"], row["adapter_count"]) for row in json.loads(file.read_text())["cells"]]
    assert rows == [(f"Quire, {count} adapters", count) for count in (0, 3, 2)]
    for operation, wrong, reason in (("latency", "1,a", "must be a number"), ("throughput", "0,1", "only latency")):
        assert main(["bench", operation, *common, "--adapters", wrong]) == 2
        assert f"--adapters {wrong}: " in (error := capsys.readouterr().err)
        assert reason in error
