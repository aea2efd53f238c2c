"""lm-eval's models of servers: log-likelihoods of given texts, and texts that it generates."""

from __future__ import annotations

import pytest

pytest.importorskip("lm_eval", reason="needs quire-attention[clients]")

from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI

from quire.engine import SamplingParams
from quire.engine.chat import render_chat

PAIRS = [("import os", "\nimport sys"), ("def add(a, b):", " return a"), ("x = 1", "\n"), ("import os", "\n\n\ndef f")]
PROMPTS = ["import os\n", "def add(a, b):\n", "class Stack:\n"]


def instances(kind, arguments):
    return [Instance(kind, {}, args, i) for i, args in enumerate(arguments)]


@pytest.fixture(scope="module", params=[1, 4])
def completions(server, request):
    folder = str(server.llm.model.folder)
    return LocalCompletionsAPI(
        base_url=f"{server.base_url}/completions",
        model=server.name,
        tokenizer=folder,
        tokenizer_backend="huggingface",
        batch_size=request.param,
        num_concurrent=request.param,
        max_retries=1,
    )


def test_loglikelihood_is_that_of_the_engine(server, completions):
    found = completions.loglikelihood(instances("loglikelihood", PAIRS), disable_tqdm=True)
    for (context, continuation), (value, is_greedy) in zip(PAIRS, found, strict=True):
        start, whole = len(server.llm.encode(context)), server.llm.encode(context + continuation)
        (done,) = server.llm.generate([whole], SamplingParams(max_tokens=0, prompt_logprobs=1))
        reports, ranks = done.prompt_logprobs[start:], done.prompt_ranks[start:]
        expected = [report[token] for report, token in zip(reports, whole[start:], strict=True)]
        assert value == pytest.approx(sum(expected), abs=1e-3)
        assert is_greedy == all(rank == 1 for rank in ranks)


def test_loglikelihood_rolling_is_that_of_whole_texts(server, completions):
    text = "import os\nimport sys\n"
    (found,) = completions.loglikelihood_rolling(instances("loglikelihood_rolling", [(text,)]), disable_tqdm=True)
    tokens = [server.llm.model.tokenizer.eos_token_id, *server.llm.encode(text)]
    (done,) = server.llm.generate([tokens], SamplingParams(max_tokens=0, prompt_logprobs=0))
    assert found == pytest.approx(sum(next(iter(r.values())) for r in done.prompt_logprobs[1:]), abs=1e-3)


def test_generate_until_ends_at_the_stop_string(server, completions):
    found = completions.generate_until(
        instances("generate_until", [(p, {"until": ["e"], "max_gen_toks": 20}) for p in PROMPTS]), disable_tqdm=True
    )
    done = server.llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=20, stop=["e"]))
    assert found == [each.text for each in done]


def test_generate_until_of_chats_has_the_answers(server):
    chats = LocalChatCompletion(
        base_url=f"{server.base_url}/chat/completions", model=server.name, num_concurrent=4, max_retries=1
    )
    messages = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    asked = [(chats.apply_chat_template(each), {"until": ["e"], "max_gen_toks": 20}) for each in messages]
    found = chats.generate_until(instances("generate_until", asked), disable_tqdm=True)
    tokenizer = server.llm.model.tokenizer
    prompts = [render_chat(tokenizer, each, add_generation_prompt=True) for each in messages]
    done = server.llm.generate(prompts, SamplingParams(temperature=0, max_tokens=20, stop=["e"]))
    assert found == [each.text for each in done]
