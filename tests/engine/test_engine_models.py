"""Greedy tokens are those of Transformers' own `generate`: whatever the model, the batch, the chunks and the pages."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM

from helpers.checkpoints import CONFIGS, FURTHER_CONFIGS, save
from quire.engine import LLM, SamplingParams, shipped_model

TIE = 1e-4  # between logits closer than this, float32 sums in another order may choose differently


class Reference:
    """A checkpoint in Transformers' hands."""

    def __init__(self, folder):
        self.folder = folder
        self.network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        self.known = {}

    def generate(self, prompt, count):
        if (*prompt, count) not in self.known:
            ids = torch.tensor([prompt])
            out = self.network.generate(ids, max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0)
            self.known[(*prompt, count)] = out[0, len(prompt) :].tolist()
        return self.known[(*prompt, count)]

    def same(self, prompt, ours, theirs):
        """Equal, or different from where two tokens were as likely, or are in some of 64 forwards whose embeddings have
        random errors of rounding, since rounding may route a token to another expert.
        """
        if ours == theirs:
            return True
        at = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
        ids = torch.tensor([prompt + theirs[:at]])
        with torch.inference_mode():
            embeddings = self.network.get_input_embeddings()(ids)
            for error in [0] + [1e-6] * 64:
                noise = error * torch.randn_like(embeddings)
                logits = self.network(inputs_embeds=embeddings * (1 + noise)).logits[0, -1]
                if float(logits[theirs[at]] - logits[ours[at]]) < TIE:
                    return True
        return False


@pytest.fixture(scope="module", params=[*CONFIGS, "shipped"])
def reference(request, tmp_path_factory):
    torch.manual_seed(sum(request.param.encode()))
    if request.param == "shipped":
        return Reference(shipped_model())
    return Reference(save(request.param, tmp_path_factory.mktemp(request.param)))


def batch(rng, vocab_size):
    """16 prompts, short and long, some of which begin alike."""
    start = [rng.randrange(1, vocab_size) for _ in range(24)]
    prompts = [[rng.randrange(1, vocab_size) for _ in range(rng.choice((1, 2, 7, 30, 61)))] for _ in range(10)]
    prompts += [[*start[: rng.randint(8, 24)], rng.randrange(1, vocab_size)] for _ in range(4)]
    prompts += [start, list(start)]
    rng.shuffle(prompts)
    return prompts, [rng.randint(3, 24) for _ in prompts]


ENGINES = {
    "pages of 1": {"page_size": 1},
    "pages of 4": {"page_size": 4},
    "pages of 16": {"page_size": 16},
    "chunks of 5": {"page_size": 4, "max_batched_tokens": 5},
    "chunks of 32": {"page_size": 16, "max_batched_tokens": 32},
    "three at once": {"page_size": 4, "max_num_seqs": 3},
    "oracle": {"page_size": 4, "backend": "reference"},
}
QUICK, SLOW = ("chunks of 5", "three at once"), pytest.mark.slow


def check(reference, prompts, counts, **engine):
    """Run the batch, compare every request, and return the engine's counts."""
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in counts]
    with LLM(reference.folder, **engine) as llm:
        done = llm.generate(prompts, params)
        stats = llm.stats
    for prompt, count, completion in zip(prompts, counts, done, strict=True):
        assert completion.finish_reason == "length", completion
        assert len(completion.token_ids) == count
        assert reference.same(prompt, completion.token_ids, reference.generate(prompt, count)), (prompt, completion)
    return stats


@pytest.mark.parametrize("engine", [name if name in QUICK else pytest.param(name, marks=SLOW) for name in ENGINES])
def test_llm_of_each_model_has_the_greedy_tokens_of_transformers(reference, engine, rng):
    prompts, counts = batch(rng, reference.network.config.vocab_size)
    stats = check(reference, prompts, counts, **ENGINES[engine])
    assert stats.generated_tokens == sum(counts)
    assert stats.preemptions == 0


@pytest.mark.gpu
@pytest.mark.parametrize("cuda_graphs", [False, True])
@pytest.mark.parametrize("name", [*CONFIGS, *FURTHER_CONFIGS])
def test_llm_of_each_model_on_a_gpu_has_the_greedy_tokens_of_transformers(name, cuda_graphs, rng, tmp_path):
    torch.manual_seed(sum(name.encode()))
    reference = Reference(save(name, tmp_path))
    prompts, counts = batch(rng, reference.network.config.vocab_size)
    sizes = {"device": "cuda", "dtype": "float32", "num_pages": 160, "page_size": 8, "max_batched_tokens": 64}
    check(reference, prompts, counts, cuda_graphs=cuda_graphs, max_num_seqs=8, **sizes)


@pytest.mark.parametrize(
    "page_size", [pytest.param(1, marks=pytest.mark.slow), 4, pytest.param(16, marks=pytest.mark.slow)]
)
def test_llm_with_too_few_pages_preempts_and_has_equal_tokens(reference, page_size, rng):
    prompts, counts = batch(rng, reference.network.config.vocab_size)
    counts = [n + 24 for n in counts]  # all grow over the end of a page or two
    longest = max(len(p) + n for p, n in zip(prompts, counts, strict=True))
    stats = check(reference, prompts, counts, page_size=page_size, num_pages=-(-longest // page_size) + 1)
    assert stats.preemptions > 0


def test_llm_with_repeated_prompts_finds_them_in_the_cache(reference, rng):
    prompts, counts = batch(rng, reference.network.config.vocab_size)
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in counts]
    with LLM(reference.folder, page_size=4) as llm:
        first = llm.generate(prompts, params)
        again = llm.generate(prompts[::-1], params[::-1])[::-1]
    for prompt, a, b in zip(prompts, first, again, strict=True):
        assert b.num_cached_tokens == (len(prompt) - 1) // 4 * 4
        assert reference.same(prompt, b.token_ids, a.token_ids)
