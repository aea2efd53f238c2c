"""Embeddings: those of Transformers' hidden states in float64, whatever the steps that compute them."""

from __future__ import annotations

import json
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

import transformers

from helpers.checkpoints import CONFIGS, VOCAB, save
from helpers.engines import captured_on_the_host, pages_add_up, same, until_idle
from quire.engine import LLM, EmbeddingParams, SamplingParams
from quire.engine.embedding import read_pooling
from quire.engine.prompts import PromptReader
from quire.engine.runner import Runner

SIZES = {"page_size": 4, "num_pages": 24, "max_num_seqs": 8, "max_batched_tokens": 40}
WAYS = [
    EmbeddingParams("last"),
    EmbeddingParams("mean"),
    EmbeddingParams("last", normalize=False, dimensions=5),
    EmbeddingParams("mean", normalize=False),
    EmbeddingParams("mean", dimensions=7),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(14)
    return save("llama", tmp_path_factory.mktemp("llama"))


def exact_states(folder, device="cpu"):
    """A function from tokens to their hidden states in float64."""
    options = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float64, **options).to(device)

    def states(tokens):
        with torch.inference_mode():
            return model(torch.tensor([tokens], device=device)).last_hidden_state[0].cpu().numpy()

    return states


def expected(states, prompt, params):
    found = states(prompt)
    pooled = (found.mean(0) if params.pooling == "mean" else found[-1])[: params.dimensions]
    return pooled / np.linalg.norm(pooled) if params.normalize in (None, True) else pooled


def check(states, prompts, params, done):
    for prompt, embedding in zip(prompts, done, strict=True):
        exact = expected(states, prompt, params)
        assert embedding.finish_reason == "stop"
        assert embedding.prompt_token_ids == prompt
        assert embedding.values.dtype == np.float32
        np.testing.assert_allclose(embedding.values, exact, atol=2e-5 * np.abs(exact).max())
        assert params.pooling == "last" or embedding.num_cached_tokens == 0


def random_prompts(rng, count):
    """Prompts of which many begin alike, and some are equal or have one token."""
    prefix = [rng.randrange(VOCAB) for _ in range(50)]
    prompts = [prefix[:1], prefix, prefix]
    for _ in range(count):
        prompts.append(prefix[: rng.choice((0, 8, 50))] + [rng.randrange(VOCAB) for _ in range(rng.randint(1, 38))])
    return prompts


def embed_beside(llm, rng, prompts, params, generated):
    """The embeddings of prompts, one call for each way, and the completions of prompts beside them; all at once."""
    results: dict[object, object] = {}
    calls = [("tokens", lambda: llm.generate(*generated))]
    calls += [(way, lambda way=way: llm.embed(prompts, way)) for way in params]
    rng.shuffle(calls)
    threads = [threading.Thread(target=lambda k=k, f=f: results.update({k: f()})) for k, f in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.parametrize("how", [pytest.param("eager", marks=pytest.mark.slow), "inputs of graphs", "drafts"])
def test_embeddings_beside_completions_are_those_of_transformers(folder, rng, how):
    """In chunks, with prefixes of others in the cache, and after preemptions."""
    prompts, states = random_prompts(rng, 12), exact_states(folder)
    # Two requests decode until they would have more tokens than the cache.
    generated = [[rng.randrange(VOCAB)] for _ in range(4)]
    sampling = [SamplingParams(1.0, max_tokens=60, seed=rng.randrange(99), ignore_eos=True) for _ in generated]
    with LLM(folder, **SIZES) as llm:
        alone = llm.generate(generated, sampling)
    with LLM(folder, **SIZES, speculative_tokens=3 * (how == "drafts")) as llm:
        if how != "drafts":
            llm._engine.depth = rng.choice((0, 1))
        if how == "inputs of graphs":
            captured_on_the_host(llm, max_tokens=48)
        done = embed_beside(llm, rng, prompts, WAYS, (generated, sampling))
        until_idle(llm)
        assert pages_add_up(llm)
        assert llm.stats.preemptions > 0
        assert how != "inputs of graphs" or llm._engine.runner.step_graphs.replays
        same(done["tokens"], alone, llm, generated, sampling)
        for way in WAYS:
            check(states, prompts, way, done[way])


@pytest.mark.parametrize("name", CONFIGS)
def test_embeddings_of_each_architecture_are_those_of_transformers(name, tmp_path, rng):
    """With sliding windows of fewer tokens than the prompts, too."""
    folder = save(name, tmp_path)
    prompts, states = random_prompts(rng, 5), exact_states(folder)
    with LLM(folder, page_size=4, max_batched_tokens=rng.choice((7, 16, 2048))) as llm:
        for way in WAYS[:2]:
            check(states, prompts, way, llm.embed(prompts, way))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("options", [{}, {"cuda_graphs": False}, {"compile": False}])
def test_embeddings_on_a_gpu_are_those_of_transformers(folder, rng, options):
    prompts, states = random_prompts(rng, 40), exact_states(folder)
    generated = [[rng.randrange(VOCAB)] for _ in range(4)]
    sampling = [SamplingParams(1.0, max_tokens=60, seed=rng.randrange(99), ignore_eos=True) for _ in generated]
    with LLM(folder, **SIZES, device="cuda", dtype="float32", backend="triton", **options) as llm:
        done = embed_beside(llm, rng, prompts, WAYS, (generated, sampling))
        until_idle(llm)
        assert pages_add_up(llm)
        for way in WAYS:
            check(states, prompts, way, done[way])


def test_embed_takes_prefixes_from_the_cache_for_the_last_token_alone(folder, rng):
    prompt = [rng.randrange(VOCAB) for _ in range(30)]
    states = exact_states(folder)
    with LLM(folder, page_size=4) as llm:
        for way, cached in ((WAYS[1], 0), (WAYS[0], 28), (WAYS[1], 0)):
            (done,) = llm.embed(prompt, way)
            assert done.num_cached_tokens == cached
            check(states, [prompt], way, [done])
        (completion,) = llm.generate([prompt], SamplingParams(max_tokens=2))
        assert completion.num_cached_tokens == 28


@pytest.mark.parametrize("way", WAYS[:2])
def test_batch_invariant_embeddings_have_the_same_bits_alone(folder, rng, way):
    prompts = random_prompts(rng, 12)
    with LLM(folder, page_size=4, batch_invariant=True) as llm:
        together = llm.embed(prompts, way)
        for prompt, done in zip(prompts, together, strict=True):
            llm._engine.scheduler.tree.clear()
            assert np.array_equal(llm.embed(prompt, way)[0].values, done.values)


def test_embed_with_more_prompts_than_running_requests_fills_each_step(folder, rng):
    """With results that are read one step later, requests whose results are on their way make room for others."""
    prompts = [[rng.randrange(VOCAB) for _ in range(6)] for _ in range(16)]
    with LLM(folder, page_size=4, max_num_seqs=4, max_batched_tokens=40) as llm:
        llm._engine.depth = 1
        llm.embed(prompts, WAYS[0])
        assert llm.stats.steps == 4


def test_embed_of_the_whole_context_works_and_longer_prompts_are_refused(folder):
    with LLM(folder, page_size=4) as llm:
        prompt = [3] * llm.max_len
        check(exact_states(folder), [prompt], WAYS[0], llm.embed([prompt], WAYS[0]))
        with pytest.raises(ValueError, match=r"^prompt 1 has 257 tokens: the model's context of 256"):
            llm.embed([[3], [*prompt, 3]])
        with pytest.raises(ValueError, match=r"^prompt 0 is empty"):
            llm.embed([[]])


def test_embed_of_text_has_the_tokenizers_special_tokens():
    with LLM(num_pages=64) as llm:
        a, b = llm.embed(["import os", llm.encode("import os")])
        assert a.prompt_token_ids == b.prompt_token_ids
        assert np.array_equal(a.values, b.values)
        assert np.linalg.norm(a.values) == pytest.approx(1)
        assert len(llm.embed("import os")) == 1


def test_embedding_requests_that_are_cancelled_end_once(folder, rng):
    ends, ended = [], threading.Event()

    def sink(update):
        ends.append(update.request)
        if len(ends) == 40:
            ended.set()

    with LLM(folder, page_size=4, max_num_seqs=2, max_batched_tokens=8) as llm:
        prompts = [[rng.randrange(VOCAB)] * 60 for _ in range(40)]
        requests = llm.embedding_requests(prompts, EmbeddingParams("last", True, 32), sink)
        llm.submit(requests)
        llm.cancel(requests)
        assert ended.wait(20)
        until_idle(llm)
        assert pages_add_up(llm)
    assert set(ends) == set(requests)
    found = {(embedding.finish_reason, len(embedding.values)) for embedding in (r.result() for r in requests)}
    assert ("cancelled", 0) in found <= {("stop", 32), ("cancelled", 0)}


@pytest.mark.parametrize("depth", [0, 1])
def test_embed_whose_step_raises_ends_with_the_error_alone(folder, rng, depth, monkeypatch):
    prompts = [[rng.randrange(1, VOCAB) for _ in range(9)] for _ in range(5)]
    prompts[2][4] = 0
    with LLM(folder, page_size=4) as llm:
        llm._engine.depth = depth
        runner = llm._engine.runner

        def failing(batch, *given):
            if any(0 in chunk.request.tokens for chunk in batch):
                raise RuntimeError("broken")
            return Runner.run(runner, batch, *given)

        monkeypatch.setattr(runner, "run", failing)
        for way in WAYS[:2]:
            done = llm.embed(prompts, way)
            assert [d.finish_reason for d in done] == ["stop", "stop", "error", "stop", "stop"]
            assert done[2].error == "RuntimeError: broken"
            others = [i for i in range(5) if i != 2]
            check(exact_states(folder), [prompts[i] for i in others], way, [done[i] for i in others])


def test_embed_with_states_that_are_not_finite_ends_with_an_error(folder):
    with LLM(folder, page_size=4) as llm:
        norm = llm.model.network.model.norm
        norm.register_forward_hook(lambda module, args, output: output * torch.nan)
        (done,) = llm.embed([[5, 6]])
    assert (done.finish_reason, done.error) == ("error", "the model's hidden states are not finite")


def test_embed_of_a_runner_or_network_without_hidden_states_is_refused(folder):
    class Own(Runner):
        supports_all_logits = False

    with LLM(folder, num_pages=20, runner=Own) as llm, pytest.raises(ValueError, match="Own drops the hidden states"):
        llm.embed([[5]])
    with LLM(folder, num_pages=20) as llm:
        without = PromptReader(replace(llm.info, embedding_size=None), None)
        with pytest.raises(ValueError, match="does not return the hidden states of its tokens"):
            without.embedding_params(EmbeddingParams())


@pytest.mark.parametrize(
    ("name", "value"),
    [("pooling", "cls"), ("pooling", None), ("normalize", 1), ("dimensions", 0), ("dimensions", True)],
)
def test_params_with_invalid_values_name_them(name, value):
    with pytest.raises(ValueError, match=rf"^{name} = {value!r}"):
        EmbeddingParams(**{name: value})


def test_embed_with_invalid_params_names_them(folder):
    with LLM(folder, num_pages=20) as llm:
        with pytest.raises(ValueError, match=r"^dimensions = 33: the model's embeddings have 32 dimensions"):
            llm.embed([[5]], EmbeddingParams(dimensions=33))
        with pytest.raises(ValueError, match="they must be EmbeddingParams"):
            llm.embed([[5]], SamplingParams())


def write_modules(folder, kinds, pooling):
    """The files of sentence-transformers for these modules."""
    paths = ["", *(f"{i}_{kind.rpartition('.')[2]}" for i, kind in enumerate(kinds[1:], 1))]
    modules = [
        {"idx": i, "name": str(i), "path": p, "type": k} for i, (p, k) in enumerate(zip(paths, kinds, strict=True))
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    if pooling is not None:
        (folder / "1_Pooling").mkdir(exist_ok=True)
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


OLD = "sentence_transformers.models."
NEW = "sentence_transformers.sentence_transformer.modules.pooling."


@pytest.mark.parametrize(
    ("kinds", "pooling", "found"),
    [
        (
            [f"{OLD}Transformer", f"{OLD}Pooling", f"{OLD}Normalize"],
            {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True},
            EmbeddingParams("last", normalize=True),
        ),
        (
            [f"{OLD}Transformer", f"{OLD}Pooling"],
            {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True, "include_prompt": True},
            EmbeddingParams("mean", normalize=False),
        ),
        ([f"{NEW}Transformer", f"{NEW}Pooling"], {"pooling_mode": "mean"}, EmbeddingParams("mean", normalize=False)),
    ],
)
def test_read_pooling_takes_the_files_of_sentence_transformers(kinds, pooling, found, tmp_path):
    write_modules(tmp_path, kinds, pooling)
    assert read_pooling(tmp_path) == found


def test_read_pooling_without_files_is_the_normalized_last_state(tmp_path):
    assert read_pooling(tmp_path) == EmbeddingParams("last", normalize=True)


@pytest.mark.parametrize(
    ("kinds", "pooling", "message"),
    [
        (["x.Transformer", "x.Pooling", "x.Dense"], {}, "has the modules Transformer, Pooling, Dense: only"),
        (["x.Transformer"], {}, "has the modules Transformer: only"),
        (["x.Transformer", "x.Pooling"], {"pooling_mode_cls_token": True}, "has the pooling cls_token: it must be"),
        (["x.Transformer", "x.Pooling"], {"pooling_mode_lasttoken": False}, "has the pooling none"),
        (["x.Transformer", "x.Pooling"], {"pooling_mode": ["mean", "lasttoken"]}, "the pooling mean and lasttoken"),
    ],
)
def test_read_pooling_of_other_modules_is_refused(kinds, pooling, message, tmp_path):
    write_modules(tmp_path, kinds, pooling)
    with pytest.raises(ValueError, match=message):
        read_pooling(tmp_path)


def test_read_pooling_of_broken_files_names_them(tmp_path):
    write_modules(tmp_path, ["x.Transformer", "x.Pooling"], None)
    with pytest.raises(ValueError, match=r"1_Pooling.config\.json, which modules\.json names, is missing"):
        read_pooling(tmp_path)
    for content in ("{", "{}", "[1]", '[{"path": ""}]'):
        (tmp_path / "modules.json").write_text(content)
        with pytest.raises(ValueError, match=r"modules\.json (could not be loaded|has the modules)"):
            read_pooling(tmp_path)


def test_embed_without_params_does_what_the_checkpoint_says(tmp_path, rng):
    folder = save("qwen3", tmp_path)
    prompts, states = random_prompts(rng, 3), exact_states(folder)
    write_modules(folder, [f"{OLD}Transformer", f"{OLD}Pooling"], {"pooling_mode_mean_tokens": True})
    with LLM(folder, page_size=4) as llm:
        check(states, prompts, EmbeddingParams("mean", normalize=False), llm.embed(prompts))
        check(
            states,
            prompts,
            EmbeddingParams("mean", normalize=True),
            llm.embed(prompts, EmbeddingParams(normalize=True)),
        )
        check(states, prompts, WAYS[0], llm.embed(prompts, WAYS[0]))
    with LLM(folder, page_size=4, pooling="last") as llm:
        check(states, prompts, WAYS[0], llm.embed(prompts))
