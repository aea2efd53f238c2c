"""quire serve: serve a model over HTTP."""

from __future__ import annotations

import argparse
import os
import pickle
import socket
import sys
from typing import TYPE_CHECKING

from quire.cli.loading import config_of, engine_config, loading
from quire.server.config import ServerConfig
from quire.server.limits import ServerLimits

if TYPE_CHECKING:
    from quire.server.app import AppOptions
    from quire.server.engine_process import EngineProcess
    from quire.server.http_processes import HttpProcesses
    from quire.server.run import Server


def run(args: argparse.Namespace) -> int:
    config, limits = config_of(ServerConfig, args), config_of(ServerLimits, args)
    engine = engine_config(args)
    if not engine.max_adapters and (config.adapter or config.adapter_root):
        raise ValueError("max_adapters = 0: --adapter and --adapter-root need --max-adapters, of 1 or more")
    keys, default = config.keys(), os.environ.get("QUIRE_API_KEY")
    if default and not config.api_key:
        keys.append(default)
    with loading():
        from quire.server import EngineEnded, EngineProcess, bind
        from quire.server.http_processes import HttpProcessEnded, HttpProcesses
    with (
        bind(config.host, config.port) as bound,
        EngineProcess(args.model, engine, config.processes(str(engine.device)), config.adapters()) as process,
        HttpProcesses(bound, process.further_sockets) as others,
    ):
        try:
            _serve(process, others, config, _app_options(config, limits, keys), bound)
        except (EngineEnded, HttpProcessEnded) as error:
            print(f"quire: error: {error}", file=sys.stderr, flush=True)
            return 1
    return 0


def _app_options(config: ServerConfig, limits: ServerLimits, keys: list[str]) -> AppOptions:
    with loading():
        from quire.engine.chat import check_template
        from quire.server.app import AppOptions

        template = config.template()
        if template is not None:
            check_template(template)
    return AppOptions(
        name=config.served_model_name,
        limits=limits,
        api_key=keys,
        allowed_origins=config.allowed_origin,
        metrics_prefix=config.metrics_prefix,
        tool_format=config.tool_format,
        reasoning_format=config.reasoning_format,
        chat_template=template,
        adapter_root=config.adapter_root,
    )


def _serve(
    process: EngineProcess, others: HttpProcesses, config: ServerConfig, options: AppOptions, bound: socket.socket
) -> None:
    with loading():
        from quire.server.app import app_of
        from quire.server.run import RunOptions, run_app

        engine = process.connect()
    app = app_of(engine, options, others.counts)
    tls = None if config.ssl_certfile is None else (config.ssl_certfile, config.ssl_keyfile)
    run = RunOptions(log_level=config.log_level, access_log=config.access_log, tls=tls)

    def started(server: Server) -> None:
        host, port = server.address
        shown = f"[{host}]" if ":" in host else host
        scheme = "http" if tls is None else "https"
        print(f"quire: serving {app.state.service.name} at {scheme}://{shown}:{port}", file=sys.stderr, flush=True)

    if not len(others):
        run_app(app, bound, run, started)
        return
    from quire.server.http_process import HttpJob
    from quire.server.shared_server import serve_together

    code = process.config.trust_remote_code
    others.job = pickle.dumps(HttpJob(name=engine.name, info=engine.info, trust_remote_code=code, app=options, run=run))
    serve_together(app, bound, others, run, started)
