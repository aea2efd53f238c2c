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
    from quire.engine import LLM
    from quire.server.run import Server


# Tokens of a prompt for which the CPU has another kernel than for short ones.
_LONG = 256


def run(args: argparse.Namespace) -> int:
    config, limits = config_of(ServerConfig, args), config_of(ServerLimits, args)
    keys = config.keys() or [key for key in [os.environ.get("QUIRE_API_KEY")] if key]
    with loading():
        from quire.server import bind
    with bind(config.host, config.port) as bound:
        _serve(args, config, limits, keys, bound)
    return 0


def _serve(
    args: argparse.Namespace, config: ServerConfig, limits: ServerLimits, keys: list[str], bound: socket.socket
) -> None:
    with loading():
        from quire.engine import LLM
        from quire.engine.chat import check_template
        from quire.server import create_app, serve

        template = config.template()
        if template is not None:
            check_template(template)
        llm = LLM(args.model, engine_config(args))
    with llm:
        if template is not None:
            if llm.model.tokenizer is None:
                raise ValueError(f"chat_template needs a tokenizer, but {llm.model.folder} has none")
            llm.model.tokenizer.chat_template = template
        app = create_app(
            llm,
            name=config.served_model_name,
            limits=limits,
            api_key=keys,
            allowed_origins=config.allowed_origin,
            metrics_prefix=config.metrics_prefix,
            tool_format=config.tool_format,
            reasoning_format=config.reasoning_format,
        )
        _warm_up(llm)
        tls = None if config.ssl_certfile is None else (config.ssl_certfile, config.ssl_keyfile)

        def started(server: Server) -> None:
            host, port = server.address
            shown = f"[{host}]" if ":" in host else host
            scheme = "http" if tls is None else "https"
            print(f"quire: serving {app.state.service.name} at {scheme}://{shown}:{port}", file=sys.stderr, flush=True)

        serve(app, bound=bound, log_level=config.log_level, access_log=config.access_log, tls=tls, started=started)


def _warm_up(llm: LLM) -> None:
    """Complete a short and a long prompt, which compiles the CPU's kernels in a new installation: the first requests
    would wait for that.
    """
    from quire.engine import EmbeddingParams, SamplingParams

    for length in sorted({min(length, llm.max_len - 1) for length in (1, _LONG)} - {0}):
        prompt = [llm.model.vocab_size // 3] * length
        if llm.model.is_headless:
            llm.embed(prompt, EmbeddingParams("last"))
        else:
            llm.generate(prompt, SamplingParams(max_tokens=1))
