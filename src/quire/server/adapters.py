"""Models and adapters: what /v1/models lists, and the endpoints that load and unload adapters, as vLLM has them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from starlette.responses import Response

from quire.engine.model_info import AdapterInfo
from quire.server import schemas
from quire.server.config import check_adapter_name
from quire.server.errors import ApiError, bad
from quire.server.protocol import LoadAdapterRequest, UnloadAdapterRequest
from quire.server.service import Service
from quire.server.unsupported import refuse

# What is read of an adapter's folder. A link there must not lead out of the root either.
_FILES = ("", "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")


def add_models(app: FastAPI, service: Service) -> None:
    """List the model and its adapters."""
    common = {
        "object": "model",
        "created": service.created,
        "owned_by": "quire",
        "max_model_len": service.max_len,
    }

    def card(name: str, adapter: AdapterInfo | None) -> dict[str, Any]:
        if adapter is None:
            return {"id": name, **common, "root": service.name, "parent": None}
        return {"id": name, **common, "root": adapter.folder, "parent": service.name}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The model that is served, by each of its names, and the adapters that requests can name instead."""
        cards = [card(name, None) for name in service.names]
        return {"object": "list", "data": [*cards, *(card(info.name, info) for info in service.engine.adapters)]}

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        """The model, or the adapter, of this name."""
        return card(name, service.check_model(name))


def allow_adapters(app: FastAPI, root: str | Path) -> None:
    """Let requests load adapters that are in a folder, and unload all.

    Args:
        app: of `create_app`.
        root: the folder.

    Raises:
        ValueError: there is no such folder, or the engine takes no adapters.
    """
    service: Service = app.state.service
    if not Path(root).is_dir():
        raise ValueError(f"adapter_root = {str(root)!r}: there is no such folder")
    if not service.engine.info.max_adapters:
        raise ValueError(f"adapter_root = {str(root)!r}: it needs an engine with max_adapters of 1 or more")
    resolved = Path(root).resolve()
    # Adapters are loaded one after another, so that the check of their number holds.
    loading = asyncio.Lock()

    @app.post("/v1/load_lora_adapter", response_class=Response, responses=schemas.text("It is loaded"))
    async def load_lora_adapter(body: LoadAdapterRequest) -> Response:
        """Load an adapter, which requests can name as their model then."""
        refuse(body.model_extra or {})
        folder = await asyncio.to_thread(_folder_within, resolved, body.lora_path)
        try:
            async with loading:
                _check_new(service, body.lora_name)
                await service.engine.load_adapter(body.lora_name, folder)
            await service.wait_for_all_processes()
        except ConnectionError:
            raise service.ended() from None
        except (OSError, ValueError) as error:
            raise bad("lora_path", str(error)) from None
        return _done(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    @app.post("/v1/unload_lora_adapter", response_class=Response, responses=schemas.text("It is unloaded"))
    async def unload_lora_adapter(body: UnloadAdapterRequest) -> Response:
        """Unload an adapter. Its requests go on with it, and new ones are refused."""
        if body.lora_name in service.names:
            raise bad("lora_name", f"lora_name = {body.lora_name!r}: this is the model itself")
        try:
            await service.engine.unload_adapter(body.lora_name)
            await service.wait_for_all_processes()
        except ValueError:
            message = f"there is no adapter {body.lora_name!r}"
            raise ApiError(404, message, "lora_name", "model_not_found") from None
        except ConnectionError:
            raise service.ended() from None
        return _done(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def _check_new(service: Service, name: str) -> None:
    """Raise the ApiError for a name that a further adapter must not have, or if there are too many."""
    try:
        check_adapter_name(name)
    except ValueError as error:
        raise bad("lora_name", f"lora_name: {error}") from None
    if name in service.names:
        raise bad("lora_name", f"lora_name = {name!r}: this is the model itself")
    if service.draining:
        raise service.ended()
    loaded, max_loaded = [info.name for info in service.engine.adapters], service.limits.max_loaded_adapters
    if name not in loaded and len(loaded) >= max_loaded:
        raise bad("lora_name", f"{len(loaded)} adapters are loaded, and {max_loaded} are the most: unload one first")


def _folder_within(root: Path, path: str) -> Path:
    """The folder that a path means, which is relative to the root or in it. An ApiError if it is elsewhere, also by
    links.
    """
    outside = bad("lora_path", f"lora_path = {path[:200]!r}: it must be a folder within the server's --adapter-root")
    try:
        resolved = [(root / path / name).resolve() for name in _FILES]
    except (OSError, RuntimeError, ValueError):
        # The path is too long, has a character that no path may have, or its links form a loop.
        raise outside from None
    if not all(each.is_relative_to(root) for each in resolved):
        raise outside
    return resolved[0]


def _done(message: str) -> Response:
    return Response(f"{message}\n", media_type="text/plain")
