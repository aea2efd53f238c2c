"""Biases and forbidden tokens: logits and tokens are those of a reference that looks at one request at a time."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

import transformers

from helpers.checkpoints import save_with_tokenizer
from helpers.engines import add_output, captured_on_the_host, pages_add_up, read, sample, until_idle
from quire.engine import LLM, SamplingParams
from quire.engine.completion import NO_TOKEN
from quire.engine.logits_processors import LogitsProcessors, TokenRules
from quire.engine.params import LIBRARY_DEFAULTS
from quire.engine.prompts import word_tokens
from quire.engine.request import Request
from quire.engine.sampler import Sampler

VOCAB = 60
SIZES = {"page_size": 4, "num_pages": 20, "max_num_seqs": 12, "max_batched_tokens": 24}


def processed(logits, params, ends, words, prompt, output):
    """The logits of a request's next token, float64 [vocab], as the documentation of SamplingParams says."""
    x = np.array(logits.tolist())
    for token, bias in (params.logit_bias or {}).items():
        x[token] += bias
    if params.allowed_token_ids is not None:
        x[[token for token in range(len(x)) if token not in params.allowed_token_ids]] = -np.inf
    for *before, last in words:
        if len(before) <= len(output) and output[len(output) - len(before) :] == before:
            x[last] = -np.inf
    if len(output) < params.min_tokens:
        x[[token for token in ends if token < len(x)]] = -np.inf
    factor = params.repetition_penalty or 1
    for token in {*prompt, *output}:
        x[token] = x[token] / factor if x[token] > 0 else x[token] * factor
    for token in set(output):
        x[token] -= params.presence_penalty + params.frequency_penalty * output.count(token)
    return x


def random_rules(rng, vocab, favourites=()):
    """Options of SamplingParams, and the token sequences of bad words, for tokens of which some occur often."""
    tokens = [*favourites, *rng.sample(range(vocab), 12)]
    options = {}
    if rng.random() < 0.5:
        options["logit_bias"] = {rng.choice(tokens): rng.uniform(-100, 100) for _ in range(rng.randint(1, 6))}
    if rng.random() < 0.4:
        options["allowed_token_ids"] = rng.sample(range(vocab), rng.randint(vocab // 2, vocab - 1))
    if rng.random() < 0.5:
        options["min_tokens"] = rng.randint(1, 6)
    words = [rng.choices(tokens, k=rng.randint(1, 4)) for _ in range(rng.choice((0, 0, 3, 12)))]
    return options, words


def test_processed_logits_of_random_rules_equal_the_reference(rng):
    """Rows with rules of all kinds, and without any, by their outputs of 0 to 12 tokens of few kinds."""
    for _ in range(60):
        rows, kinds = rng.randint(1, 9), rng.sample(range(VOCAB), 4)
        requests, expected = [], []
        logits = torch.randn(rows, VOCAB) * 4
        for row in logits:
            options, words = random_rules(rng, VOCAB, kinds * 4) if rng.random() < 0.8 else ({}, [])
            options["stop_token_ids"] = rng.sample(range(2 * VOCAB), 3)
            ends = frozenset(rng.sample(range(VOCAB), 2))
            output = rng.choices(kinds, k=rng.randint(0, 12))
            params = SamplingParams(max_tokens=20, temperature=1.0, **options).over(LIBRARY_DEFAULTS)
            prompt = rng.choices(kinds, k=rng.randint(1, 5))
            made = Request(prompt, params, None, ends, print, bad_words=words)
            add_output(made, output)
            requests.append(made)
            expected.append(processed(row, params, ends | {*params.stop_token_ids}, words, prompt, output))
        tokens = torch.full((rows, 20), -5)
        slots = rng.sample(range(rows), rows)
        for slot, r in zip(slots, requests, strict=True):
            tokens[slot, : len(r.tokens)] = torch.tensor(r.tokens)
        lens = torch.tensor([len(r.tokens) for r in requests])
        index = lens - torch.tensor([r.prompt_len for r in requests])
        given = [r.rules for r in requests]
        out = LogitsProcessors(given, slots, VOCAB, torch.device("cpu")).apply(logits, index, lens, tokens)
        assert out.dtype == torch.float32
        np.testing.assert_allclose(out.numpy(), np.array(expected), rtol=0, atol=2e-5)


def test_processed_logits_that_are_not_finite_stay_so(rng):
    logits = torch.randn(4, VOCAB)
    logits[0, 3], logits[1, 3], logits[2, 3] = torch.nan, torch.inf, -torch.inf
    rules = TokenRules.of(SamplingParams(logit_bias={3: 1.0}, min_tokens=2), frozenset([3]))
    assert rules is not None
    processors = LogitsProcessors([rules] * 4, [-1] * 4, VOCAB, torch.device("cpu"))
    zero = torch.zeros(4, dtype=torch.int64)
    out = processors.apply(logits, zero, zero + 1, torch.zeros(1, 1, dtype=torch.int32))
    assert [bool(x.isnan()) for x in out[:, 3]] == [True, True, False, False]
    assert torch.equal(out[:, :3], logits[:, :3])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(17)
    return save_with_tokenizer("llama", tmp_path_factory.mktemp("llama"))


def words_of(tokenizer, tokens, rng):
    """Texts of one to three neighbouring tokens."""
    texts = []
    for _ in range(6):
        begin = rng.randrange(len(tokens))
        texts.append(tokenizer.decode(tokens[begin : begin + rng.randint(1, 3)]))
    return [text for text in texts if text.strip(" ") and "\ufffd" not in text]


def random_requests(rng, llm, count):
    """Greedy requests with rules that their outputs without rules would break, each beside one without rules. The first
    two decode until they have no room in the cache together.
    """
    vocab, tokenizer = llm.model.vocab_size, llm.model.tokenizer
    prompts = [[rng.randrange(300) for _ in range(rng.randint(1, 20))] for _ in range(count)]
    prompts[:2] = [[rng.randrange(300) for _ in range(13)] for _ in range(2)]
    free = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    params = []
    for i, done in enumerate(llm.generate(prompts, free)):
        seen = done.token_ids
        options, _ = random_rules(rng, vocab, seen[:6])
        options |= {"bad_words": words_of(tokenizer, seen, rng)} if rng.random() < 0.6 else {}
        options |= {"stop_token_ids": rng.sample(seen, 2)} if rng.random() < 0.5 else {}
        options |= {"frequency_penalty": 0.7, "repetition_penalty": 1.2} if rng.random() < 0.3 else {}
        options |= {"logprobs": 2} if rng.random() < 0.2 else {}
        params.append(SamplingParams(temperature=0, max_tokens=rng.randint(8, 20), **options))
        if i < 2:
            params[i] = replace(params[i], max_tokens=40, min_tokens=40, allowed_token_ids=None)
    return prompts, params


def check(llm, model, prompts, params, done):
    """Compare all greedy tokens with those of Transformers' logits in float64."""
    for prompt, p, completion in zip(prompts, params, done, strict=True):
        assert completion.error is None
        words = [list(word) for word in word_tokens(llm.model.tokenizer, p.bad_words)]
        ends = frozenset(llm.model.end_ids) | {*p.stop_token_ids}
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *completion.token_ids]])).logits[0, len(prompt) - 1 :]
        for i, token in enumerate(completion.token_ids):
            row = processed(logits[i], p, ends, words, prompt, completion.token_ids[:i])
            assert row[token] >= row.max() - 1e-4, (i, token, p)
            assert (token in ends) == (completion.finish_reason == "stop" and i == len(completion.token_ids) - 1)


def exact_model(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)


@pytest.mark.parametrize("how", ["at once", "late", "inputs of graphs", "drafts"])
def test_llm_with_rules_has_the_tokens_of_the_reference(folder, rng, how):
    """With results that are read at once, one step late, from graphs, and with drafts; requests are preempted."""
    with LLM(folder, **SIZES, speculative_tokens=3 * (how == "drafts")) as llm:
        prompts, params = random_requests(rng, llm, 24)
        if how != "drafts":
            llm._engine.depth = int(how != "at once")
        if how == "inputs of graphs":
            captured_on_the_host(llm, max_tokens=48)
        before = llm.stats.preemptions
        done = llm.generate(prompts, params)
        until_idle(llm)
        assert llm.stats.preemptions > before
        assert pages_add_up(llm)
        check(llm, exact_model(folder), prompts, params, done)
        if how == "drafts":
            assert llm.stats.accepted_tokens > 0
        if how == "inputs of graphs":
            assert llm._engine.runner.step_graphs.replays > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("graphs", [True, False])
def test_llm_with_rules_on_a_gpu_has_the_tokens_of_the_reference(folder, rng, graphs, drafts):
    options = {"device": "cuda", "dtype": "float32", "backend": "triton", "cuda_graphs": graphs}
    with LLM(folder, **SIZES, **options, speculative_tokens=drafts) as llm:
        prompts, params = random_requests(rng, llm, 40)
        done = llm.generate(prompts, params)
        until_idle(llm)
        assert llm.stats.preemptions > 0
        check(llm, exact_model(folder), prompts, params, done)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_sampler_with_rules_does_not_wait_for_a_gpu(rng):
    device = torch.device("cuda")
    options = {"logit_bias": {3: 1.0}, "allowed_token_ids": range(1, 50), "min_tokens": 9, "max_tokens": 20}
    params = SamplingParams(temperature=0, **options).over(LIBRARY_DEFAULTS)
    requests = [Request([1, 2], params, None, frozenset([0]), print, bad_words=[[5], [6, 7, 8]]) for _ in range(4)]
    sampler, logits = Sampler(device, 4), torch.randn(4, VOCAB, device=device)
    read(sampler.launch(logits, requests))  # which compiles kernels
    for request in requests:
        request.num_total_tokens += 1
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = sampler.launch(logits[:3], requests[:3])  # a new batch
        for request in requests[:3]:
            request.tokens.append(5)
        repeated = sampler.launch(logits[:3], requests[:3])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(choice.token is not None for choice in (*read(again), *read(repeated)))


def test_sampler_with_rules_among_free_rows_obeys_them(rng):
    logits = torch.randn(VOCAB)
    common = {"temperature": 5.0, "max_tokens": 9}

    def drawn(count=400, words=(), output=(), **options):
        params = SamplingParams(**common, **options).over(LIBRARY_DEFAULTS)
        ruled = [Request([1], params, None, frozenset([0]), print, bad_words=words) for _ in range(count)]
        free = [Request([1], SamplingParams(**common).over(LIBRARY_DEFAULTS), None, frozenset(), print)] * 5
        for request in ruled:
            add_output(request, output)
        return {c.token for c in sample(logits.expand(count + 5, -1), [*ruled, *free])[:count]}

    assert drawn(allowed_token_ids=[3, 7, 7, 50]) == {3, 7, 50}
    assert drawn(logit_bias={9: 100}) == {9}
    assert 0 not in drawn(min_tokens=1, logit_bias={0: 20.0})
    assert drawn(min_tokens=1, logit_bias={0: 100.0}, output=[5]) == {0}
    assert drawn(words=[[3], [4]], allowed_token_ids=[3, 4, 5]) == {5}
    assert drawn(words=[[8, 3]], allowed_token_ids=[3, 5], output=[8]) == {5}
    assert drawn(words=[[8, 3]], allowed_token_ids=[3, 5], output=[8, 5]) == {3, 5}
    assert drawn(words=[[1, 3]], allowed_token_ids=[3, 5]) == {3, 5}  # the prompt is no part of the output


def test_request_with_rules_on_last_tokens_has_no_drafts():
    def made(words=(), **options):
        params = SamplingParams(temperature=0, max_tokens=9, **options).over(LIBRARY_DEFAULTS)
        return Request([1], params, None, frozenset([0]), print, bad_words=words)

    rules = [{"logit_bias": {1: 1.0}}, {"allowed_token_ids": [1]}, {"min_tokens": 2}, {"words": [[5]]}]
    assert all(made(**options).lookup is not None and not made(**options).plain for options in rules)
    assert made(words=[[5, 6]]).lookup is None
    assert made().plain
    assert made(logit_bias={}).plain


def test_word_tokens_have_words_with_and_without_a_space(folder):
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    def ids(text):
        return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])

    assert word_tokens(tokenizer, ["token", " token"]) == [ids("token"), ids(" token")]
    assert word_tokens(tokenizer, ["\n\n"])[0] == ids("\n\n")
    for prompt in ("the ", "a", "def f(self):\n    "):
        with LLM(folder) as llm:
            seen = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))[0]
            word = next(w for w in re.findall(r"[a-zA-Z]{2,}", seen.text))
            tokens = word_tokens(tokenizer, [word])
            params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, bad_words=[word])
            output = llm.generate(prompt, params)[0].token_ids
        assert not any(tuple(output[i : i + len(w)]) == w for w in tokens for i in range(len(output)))


def test_llm_with_rules_and_a_regex_obeys_both():
    pytest.importorskip("llguidance")
    with LLM(page_size=4, num_pages=200) as llm:
        ids = {text: llm.encode(text)[0] for text in "abc"}
        regex = "[abc]{1,9}"
        base = {"temperature": 1.0, "max_tokens": 30, "regex": regex}
        params = [
            SamplingParams(**base, seed=i, min_tokens=5, bad_words=["b"], logit_bias={ids["c"]: 5.0}) for i in range(8)
        ]
        params += [SamplingParams(**base, seed=i, allowed_token_ids=[ids["a"], ids["b"], 0]) for i in range(8)]
        done = llm.generate(["x = "] * 16, params)
    for completion in done[:8]:
        assert len(completion.token_ids) >= 5 or len(completion.text) == 9
        assert re.fullmatch("[abc]{5,9}|[abc]{9}", completion.text) or len(completion.text) >= 5
        assert "b" not in completion.text
        assert re.fullmatch(regex, completion.text)
    assert all(re.fullmatch("[ab]{1,9}", completion.text) for completion in done[8:])


def test_request_whose_tokens_are_all_forbidden_ends_alone():
    with LLM(page_size=4, num_pages=200) as llm:
        a, b = (llm.encode(text)[0] for text in "ab")
        pytest.importorskip("llguidance")
        pairs = [x + y for x in "ABCKQXYZ" for y in "ABCKQXYZ" if len(llm.encode(x + y)) == 2]
        pair, double = pairs[0], next(text for text in pairs if text[0] == text[1])
        twice = llm.encode(double)
        contradictions = [
            SamplingParams(regex="a", allowed_token_ids=[b]),
            # After a first token, only the one may follow that bad_words forbid there.
            SamplingParams(regex=pair, bad_words=[pair]),
            SamplingParams(allowed_token_ids=twice[:1], bad_words=[double]),
        ]
        *ended, whole = llm.generate(["x"] * 3 + ["y"], [*contradictions, SamplingParams(max_tokens=3)])
        assert [(done.finish_reason, done.error) for done in ended] == [("error", NO_TOKEN)] * 3
        assert [done.token_ids for done in ended] == [[], llm.encode(pair)[:1], twice[:1]]
        assert whole.finish_reason == "length"
        with pytest.raises(ValueError, match="allowed_token_ids has only tokens that bad_words or min_tokens forbid"):
            llm.generate("x", SamplingParams(allowed_token_ids=[a], bad_words=["a"]))
        with pytest.raises(ValueError, match="allowed_token_ids has token 4096: tokens are 0 to 4095"):
            llm.generate("x", SamplingParams(allowed_token_ids=[a, 4096]))
        with pytest.raises(ValueError, match="logit_bias has token 5000: tokens are 0 to 4095"):
            llm.generate("x", SamplingParams(logit_bias={5000: 1}))
