"""The application on a Ray cluster of three nodes: its interface, where prompts go, and what a loss costs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

pytest.importorskip("ray.serve", reason="Ray is not installed: pip install 'quire-attention[ray]'")
pytest.importorskip("transformers")
pytest.importorskip("openai")

import openai
from ray import serve

from helpers.ray_cluster import RUNTIME, TIMEOUT, load, ray_server
from quire.engine import LLM, SamplingParams

pytestmark = pytest.mark.slow

TOKENS = 160
NAMES = "io os re ast csv json math time uuid queue random socket string struct typing urllib"
PROMPTS = [f"import {name}\n\n\ndef {kind}(" for name in NAMES.split() for kind in ("read", "write")]
SAMPLING = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def server():
    with ray_server(2, num_replicas=2, health_check_period_s=1.0, engine={"num_pages": 2048}) as server:
        server.until_replicas(2)
        yield server


@pytest.fixture(scope="module")
def texts():
    """The right answer to each prompt."""
    with LLM(num_pages=2048) as llm:
        params = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
        return [done.text for done in llm.generate(PROMPTS, params)]


def get(server, path):
    return httpx.get(server.url + path, timeout=TIMEOUT)


def bodies():
    """Requests for each prompt, of which every third one is not a stream."""
    return [{"prompt": prompt, "stream": i % 3 > 0, **SAMPLING} for i, prompt in enumerate(PROMPTS)]


def check(answers, texts, lost):
    """Each answer is right, or the beginning of it with an error that says that its replica has been lost."""
    for body, answer, text in zip(bodies(), answers, texts, strict=True):
        if answer.error is None:
            assert (answer.status, answer.text) == (200, text)
        else:
            assert answer.replica == lost
            assert text.startswith(answer.text)
            assert answer.text, "nothing had been sent, so that another replica could have answered"
            assert answer.error.keys() == {"message", "type", "param", "code"}
            assert (answer.error["code"], answer.error["type"]) == ("replica_lost", "server_error")
            assert body["stream"]


def test_cluster_with_the_official_client_completes_prompts(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["tiny-python"]
        asked = {"model": "tiny-python", "prompt": "import os\n", "max_tokens": 16, "seed": 5, "temperature": 0.7}
        whole = client.completions.create(**asked)
        parts = list(client.completions.create(**asked, stream=True))
        assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text
        assert len(parts) > 4
        with pytest.raises(openai.BadRequestError, match="chat template"):
            client.chat.completions.create(model="tiny-python", messages=[{"role": "user", "content": "Hello"}])
        with pytest.raises(openai.NotFoundError, match="no model 'other'"):
            client.completions.create(model="other", prompt="x")
    assert get(server, "/health").json() == {"status": "ok"}
    assert get(server, "/server_info").json()["model"] == "tiny-python"
    assert get(server, "/openapi.json").json()["info"]["title"] == "Quire"
    assert get(server, "/nothing").json()["error"]["type"] == "not_found_error"


def test_cluster_prompts_with_one_beginning_share_a_replica(server):
    """Also its pages: the second request of a group finds the tokens of the first one."""
    of_group = {}
    for name in NAMES.split():
        for i in range(3):
            body = {"prompt": f"# {name}\n" * 70 + str(i), "max_tokens": 1}
            answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=TIMEOUT)
            of_group.setdefault(name, set()).add(answer.headers["x-replica"])
            assert (answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 100) == (i > 0)
    assert {len(replicas) for replicas in of_group.values()} == {1}
    assert set.union(*of_group.values()) == server.replicas().keys(), "one of 2 ** 15 times, all go to one"
    metrics = get(server, "/metrics").text
    for replica in server.replicas():
        assert f'quire:prefix_cache_hits_total{{model_name="tiny-python",replica="{replica}"}}' in metrics


@pytest.mark.parametrize("stream", [True, False])
def test_cluster_client_that_disconnects_cancels_its_completions(server, stream):
    long = {"prompt": "import os\n", "max_tokens": 1500, "ignore_eos": True, "stream": stream}
    with httpx.Client(base_url=server.url, timeout=1.0) as client:
        if stream:
            with client.stream("POST", "/v1/completions", json=long) as response:
                lines = response.iter_lines()
                assert next(lines).startswith("data: ")
                assert running(server) == 1
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post("/v1/completions", json=long)
    end = time.monotonic() + 10
    while running(server):
        assert time.monotonic() < end
        time.sleep(0.1)


def running(server):
    lines = get(server, "/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("quire:num_requests_running{"))


def test_cluster_killed_replica_loses_its_own_streams_only(server, texts):
    lost = load(server.url, [{**bodies()[0], "max_tokens": 1}])[0].replica
    process = server.replicas()[lost]["pid"]
    answers = load(server.url, bodies(), lost, lambda: os.kill(process, signal.SIGKILL))
    check(answers, texts, lost)
    assert {answer.attempt for answer in answers if answer.error is None} == {1, 2}
    assert any(answer.error for answer in answers)
    server.until_replicas(2, lost)
    assert [answer.text for answer in load(server.url, bodies())] == texts


def test_cluster_lost_node_loses_its_own_streams_only(server, texts):
    node = server.nodes[0]
    lost = next(name for name, replica in server.replicas().items() if replica["node_id"] == node.node_id)
    answers = load(server.url, bodies(), lost, lambda: server.kill_node(node))
    check(answers, texts, lost)
    assert any(answer.error for answer in answers)
    server.until_replicas(1, lost)
    assert [answer.text for answer in load(server.url, bodies())] == texts, "by the replica that is left"
    server.nodes.append(server.add_node())
    server.until_replicas(2)


def test_cluster_serve_run_with_a_route_prefix_serves_there(server):
    """From the command line, beside the other application."""
    command = [Path(sys.executable).with_name("serve"), "run", "--non-blocking", "--address", server.address]
    command += ["--name", "second", "--route-prefix", "/second", "--runtime-env-json", json.dumps(RUNTIME)]
    command += ["quire.integrations.ray:app", "served_model_name=other", 'ray_actor_options={"num_cpus": 0}']
    command += ['engine={"device": "cpu"}']
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **RUNTIME["env_vars"]})
    assert done.returncode == 0, done.stderr
    with openai.OpenAI(base_url=f"{server.url}/second/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["other"]
        assert client.completions.create(model="other", prompt="import os\n").choices[0].text
    assert get(server, "/v1/models").json()["data"][0]["id"] == "tiny-python"
    serve.delete("second")


def test_cluster_replica_of_two_ranks_is_replaced_if_one_is_killed(server, texts):
    short = [{"prompt": prompt, **SAMPLING, "max_tokens": 8} for prompt in PROMPTS]
    serve.delete("default")
    engine = {"num_pages": 2048, "tensor_parallel_size": 2}
    server.deploy(num_replicas=1, health_check_period_s=1.0, engine=engine)
    ((name, replica),) = server.replicas().items()
    check_beginnings(load(server.url, short), texts)
    os.kill(follower_of(replica["pid"]), signal.SIGKILL)
    server.until_replicas(1, name)
    check_beginnings(load(server.url, short), texts)


def check_beginnings(answers, texts):
    for answer, text in zip(answers, texts, strict=True):
        assert (answer.status, answer.text) == (200, text[: len(answer.text)])
        assert answer.text


def follower_of(pid):
    """The process of the second rank of a replica, which one of the replica's threads has started."""
    lists = (path.read_text().split() for path in Path(f"/proc/{pid}/task").glob("*/children"))
    children = [int(child) for each in lists for child in each]
    (follower,) = [c for c in children if "parallel.process" in Path(f"/proc/{c}/cmdline").read_text()]
    return follower


def test_cluster_under_load_adds_replicas(server, texts):
    serve.delete("default")
    server.deploy(autoscaling_config={"max_replicas": 2, "target_ongoing_requests": 4, "upscale_delay_s": 1})
    assert len(server.replicas()) == 1
    end = time.monotonic() + 180
    while len(server.replicas()) < 2:
        assert time.monotonic() < end
        assert [answer.text for answer in load(server.url, bodies())] == texts
