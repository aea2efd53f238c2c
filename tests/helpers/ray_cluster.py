"""A Ray cluster of several nodes on this machine that serves Quire, and load for it."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import ray
from ray import serve
from ray.cluster_utils import Cluster
from ray.serve.context import _get_global_client

from helpers.paths import ROOT
from quire.integrations.ray import Settings, app

os.environ["RAY_SERVE_HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL_S"] = "1"  # of the cluster's processes
RUNTIME = {"env_vars": {"PYTHONPATH": str(ROOT / "src")}}
_NODE = {"object_store_memory": 80 << 20, "include_dashboard": False}
TIMEOUT = 120.0  # seconds: no request may take longer


@dataclass
class Answer:
    """The answer to a request.

    Attributes:
        status, text: of HTTP, and all of the completion that came.
        error: the error's object, as the body or as an event; None if the completion is whole.
        replica, attempt: from the headers.
        seconds: since the request was sent.
    """

    status: int
    text: str = ""
    error: dict[str, Any] | None = None
    replica: str | None = None
    attempt: int = 0
    seconds: float = 0.0


class RayServer:
    """An application on a cluster. The head has the driver, HTTP and the ingress; replicas are on `nodes`, one on each.

    Attributes:
        address: of the cluster.
        url: where it is served.
        nodes: without the head.
    """

    def __init__(self, nodes: int) -> None:
        self._cluster = Cluster(True, head_node_args={**_NODE, "num_cpus": 0, "resources": {"head": 1}})
        self.nodes = [self.add_node() for _ in range(nodes)]
        self.address: str = self._cluster.address
        ray.init(address=self.address, log_to_driver=False, runtime_env=RUNTIME)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        serve.start(http_options={"host": "127.0.0.1", "port": port}, proxy_location="HeadOnly")
        self.url = f"http://127.0.0.1:{port}"

    def deploy(self, **settings: Any) -> None:
        settings["engine"] = {"device": "cpu", **settings.get("engine", {})}
        serve.run(app(Settings(ingress_actor_options={"num_cpus": 0, "resources": {"head": 0.01}}, **settings)))

    def replicas(self) -> dict[str, dict[str, Any]]:
        """The engine's replicas that run, by name, as Ray Serve describes them: "pid", "node_id" and so on."""
        applications = _get_global_client().get_serve_details()["applications"]
        replicas = applications["default"]["deployments"]["Engine"]["replicas"]
        return {replica["replica_id"]: replica for replica in replicas if replica["state"] == "RUNNING"}

    def until_replicas(self, count: int, lost: str | None = None, seconds: float = 180.0) -> None:
        """Wait until so many replicas run, and one that is lost is known to be."""
        end = time.monotonic() + seconds
        while lost in (now := self.replicas()) or len(now) != count:
            assert time.monotonic() < end, now
            time.sleep(0.1)

    def add_node(self) -> Any:
        return self._cluster.add_node(num_cpus=1, **_NODE)

    def kill_node(self, node: Any) -> None:
        """End all processes of a node at once."""
        self.nodes.remove(node)
        self._cluster.remove_node(node, allow_graceful=False)

    def close(self) -> None:
        serve.shutdown()
        ray.shutdown()
        self._cluster.shutdown()


@contextmanager
def ray_server(nodes: int, **settings: Any) -> Iterator[RayServer]:
    server = RayServer(nodes)
    try:
        server.deploy(**settings)
        yield server
    finally:
        server.close()


def load(
    url: str, bodies: Sequence[dict[str, Any]], on: str | None = None, meanwhile: Callable[[], object] = lambda: None
) -> list[Answer]:
    """The answers to completions that are requested all at once.

    Args:
        url: of the server.
        bodies: of the requests.
        on: a replica; `meanwhile` is called when a stream of this one has brought text.
        meanwhile: called once, in a thread of its own; at once if there is no `on`.
    """
    ready = threading.Event()

    def begun(answer: Answer) -> None:
        if answer.replica == on:
            ready.set()

    def wait() -> None:
        assert on is None or ready.wait(TIMEOUT)
        meanwhile()

    async def run() -> list[Answer]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT, limits=limits) as client:
            during = asyncio.create_task(asyncio.to_thread(wait))
            answers = await asyncio.gather(*(_ask(client, body, begun) for body in bodies))
            await during
            return answers

    return asyncio.run(run())


async def _ask(client: httpx.AsyncClient, body: dict[str, Any], begun: Callable[[Answer], None]) -> Answer:
    begin = time.monotonic()
    async with client.stream("POST", "/v1/completions", json=body) as response:
        answer = Answer(response.status_code, replica=response.headers.get("x-replica"))
        answer.attempt = int(response.headers.get("x-attempt", 0))
        if response.headers["content-type"].startswith("text/event-stream"):
            await _read(response, answer, begun)
        else:
            whole = json.loads(await response.aread())
            answer.error = whole.get("error")
            answer.text = whole["choices"][0]["text"] if answer.error is None else ""
    answer.seconds = time.monotonic() - begin
    return answer


async def _read(response: httpx.Response, answer: Answer, begun: Callable[[Answer], None]) -> None:
    last = ""
    async for line in response.aiter_lines():
        if not line:
            continue
        last = line.removeprefix("data: ")
        if last == "[DONE]":
            continue
        event = json.loads(last)
        if "error" in event:
            answer.error = event["error"]
            continue
        if not answer.text:
            begun(answer)
        answer.text += event["choices"][0]["text"]
    assert last == "[DONE]"
