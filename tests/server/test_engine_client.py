"""The connection of a server to its engine: order, texts, one message for each step, and clients that do not read."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter

import pytest

pytest.importorskip("transformers")
pytest.importorskip("fastapi")
pytest.importorskip("msgspec")

from helpers.engines import pages_add_up, until_idle
from quire.engine import LLM, SamplingParams
from quire.engine import messages as m
from quire.engine.host import EngineHost
from quire.engine.prompts import TokenRequest
from quire.engine.text import TextStream
from quire.server.engine_client import attached


@pytest.fixture(scope="module")
def llm():
    with LLM(num_pages=400, page_size=8, max_batched_tokens=64, batch_invariant=True) as llm:
        yield llm


REGEX = "[a-z ]{1,9}"


async def completed(engine, prompts, params):
    """The parts of each completion, and the number of those that came at once."""
    parts, left = [[] for _ in prompts], len(prompts)
    ended = asyncio.Event()

    def sink(index, part):
        nonlocal left
        parts[index].append(part)
        left -= part.finish_reason is not None
        if not left:
            ended.set()

    engine.start(prompts, params, sink)
    await asyncio.wait_for(ended.wait(), 60)
    return parts


def random_params(rng, texts):
    """Parameters of any kind whose completions are the same each time; stop strings occur in the texts."""
    text = rng.choice(texts)
    start = rng.randrange(max(1, len(text) - 4))
    stops = [text[start : start + rng.randint(1, 4)] or "x", "\n\n\n", "never"]
    return SamplingParams(
        temperature=rng.choice([0.0, 0.8]),
        seed=rng.randrange(1 << 64),
        max_tokens=rng.choice([0, 1, 7, 40]),
        stop=rng.sample(stops, rng.randrange(3)),
        stop_token_ids=rng.sample(range(300, 4000), 40) if rng.random() < 0.3 else (),
        include_stop_str_in_output=rng.random() < 0.5,
        skip_special_tokens=rng.random() < 0.5,
        ignore_eos=rng.random() < 0.5,
        logprobs=rng.choice([None, None, 0, 3]),
        prompt_logprobs=rng.choice([None, None, 2]),
        bad_words=["import"] if rng.random() < 0.2 else (),
        logit_bias={rng.randrange(4000): 5.0} if rng.random() < 0.2 else None,
        regex=REGEX if rng.random() < 0.2 else None,
    )


def test_start_completions_equal_those_of_the_engine_alone(llm, rng):
    pytest.importorskip("llguidance")
    prompts = [llm.encode(rng.choice(["import os\n", "def f(x):\n", "# größe → \n", "x"])) for _ in range(60)]
    texts = [done.text or "x" for done in llm.generate(prompts, SamplingParams(max_tokens=40))]
    params = [random_params(rng, texts) for _ in prompts]
    # Random ones may all end in one way.
    params[:2] = [SamplingParams(max_tokens=40, regex=REGEX), SamplingParams(max_tokens=1, ignore_eos=True)]
    # Requests of one call have one grammar.
    free = [i for i, p in enumerate(params) if p.regex is None]
    bound = [i for i, p in enumerate(params) if p.regex is not None]
    expected = llm.generate(prompts, params)

    async def run():
        engine = attached(llm)
        done = {}
        for group in (free, bound):
            parts = await completed(engine, [prompts[i] for i in group], [params[i] for i in group]) if group else []
            done |= zip(group, parts, strict=True)
        engine.leave()
        return [done[i] for i in range(len(prompts))]

    for parts, whole, p in zip(asyncio.run(run()), expected, params, strict=True):
        last = parts[-1]
        tokens = [token for part in parts for token in part.token_ids]
        logprobs = [report for part in parts for report in part.logprobs or ()]
        text = "".join(part.text for part in parts)
        assert (text, tokens, last.finish_reason) == (whole.text, whole.token_ids, whole.finish_reason), p
        assert (last.error, last.prompt_token_ids) == (whole.error, whole.prompt_token_ids)
        assert logprobs == (whole.logprobs or [])
        assert (last.prompt_logprobs is None) == (p.prompt_logprobs is None)
        assert last.prompt_logprobs == whole.prompt_logprobs
        assert last.prompt_ranks == whole.prompt_ranks
    assert len({whole.finish_reason for whole in expected}) > 1
    until_idle(llm)
    assert pages_add_up(llm)


def test_start_text_that_raises_ends_the_request_there_and_in_the_engine(llm, monkeypatch):
    def broken(stream, token):
        raise RuntimeError("broken")

    async def run():
        engine = attached(llm)
        monkeypatch.setattr(TextStream, "push", broken)
        (parts,) = await completed(engine, [[5, 6]], [SamplingParams(max_tokens=300)])
        monkeypatch.undo()
        (again,) = await completed(engine, [[5, 6]], [SamplingParams(max_tokens=3)])
        engine.leave()
        return parts, again

    parts, again = asyncio.run(run())
    assert (parts[-1].finish_reason, parts[-1].error) == ("error", "RuntimeError: broken")
    assert again[-1].finish_reason == "length"
    until_idle(llm)
    assert pages_add_up(llm)


def test_start_stop_string_ends_the_request_in_the_engine(llm):
    """The engine samples one or two tokens more, and not the hundreds that the request allows."""
    before = llm.stats.generated_tokens

    async def run():
        engine = attached(llm)
        params = SamplingParams(max_tokens=1000, ignore_eos=True, stop=["\n"])
        (parts,) = await completed(engine, [llm.encode("import os")], [params])
        engine.leave()
        return sum(len(part.token_ids) for part in parts)

    count = asyncio.run(run())
    until_idle(llm)
    assert count <= llm.stats.generated_tokens - before < count + 300
    assert pages_add_up(llm)


def test_messages_of_a_step_are_one_for_all_requests(llm, monkeypatch):
    sizes, send = [], EngineHost._send

    def counted(host, message):
        if isinstance(message, m.StepUpdates):
            sizes.append(len(message.updates))
        send(host, message)

    monkeypatch.setattr(EngineHost, "_send", counted)

    async def run():
        engine = attached(llm)
        await completed(engine, [[5, i] for i in range(20)], [SamplingParams(max_tokens=30, ignore_eos=True)] * 20)
        engine.leave()

    steps = llm.stats.steps
    asyncio.run(run())
    until_idle(llm)
    assert sum(sizes) == 600
    assert len(sizes) <= llm.stats.steps - steps
    assert Counter(sizes).most_common(1)[0][0] == 20


@pytest.mark.slow
def test_updates_of_a_client_that_reads_late_come_in_order_and_the_engine_waits(llm):
    """A client that sends by itself, and reads nothing until the engine waits for it."""
    own, other = m.connected_sockets()
    host = EngineHost(llm, other)
    own.setsockopt(m.socket.SOL_SOCKET, m.socket.SO_RCVBUF, 4096)
    other.setsockopt(m.socket.SOL_SOCKET, m.socket.SO_SNDBUF, 4096)
    host.start()
    params = SamplingParams(max_tokens=200, ignore_eos=True, logprobs=20).over(llm.default_params)
    own.sendall(m.frame(m.Start(7, [TokenRequest([5, i], params, []) for i in range(8)])))
    end, steps = time.monotonic() + 60, -1
    while llm.stats.steps != steps:
        assert time.monotonic() < end
        steps = llm.stats.steps
        time.sleep(1)
    assert llm.stats.running == 8
    frames, tokens, open_ones = m.Frames(), {number: [] for number in range(7, 15)}, set(range(7, 15))
    while open_ones:
        for content in frames.add(m.receive(own)):
            for update in m.to_client.decode(content).updates:
                tokens[update.number] += update.token_ids
                if update.details.finish_reason:
                    open_ones.remove(update.number)
    expected = llm.generate([[5, i] for i in range(8)], params)
    assert list(tokens.values()) == [done.token_ids for done in expected]
    own.close()
    assert host.ended.wait(10)
    until_idle(llm)


def test_leave_cancels_the_requests_of_the_client_alone(llm):
    async def run():
        left, stays = attached(llm), attached(llm)
        parts = []
        left.start([[5, 6]], [SamplingParams(max_tokens=1500, ignore_eos=True)], lambda i, part: parts.append(part))
        work = asyncio.ensure_future(completed(stays, [[5, 6]], [SamplingParams(max_tokens=60, ignore_eos=True)]))
        while not parts:
            await asyncio.sleep(0.01)
        left.leave()
        assert parts[-1].finish_reason == "cancelled"
        (done,) = await work
        stays.leave()
        return done

    assert asyncio.run(run())[-1].finish_reason == "length"
    until_idle(llm)
    assert pages_add_up(llm)


def test_state_of_an_engine_that_has_ended_is_the_last_one():
    async def run():
        with LLM(num_pages=50) as llm:
            engine, ended = attached(llm), threading.Event()
            engine.on_end = ended.set
            await completed(engine, [[5, 6]], [SamplingParams(max_tokens=3, ignore_eos=True)])
            state = await engine.state(0)
            assert (state.stats.generated_tokens, state.stats.pages) == (3, 50)
            assert [step.number for step in state.steps] == [1, 2, 3]
            parts = []
            engine.start(
                [[5, 6]], [SamplingParams(max_tokens=900, ignore_eos=True)], lambda i, part: parts.append(part)
            )
            await asyncio.to_thread(llm.close)
            while engine.alive:
                await asyncio.sleep(0.01)
            assert ended.is_set()
            assert parts[-1].finish_reason in ("cancelled", "error")
            last = await engine.state(0)
            assert (last.stats.pages, last.steps) == (50, [])
            with pytest.raises(ConnectionError):
                await engine.prepared(SamplingParams(regex="x"), compiles=True)

    asyncio.run(run())


def test_start_log_probabilities_of_a_long_prompt_come_in_parts(llm, rng, monkeypatch):
    """No message has more than a few tokens, so that decoding one takes a few milliseconds."""
    sizes, send = [], EngineHost._send

    def counted(host, message):
        if isinstance(message, m.PromptLogprobs):
            sizes.append(len(message.logprobs))
        send(host, message)

    monkeypatch.setattr(EngineHost, "_send", counted)
    prompt, params = [rng.randrange(300, 4000) for _ in range(1500)], SamplingParams(max_tokens=1, prompt_logprobs=20)
    (expected,) = llm.generate([prompt], params)

    async def run():
        engine = attached(llm)
        (parts,) = await completed(engine, [prompt], [params])
        engine.leave()
        return parts[-1]

    last = asyncio.run(run())
    assert (last.prompt_logprobs, last.prompt_ranks) == (expected.prompt_logprobs, expected.prompt_ranks)
    assert sizes == [512, 512, 476]


def test_frames_of_any_cuts_are_the_messages(rng):
    messages = [m.Cancel([rng.randrange(1 << 40) for _ in range(rng.randrange(50))]) for _ in range(100)]
    content = b"".join(map(m.frame, messages))
    frames, found = m.Frames(), []
    while content:
        cut = rng.randint(1, 300)
        found += [m.to_host.decode(each) for each in frames.add(content[:cut])]
        content = content[cut:]
    assert found == messages
