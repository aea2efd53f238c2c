"""What `serve run quire.integrations.ray:app` takes."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator
from ray.serve.config import AutoscalingConfig

from quire.engine import EngineConfig
from quire.engine.hub import is_hub_name
from quire.server import ServerLimits
from quire.server.config import check_adapter_name


def _parsed(value: Any) -> Any:
    """The value that JSON stands for: on a command line, all values are text."""
    return json.loads(value) if isinstance(value, str) else value


_Options = Annotated[dict[str, Any], BeforeValidator(_parsed)]


class Settings(BaseModel):
    """Arguments of the application. On a command line, those that are objects are written as JSON.

    Attributes:
        model: a checkpoint folder, at the same path on all machines, or a name of the Hugging Face hub, which each
            machine downloads to its cache; by default the bundled model.
        served_model_name: by default that of the hub, or of the folder.
        engine: fields of `quire.engine.EngineConfig`: {"device": "cuda"}.
        adapters: folders of adapters, at the same paths on all machines, by their names: {"sql": "/models/sql"}.
            `engine` needs `max_adapters` then.
        limits: fields of `quire.server.ServerLimits`; `grace` is also the time that a replica has to finish its
            requests when it is taken away. The queue of `limits.max_queue` is the one within a replica. Bounds of
            connections and of heads have no effect: Ray's proxy has its own.
        api_key, allowed_origins, metrics_prefix, tool_format, reasoning_format: as of `quire.server.create_app`.
        num_replicas: of the engine; 1 by default. Not together with `autoscaling_config`.
        autoscaling_config: of Ray Serve, for the engine's replicas: {"min_replicas": 1, "max_replicas": 4}. By default,
            target_ongoing_requests is half of `max_ongoing_requests`.
        max_ongoing_requests: requests that a replica has at once; by default the `max_num_seqs` of the engine, beyond
            which they would wait there.
        max_queued_requests: requests that wait in an ingress because all replicas are full; more are answered 429.
        queue_timeout: seconds that a request waits for a replica before it is answered 503.
        max_tries: replicas that a request is sent to, one after the other, as long as none has answered and each dies.
        prefix_length: characters of prompts that are compared; a quarter of that for tokens. Prompts that agree in
            these go to the same replica.
        ray_actor_options: what a replica needs: {"num_gpus": 1}, or one GPU for each rank of its engine; by default one
            CPU.
        health_check_period_s: seconds between looks at whether a replica's engine lives.
        ingress_replicas: processes that speak HTTP.
        ingress_actor_options: what one of them needs; by default nothing.
    """

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    model: str | None = None
    served_model_name: str | None = None
    engine: _Options = {}
    adapters: _Options = {}
    limits: Annotated[ServerLimits, BeforeValidator(_parsed)] = ServerLimits()
    api_key: str | None = None
    allowed_origins: Annotated[list[str], BeforeValidator(_parsed)] = []
    metrics_prefix: str = "quire"
    tool_format: str | None = None
    reasoning_format: str | None = None
    num_replicas: int | None = Field(None, ge=1)
    autoscaling_config: Annotated[AutoscalingConfig | None, BeforeValidator(_parsed)] = None
    max_ongoing_requests: int = Field(64, ge=1)
    max_queued_requests: int = Field(1024, ge=1)
    queue_timeout: float = Field(60.0, gt=0)
    max_tries: int = Field(3, ge=1)
    prefix_length: int = Field(256, ge=4)
    ray_actor_options: _Options = {"num_cpus": 1}
    health_check_period_s: float = Field(5.0, gt=0)
    ingress_replicas: int = Field(1, ge=1)
    ingress_actor_options: _Options = {"num_cpus": 0}

    @field_validator("model")
    @classmethod
    def _absolute(cls, model: str | None) -> str | None:
        """The model with the absolute path of its folder, since replicas run in folders of their own."""
        return model if model is None or is_hub_name(model) else str(Path(model).absolute())

    @field_validator("engine")
    @classmethod
    def _known(cls, engine: dict[str, Any]) -> dict[str, Any]:
        known = {f.name for f in fields(EngineConfig)}
        unknown = next((name for name in engine if name not in known), None)
        if unknown is not None:
            raise ValueError(f"EngineConfig has no {unknown!r}: it has {', '.join(sorted(known))}")
        return engine

    @field_validator("adapters")
    @classmethod
    def _named(cls, adapters: dict[str, Any]) -> dict[str, Any]:
        """The adapters with the absolute paths of their folders."""
        for name in adapters:
            check_adapter_name(name)
        return {name: str(Path(folder).absolute()) for name, folder in adapters.items()}

    @model_validator(mode="before")
    @classmethod
    def _defaults(cls, given: Any) -> Any:
        """Set the defaults that depend on other arguments."""
        given = dict(given)
        engine, scaling = _parsed(given.get("engine", {})), _parsed(given.get("autoscaling_config"))
        if isinstance(engine, dict) and "max_num_seqs" in engine:
            given.setdefault("max_ongoing_requests", engine["max_num_seqs"])
        if isinstance(scaling, dict) and "target_ongoing_requests" not in scaling:
            max_ongoing = int(given.get("max_ongoing_requests", cls.model_fields["max_ongoing_requests"].default))
            given["autoscaling_config"] = {**scaling, "target_ongoing_requests": max(max_ongoing / 2, 1)}
        return given

    @model_validator(mode="after")
    def _one_of(self) -> Settings:
        if self.num_replicas is not None and self.autoscaling_config is not None:
            raise ValueError("num_replicas and autoscaling_config: give one, since Ray Serve changes the number")
        return self
