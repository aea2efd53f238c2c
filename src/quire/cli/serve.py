"""quire serve: serve a model over HTTP."""

from __future__ import annotations

import argparse
import os
import socket
import sys
from typing import TYPE_CHECKING

from quire.cli.loading import config_of, engine_config, loading
from quire.server.config import ServerConfig
from quire.server.limits import ServerLimits

if TYPE_CHECKING:
    from quire.server.engine_process import EngineProcess
    from quire.server.run import Server


def run(args: argparse.Namespace) -> int:
    config, limits = config_of(ServerConfig, args), config_of(ServerLimits, args)
    engine = engine_config(args)
    if not engine.max_adapters and (config.adapter or config.adapter_root):
        raise ValueError("max_adapters = 0: --adapter and --adapter-root need --max-adapters, of 1 or more")
    keys = config.keys() or [key for key in [os.environ.get("QUIRE_API_KEY")] if key]
    with loading():
        from quire.server import EngineEnded, EngineProcess, bind
    with (
        bind(config.host, config.port) as bound,
        EngineProcess(args.model, engine, adapters=config.adapters()) as process,
    ):
        try:
            _serve(process, config, limits, keys, bound)
        except EngineEnded as error:
            print(f"quire: error: {error}", file=sys.stderr, flush=True)
            return 1
    return 0


def _serve(
    process: EngineProcess, config: ServerConfig, limits: ServerLimits, keys: list[str], bound: socket.socket
) -> None:
    with loading():
        from quire.engine.chat import check_template
        from quire.server import allow_adapters, create_app, serve

        template = config.template()
        if template is not None:
            check_template(template)
        engine = process.connect()
    if template is not None:
        if engine.tokenizer is None:
            raise ValueError(f"chat_template needs a tokenizer, but {engine.info.folder} has none")
        engine.tokenizer.chat_template = template
    app = create_app(
        engine,
        name=config.served_model_name,
        limits=limits,
        api_key=keys,
        allowed_origins=config.allowed_origin,
        metrics_prefix=config.metrics_prefix,
        tool_format=config.tool_format,
        reasoning_format=config.reasoning_format,
    )
    if config.adapter_root is not None:
        allow_adapters(app, config.adapter_root)
    tls = None if config.ssl_certfile is None else (config.ssl_certfile, config.ssl_keyfile)

    def started(server: Server) -> None:
        host, port = server.address
        shown = f"[{host}]" if ":" in host else host
        scheme = "http" if tls is None else "https"
        print(f"quire: serving {app.state.service.name} at {scheme}://{shown}:{port}", file=sys.stderr, flush=True)

    serve(app, bound=bound, log_level=config.log_level, access_log=config.access_log, tls=tls, started=started)
