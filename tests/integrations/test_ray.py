"""The application's parts without a cluster: arguments, which prompts go together, and what an ingress does with
replicas that are full, slow or lost.
"""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

pytest.importorskip("ray.serve", reason="Ray is not installed: pip install 'quire-attention[ray]'")
pytest.importorskip("transformers")
pytest.importorskip("fastapi")

from pydantic import ValidationError
from ray.exceptions import ActorDiedError, ActorUnavailableError, TaskCancelledError
from ray.serve.exceptions import BackPressureError

from helpers.paths import ROOT
from quire.engine import SamplingParams
from quire.integrations.ray import Settings, app
from quire.integrations.ray.ingress import Ingress, affinity
from quire.integrations.ray.replica import Replica

EVENTS = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}
JSON = {**EVENTS, "headers": [(b"content-type", b"application/json")]}


def part(text, more=True):
    return {"type": "http.response.body", "body": text, "more_body": more}


class Engine:
    """A deployment's handle whose replicas do what scripts say, one call after the other.

    An element of a script is something to yield, an exception to raise, or a number of seconds to wait.
    """

    def __init__(self, *scripts):
        self.scripts, self.keys, self.cancelled = list(scripts), [], 0

    def options(self, session_id=None, **options):
        if session_id is not None:
            self.keys.append(session_id)
        return self

    def remote(self, scope, body):
        self.body = body
        return Parts(self, self.scripts.pop(0))


class Parts:
    def __init__(self, engine, script):
        self._engine, self._script = engine, iter(script)

    def __aiter__(self):
        return self

    async def __anext__(self):
        for step in self._script:
            if isinstance(step, Exception):
                raise step
            if not isinstance(step, float):
                return step
            await asyncio.sleep(step)
        raise StopAsyncIteration

    def cancel(self):
        self._engine.cancelled += 1


def ask(engine, body=b'{"prompt": "x"}', headers=None, path="/v1/completions", **settings):
    """The answer of an ingress before an engine."""

    async def run():
        ingress = Ingress(engine, Settings(**settings)).__serve_build_asgi_app__()
        transport = httpx.ASGITransport(ingress)
        async with httpx.AsyncClient(transport=transport, base_url="http://ray") as client:
            return await client.post(path, content=body, headers=headers)

    return asyncio.run(run())


def test_ingress_passes_on_the_answer_of_a_replica():
    engine = Engine(["a", [EVENTS, part(b"data: 1\n\n")], [part(b"data: 2\n\n"), part(b"", False)]])
    answer = ask(engine)
    assert (answer.status_code, answer.text) == (200, "data: 1\n\ndata: 2\n\n")
    assert answer.headers["x-replica"] == "a"
    assert answer.headers["x-attempt"] == "1"
    assert engine.body == b'{"prompt": "x"}'
    assert engine.cancelled == 1


@pytest.mark.parametrize("before", [[], ["a"], ["a", [EVENTS]]])
@pytest.mark.parametrize("error", [ActorDiedError(), ActorUnavailableError("away", None)])
def test_ingress_lost_replica_before_the_first_part_is_retried(before, error):
    engine = Engine([*before, error], ["b", [EVENTS, part(b"data: 1\n\n", False)]])
    answer = ask(engine)
    assert (answer.status_code, answer.text) == (200, "data: 1\n\n")
    assert answer.headers["x-replica"] == "b"
    assert answer.headers["x-attempt"] == "2"
    assert len(set(engine.keys)) == 1
    assert engine.cancelled == 2


def test_ingress_lost_replica_after_the_first_part_ends_with_an_error():
    engine = Engine(["a", [EVENTS, part(b"data: 1\n\n")], ActorDiedError()], ["b", [EVENTS, part(b"", False)]])
    first, event, done = ask(engine).text.split("\n\n", 2)
    assert (first, done) == ("data: 1", "data: [DONE]\n\n")
    error = json.loads(event.removeprefix("data: "))["error"]
    assert error == {**error, "type": "server_error", "code": "replica_lost", "param": None}
    assert len(engine.scripts) == 1, "no other replica was asked"


def test_ingress_after_max_tries_answers_503():
    engine = Engine(*[["a", ActorDiedError()]] * 3)
    answer = ask(engine, max_tries=2)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "replica_lost")
    assert len(engine.scripts) == 1


def test_ingress_cancelled_request_is_not_retried():
    engine = Engine(["a", TaskCancelledError()], ["b", [JSON, part(b"{}", False)]])
    with pytest.raises(TaskCancelledError):
        ask(engine)
    assert len(engine.scripts) == 1


def test_ingress_without_a_free_replica_in_time_answers_503():
    answer = ask(Engine([9.0]), queue_timeout=0.05)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
    assert "0.05 s" in answer.json()["error"]["message"]
    assert answer.headers["retry-after"] == "10"
    slow = ["a", 0.2, [JSON, part(b"{}", False)]]
    assert ask(Engine(slow), queue_timeout=0.05).status_code == 200, "the time until it is taken counts, no more"


def test_ingress_full_queue_answers_429():
    answer = ask(Engine([BackPressureError(num_queued_requests=7, max_queued_requests=7)]), max_queued_requests=7)
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full")
    assert answer.headers["retry-after"] == "1"


def test_ingress_with_a_key_and_limits_enforces_them():
    assert ask(Engine(), api_key="secret").status_code == 401
    assert ask(Engine(), path="/metrics", api_key="secret").status_code == 401
    done = ["a", [JSON, part(b"{}", False)]]
    assert ask(Engine(done), api_key="secret", headers={"Authorization": "Bearer secret"}).status_code == 200
    assert ask(Engine(), limits={"max_body": 4}).status_code == 413
    answer = ask(Engine(done), allowed_origins=["https://a.example"], headers={"Origin": "https://a.example"})
    assert answer.headers["access-control-allow-origin"] == "https://a.example"


def key(**body):
    return affinity(json.dumps(body).encode(), 64)


def test_affinity_of_prompts_with_one_beginning_is_equal():
    text, tokens = "a" * 64, list(range(16))
    assert key(prompt=text) == key(prompt=text + "b") == key(prompt=[text + "c", "d"]) != key(prompt="b" + text)
    assert key(prompt=tokens) == key(prompt=[*tokens, 5]) == key(prompt=[[*tokens, 6], [7]]) != key(prompt=[5])
    assert key(prompt="ab") != key(prompt="abc")
    assert key(input="ab") == key(input=["ab", "c"]) != key(input="abc")
    assert key(prompt=text, prompt_cache_key="k") == key(prompt="b", prompt_cache_key="k") != key(prompt="k")


def test_affinity_of_turns_of_one_conversation_is_equal():
    system, first, answer, second = (
        {"role": role, "content": text}
        for role, text in [("system", "Hi"), ("user", "One?"), ("assistant", "1"), ("user", "Two?")]
    )
    assert key(messages=[system, first]) == key(messages=[system, first, answer, second])
    assert key(messages=[system, first]) != key(messages=[system, second])
    assert key(messages=[system]) != key(messages=[first])
    assert key(input=[system, first]) == key(input=[system, first, answer]) != key(input=[system, second])
    assert key(input="One?", instructions="Hi") == key(input=[first, answer], instructions="Hi") != key(input="One?")


@pytest.mark.parametrize(
    "body", [b"", b"\xff", b"[1]", b"{}", b"3", b"[" * 99999, b'{"prompt": ""}', b'{"prompt": 5}', b'{"messages": "x"}']
)
def test_affinity_of_a_body_without_a_prompt_is_none(body):
    assert affinity(body, 64) is None


def test_affinity_of_an_invalid_prompt_raises_nothing():
    """The replica refuses them."""
    for body in ({"prompt": [None]}, {"prompt": [[]]}, {"messages": [1]}, {"messages": [{"role": []}]}):
        affinity(json.dumps(body).encode(), 64)


def test_settings_given_as_text_are_converted():
    settings = Settings(
        model="folder",
        num_replicas="2",
        engine='{"max_num_seqs": 8}',
        adapters='{"sql": "adapters/sql"}',
        limits='{"max_n": 2}',
        ray_actor_options='{"num_gpus": 1}',
        queue_timeout="7.5",
    )
    assert settings.model is not None
    assert settings.model.startswith("/")
    assert settings.adapters == {"sql": str(Path("adapters/sql").absolute())}
    assert Settings(model="Qwen/Qwen3-0.6B").model == "Qwen/Qwen3-0.6B"
    assert (settings.num_replicas, settings.queue_timeout, settings.limits.max_n) == (2, 7.5, 2)
    assert settings.max_ongoing_requests == 8
    scaled = Settings(autoscaling_config='{"max_replicas": 3}', max_ongoing_requests="20").autoscaling_config
    assert scaled is not None
    assert (scaled.min_replicas, scaled.max_replicas, scaled.target_ongoing_requests) == (1, 3, 10)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"replicas": 2}, "replicas"),
        ({"num_replicas": 0}, "num_replicas"),
        ({"engine": {"max_seqs": 4}}, "EngineConfig has no 'max_seqs': it has .*max_num_seqs"),
        ({"engine": "{"}, "engine"),
        ({"adapters": {"a b": "folder"}}, "adapter 'a b': a name of 1 to 128 letters"),
        ({"limits": {"max_n": 0}}, "max_n = 0: it must be above 0"),
        ({"autoscaling_config": {"min_replicas": 3, "max_replicas": 2}}, "max_replicas"),
        ({"num_replicas": 2, "autoscaling_config": {}}, "num_replicas and autoscaling_config: give one"),
        ({"max_tries": 0}, "max_tries"),
    ],
)
def test_settings_with_a_wrong_value_name_it(settings, message):
    with pytest.raises(ValidationError, match=message):
        Settings(**settings)


def test_app_of_settings_has_their_deployment():
    ingress = app(Settings(num_replicas=3, engine={"max_num_seqs": 5}, ray_actor_options={"num_gpus": 1}))
    (engine,) = ingress._bound_deployment.init_args[:1]
    deployment = engine._bound_deployment
    assert (deployment.name, deployment.num_replicas, deployment.max_ongoing_requests) == ("Engine", 3, 5)
    assert deployment.ray_actor_options["num_gpus"] == 1


@pytest.fixture(scope="module")
def replica():
    context = SimpleNamespace(replica_id=SimpleNamespace(unique_id="a"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ray.serve.get_replica_context", lambda: context)
        adapters = {"typed": ROOT / "examples" / "adapters" / "typed"}
        replica = Replica(Settings(engine={"num_pages": 200, "max_adapters": 1}, adapters=adapters))
    yield replica
    replica._llm.close()


@pytest.fixture(scope="module")
def run():
    """Runs in the one event loop that a replica has."""
    loop = asyncio.new_event_loop()
    yield loop.run_until_complete
    loop.close()


def scope(path="/v1/completions"):
    headers = [(b"content-type", b"application/json")]
    return {"type": "http", "method": "POST", "path": path, "root_path": "", "query_string": b"", "headers": headers}


async def answered_by(replica, body):
    """The name of a replica, and the status and the body of its answer."""
    name, *batches = [part async for part in replica.answer(scope(), body)]
    start, *bodies = [message for batch in batches for message in batch]
    return name, start["status"], b"".join(message.get("body", b"") for message in bodies)


def test_answer_of_a_replica_has_its_name_and_the_text_of_its_engine(replica, run):
    name, status, body = run(answered_by(replica, b'{"prompt": "import os\\n", "max_tokens": 8}'))
    text = replica._llm.generate("import os\n", SamplingParams(max_tokens=8))[0].text
    assert (name, status, json.loads(body)["choices"][0]["text"]) == ("a", 200, text)
    replica.check_health()


def test_answer_of_a_replica_is_that_of_the_adapter_that_is_named(replica, run):
    body = b'{"model": "typed", "prompt": "class Queue", "max_tokens": 8, "temperature": 0}'
    _, status, body = run(answered_by(replica, body))
    params, answer = SamplingParams(max_tokens=8, temperature=0), json.loads(body)
    texts = [replica._llm.generate("class Queue", params, adapter=name)[0].text for name in ("typed", None)]
    assert (status, answer["model"], answer["choices"][0]["text"]) == (200, "typed", texts[0])
    assert texts[0] != texts[1]


def test_metrics_of_a_replica_are_those_of_this_moment(replica, run):
    replica._llm.generate("x")
    name, metrics = run(replica.metrics())
    steps = next(metric for metric in metrics if metric.name == "quire:engine_steps")
    assert (name, steps.samples[0].value) == ("a", replica._llm.stats.steps)
    assert replica._llm.stats.steps


def test_a_call_that_is_cancelled_ends_its_completions(replica, run):
    async def leave():
        parts = replica.answer(scope(), b'{"prompt": "x", "max_tokens": 1500, "ignore_eos": true, "stream": true}')
        assert await anext(parts) == "a"
        assert (await anext(parts))[0]["status"] == 200
        await parts.aclose()
        end = time.monotonic() + 10
        while replica._llm.stats.running:
            assert time.monotonic() < end
            await asyncio.sleep(0.02)

    run(leave())


def test_replica_whose_engine_has_ended_is_unhealthy(replica, run):
    replica._llm.close()
    with pytest.raises(RuntimeError, match="the engine has ended"):
        replica.check_health()
    assert run(answered_by(replica, b'{"prompt": "x"}'))[1] == 503
