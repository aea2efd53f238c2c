"""CUDA graphs of steps: the tokens are those of steps without graphs; and what graphs read, compared on the host."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from helpers.checkpoints import CONFIGS, VOCAB, save
from helpers.engines import pages_add_up, same, until_idle
from quire.engine import LLM, SamplingParams
from quire.engine.batch import StepBatch
from quire.engine.graph_inputs import GraphInputs, StepShape
from quire.engine.graphs import StepGraphs, decode_sizes, mixed_sizes
from quire.engine.request import Request
from quire.engine.runner import Runner
from quire.engine.scheduler import Scheduler
from quire.steps import StepTables


@pytest.mark.parametrize("most", [1, 2, 3, 8, 9, 64, 100, 256, 257, 300, 1000])
def test_sizes_of_graphs_rise_to_the_largest(most):
    sizes = decode_sizes(most)
    assert sizes[-1] == most
    assert sizes == sorted(set(sizes))
    mixed = mixed_sizes(most)
    assert mixed == sorted(set(mixed))
    assert not mixed or mixed[-1] == most
    for n in range(33, most + 1):
        assert next(size for size in mixed if size >= n) < 1.6 * n


def test_shape_of_a_step_is_the_smallest_that_fits(rng):
    buffers = GraphInputs(StepShape(40, 200), 5, 4, torch.device("cpu"))
    graphs = StepGraphs(lambda inputs, shape: torch.empty(0), lambda logits: None, buffers, 40, 200)

    class One:
        def __init__(self, count):
            self.count = count

    for _ in range(300):
        chunks = [One(rng.choice((1, 1, 1, 1, rng.randint(1, 60)))) for _ in range(rng.randint(1, 45))]
        batch = StepBatch([None] * len(chunks), np.zeros(len(chunks)), chunks)
        tokens, shape = sum(c.count for c in chunks), graphs.shape(batch)
        fitting = [s for s in graphs.shapes if s.rows >= len(chunks) and s.tokens >= tokens]
        fitting = [s for s in fitting if s.max_row_tokens > 1 or tokens == len(chunks)]
        assert shape == min(fitting, key=lambda s: (s.tokens, s.rows), default=None)


def make_request(rng, longest):
    params = SamplingParams(max_tokens=rng.randint(1, 30))
    prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, longest - 30))]
    return Request(prompt, params, None, frozenset(), lambda update: None)


def by_request(chunk):
    return id(chunk.request)


def test_graph_inputs_of_random_schedules_equal_tables_made_anew(rng):
    """Random schedules, of which some steps are left out: each row's tables are those that are made from scratch."""
    repeated = 0
    for _ in range(30):
        size, most, longest = rng.choice((1, 2, 4, 16)), rng.randint(1, 12), 60
        width, budget = -(-longest // size), rng.choice((12, 40))
        scheduler = Scheduler(width * rng.randint(1, 6), size, most, max(budget, most))
        buffers = GraphInputs(StepShape(most, 64), width, size, torch.device("cpu"))
        waiting = [make_request(rng, longest) for _ in range(25)]
        sampled: dict[int, Request] = {}  # the requests of the rows of the last step
        requests, shape = None, None  # those of the last step, if it was one of decodes
        while waiting or scheduler.running or scheduler.waiting:
            if waiting and rng.random() < 0.6:
                scheduler.add(waiting.pop())
            chunks = scheduler.schedule()
            again = requests is not None and chunks.decode_only and chunks.requests is requests
            if chunks and (again or rng.random() < 0.9):  # a step like the last one has a graph, as that one had
                decodes = all(c.count == 1 for c in chunks)
                if not again or rng.random() < 0.2:
                    rows = rng.randint(len(chunks), most)
                    shape = StepShape(rows, rows if decodes else 64)
                ordered, inputs = buffers.prepare(chunks, shape)
                buffers.copy(inputs)
                assert sorted(ordered, key=by_request) == sorted(chunks, key=by_request)
                buffers.views(shape).write_pages()  # as the step does
                compare(buffers.views(shape), shape, ordered, size, width, sampled)
                requests = chunks.requests if chunks.decode_only else None
                if ordered.decode_only:
                    ordered.sampled = rng.random() < 0.9
                    repeated += again
            else:
                ordered, requests = chunks, None
            done = [c.request for c in ordered if c.samples]
            sampled = dict(enumerate(done))
            for chunk in chunks:
                chunk.request.num_computed_tokens += chunk.count
            for row, request in enumerate(done):
                request.num_total_tokens += 1
                request.row = row
            for request in done:
                # Either the host has read the token, or the next step knows its value from its row.
                if rng.random() < 0.7 or len(request.tokens) + 1 >= request.max_total_tokens:
                    request.push([rng.randrange(VOCAB)])
                    if request.finish_reason:
                        scheduler.remove(request)
                else:
                    request.tokens.append(rng.randrange(VOCAB))
    assert repeated > 100


def compare(inputs, shape, chunks, size, width, sampled):
    lengths, counts = [c.start + c.count for c in chunks], [c.count for c in chunks]
    expected = StepTables.from_host([c.request.pages for c in chunks], lengths, counts, size)
    tokens, rows = sum(counts), len(chunks)
    assert torch.equal(inputs.positions[:tokens], expected.positions)
    assert torch.equal(inputs.slots[:tokens], expected.slots)
    assert (inputs.slots[tokens:] == -1).all()
    assert torch.equal(inputs.qo_indptr[: rows + 1], expected.qo_indptr)
    assert inputs.qo_indptr.diff().min() >= 0
    assert inputs.qo_indptr[-1] <= shape.tokens
    kv_lens = (width - 1) * size + inputs.last_page_len
    assert kv_lens.tolist() == lengths + [0] * (shape.rows - rows)
    for row, chunk in enumerate(chunks):
        pages = chunk.request.pages
        assert inputs.kv_indices[inputs.kv_indptr[row] :][: len(pages)].tolist() == list(pages)
    given = [t for c in chunks for t in c.request.tokens[c.start : c.start + c.count]]
    pairs = zip(inputs.ids[:tokens].tolist(), inputs.source[:tokens].tolist(), strict=True)
    assert [sampled[source].tokens[-1] if token < 0 else token for token, source in pairs] == given
    ends = np.cumsum(counts) - 1
    last = [int(end) for end, c in zip(ends, chunks, strict=True) if c.samples]
    assert inputs.logit_indices[: len(last)].tolist() == last


def test_captured_step_reads_the_tables_of_graph_inputs(monkeypatch):
    """The buffers stay, so that graphs may be replayed after later plans of their wrappers. Capture is made up, on the
    CPU.
    """
    monkeypatch.setattr(Runner, "overlaps", property(lambda runner: True))
    monkeypatch.setattr(StepGraphs, "capture", lambda graphs, progress: True)
    state, read = {"capturing": False}, []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state["capturing"])
    with LLM(num_pages=50, page_size=4, cuda_graphs=False) as llm:
        runner = llm._engine.runner

        def run(*given):
            for wrapper in runner._active.values():
                wrapper._capture._gpu = True
                wrapper._capture.note()
                read.extend((wrapper.planned.qo.indptr, *wrapper.planned.kv.tables))
            return torch.empty(0)

        monkeypatch.setattr(runner.model, "logits", run)
        runner.capture(llm._engine.sampler, 6, 40)
        graphs = runner.step_graphs
        for shape in graphs.shapes:
            buffers = graphs._inputs
            buffers.fill_padding(shape)
            inputs = buffers.views(shape)
            # Tables on the host are checked, and a row must own all entries then.
            inputs.last_page_len.fill_(4)
            for state["capturing"] in (False, True):
                read.clear()
                graphs._forward(inputs, shape)
                given = (inputs.qo_indptr, inputs.kv_indptr, inputs.kv_indices, inputs.last_page_len)
                assert [x.data_ptr() for x in read] == [x.data_ptr() for x in given]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    torch.manual_seed(17)
    return {name: save(name, tmp_path_factory.mktemp(name)) for name in CONFIGS}


def requests(rng, count):
    prompts = [[rng.randrange(1, VOCAB) for _ in range(rng.randint(1, 100))] for _ in range(count)]
    params = [
        SamplingParams(temperature=rng.choice((0, 0, 0.8)), seed=rng.randrange(100), max_tokens=rng.randint(1, 60))
        for _ in prompts
    ]
    return prompts, params


@pytest.mark.gpu
@pytest.mark.parametrize("name", list(CONFIGS))
def test_llm_with_graphs_has_the_tokens_without_them(folders, rng, name):
    prompts, params = requests(rng, 40)
    sizes = {"device": "cuda", "dtype": "float32", "page_size": 8, "max_num_seqs": 24, "max_batched_tokens": 128}
    found = []
    for cuda_graphs in (False, True):
        with LLM(folders[name], cuda_graphs=cuda_graphs, num_pages=160, **sizes) as llm:
            assert (llm._engine.runner.step_graphs is not None) == cuda_graphs
            assert llm._engine.depth == 1
            done = llm.generate(prompts, params)
            until_idle(llm)
            assert pages_add_up(llm)
        found.append([c.token_ids for c in done])
    with LLM(folders[name], page_size=8) as llm:
        found.append([c.token_ids for c in llm.generate(prompts, params)])
    assert found[0] == found[1]
    assert sum(a != b for a, b in zip(found[0], found[2], strict=True)) <= 2  # rounding may choose another token


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["plain", "mixed"])
def test_llm_with_graphs_samples_plain_decodes_within_them(folders, rng, kind):
    """Plain requests, and plain ones with others among them, that end at different times and are preempted: the tokens
    are those without graphs, and sampling is launched for steps with prompts, and for requests that are not plain.
    """
    others = [{"temperature": 0.8, "seed": 1}, {"frequency_penalty": 0.5}, {"logprobs": 1}, {"logit_bias": {5: 9.0}}]
    prompts = [[rng.randrange(1, VOCAB) for _ in range(rng.randint(1, 60))] for _ in range(48)]
    params = []
    for _ in prompts:
        given = {"temperature": 0, **(rng.choice(others) if kind == "mixed" and rng.random() < 0.15 else {})}
        stop = rng.sample(range(VOCAB), rng.choice((0, 4)))
        params.append(SamplingParams(max_tokens=rng.randint(1, 60), stop_token_ids=stop, ignore_eos=True, **given))
    sizes = {"device": "cuda", "dtype": "float32", "page_size": 8, "max_num_seqs": 16, "max_batched_tokens": 64}
    with LLM(folders["llama"], cuda_graphs=False, num_pages=40, **sizes) as llm:
        expected = llm.generate(prompts, params)
    with LLM(folders["llama"], num_pages=40, **sizes) as llm:
        sampler, launched = llm._engine.sampler, []
        original = sampler.sample_greedy
        sampler.sample_greedy = lambda logits: (launched.append(len(logits)), original(logits))
        done = llm.generate(prompts, params)
        until_idle(llm)
        assert llm.stats.preemptions > 0
        decodes = [step for step in llm.step_log.steps() if step.decode_tokens == step.requests]
        assert len(launched) <= llm.stats.steps - len(decodes) < llm.stats.steps
        same(done, expected, llm, prompts, params)
        assert pages_add_up(llm)


@pytest.mark.gpu
def test_prompts_of_thousands_of_tokens_replay_a_graph(rng):
    """They are computed in one step, whose tokens are those of a step without a graph."""
    prompts = [[rng.randrange(5, 300) for _ in range(rng.randint(150, 250))] for _ in range(24)]
    greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    found = []
    for cuda_graphs in (False, True):
        with LLM(device="cuda", dtype="float32", max_num_seqs=32, num_pages=600, cuda_graphs=cuda_graphs) as llm:
            if cuda_graphs:
                llm._engine.runner.run = None  # so that a step without a graph fails
            done = llm.generate(prompts, greedy)
            until_idle(llm)
            assert {c.finish_reason for c in done} == {"length"}
            assert max(step.prompt_tokens for step in llm.step_log.steps()) == sum(map(len, prompts)) > 2048
        found.append([c.token_ids for c in done])
    assert sum(a != b for a, b in zip(*found, strict=True)) <= 1  # padding may round otherwise


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_bundled_model_with_graphs_has_the_tokens_without_them(dtype, kv_cache_dtype):
    texts = ["import os\n", "def add(a, b):\n    return", "class Stack:\n    def push(self, item):\n"] * 9
    greedy = SamplingParams(temperature=0, max_tokens=40, logprobs=5)
    found = []
    for cuda_graphs in (False, True):
        options = {"device": "cuda", "dtype": dtype, "kv_cache_dtype": kv_cache_dtype, "cuda_graphs": cuda_graphs}
        with LLM(max_num_seqs=16, gpu_memory_utilization=0.3, **options) as llm:
            found.append(llm.generate(texts, greedy))
            until_idle(llm)
            assert pages_add_up(llm)
    for without, replayed in zip(*found, strict=True):
        pairs = enumerate(zip(without.token_ids, replayed.token_ids, strict=False))
        first = next((i for i, (a, b) in pairs if a != b), None)
        if first is not None:  # sums of 16-bit elements in another order chose between tokens of nearly one probability
            likely = without.logprobs[first]
            assert abs(likely[replayed.token_ids[first]] - max(likely.values())) < 0.2


@pytest.mark.gpu
def test_model_that_cannot_be_captured_warns_once_and_runs(folders):
    from quire.engine.model import Model

    greedy = SamplingParams(temperature=0, max_tokens=20)
    prompts = [[1, 2, 3], [9, 8, 7, 6], [4, 5]]
    with LLM(folders["llama"], device="cuda", num_pages=100, cuda_graphs=False) as llm:
        expected = llm.generate(prompts, greedy)
    original = Model.logits

    def waiting(self, tokens, *rest):
        assert int(tokens.sum()) >= 0  # waits for the device, which a capture cannot
        return original(self, tokens, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Model, "logits", waiting)
        with pytest.warns(RuntimeWarning, match="without CUDA graphs, since the model cannot be captured") as warned:
            llm = LLM(folders["llama"], device="cuda", num_pages=100)
        with llm:
            assert llm._engine.runner.step_graphs is None
            done = llm.generate(prompts, greedy)
    assert len([w for w in warned if "CUDA graphs" in str(w.message)]) == 1
    assert [c.token_ids for c in done] == [c.token_ids for c in expected]
    assert 0 <= float(torch.rand((), device="cuda")) < 1, "torch still has random numbers"


@pytest.mark.gpu
def test_num_pages_by_default_fill_the_utilization(folders):
    """With a context so long that the requests could use all memory."""
    total = torch.cuda.mem_get_info()[1]
    options = {"device": "cuda", "page_size": 64, "max_num_seqs": 10**6, "cuda_graphs": False}
    with LLM(folders["llama"], gpu_memory_utilization=0.5, **options) as llm:
        free = torch.cuda.mem_get_info()[0]
        assert llm.num_pages > 1000
        assert 0.3 * total < total - free < 0.55 * total
