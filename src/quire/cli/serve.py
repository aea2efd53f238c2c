"""quire serve: serve a model over HTTP."""

from __future__ import annotations

import argparse
import os
import socket
import sys
from typing import TYPE_CHECKING

from quire.cli.loading import engine_config, loading

if TYPE_CHECKING:
    from quire.engine import LLM
    from quire.server import ServerLimits
    from quire.server.run import Server


# Tokens of a prompt for which the CPU has another kernel than for short ones.
_LONG = 256


def run(args: argparse.Namespace) -> int:
    with loading():
        from quire.server import ServerLimits, bind

        names = ("max_body", "max_queue", "max_n", "max_tokens", "grace")
        limits = ServerLimits(**{name: getattr(args, name) for name in names})
    with bind(args.host, args.port) as bound:
        _serve(args, limits, bound)
    return 0


def _serve(args: argparse.Namespace, limits: ServerLimits, bound: socket.socket) -> None:
    with loading():
        from quire.engine import LLM
        from quire.server import create_app, serve

        key = args.api_key if args.api_key is not None else os.environ.get("QUIRE_API_KEY") or None
        llm = LLM(args.model, engine_config(args))
    with llm:
        app = create_app(
            llm,
            name=args.served_model_name,
            limits=limits,
            api_key=key,
            allowed_origins=args.allowed_origin or (),
            metrics_prefix=args.metrics_prefix,
        )
        _warm_up(llm)

        def started(server: Server) -> None:
            host, port = server.address
            shown = f"[{host}]" if ":" in host else host
            print(f"quire: serving {app.state.service.name} at http://{shown}:{port}", file=sys.stderr, flush=True)

        serve(app, bound=bound, log_level=args.log_level, started=started)


def _warm_up(llm: LLM) -> None:
    """Complete a short and a long prompt, which compiles the CPU's kernels in a new installation: the first requests
    would wait for that.
    """
    from quire.engine import SamplingParams

    for length in sorted({min(length, llm.max_len - 1) for length in (1, _LONG)} - {0}):
        llm.generate([llm.model.vocab_size // 3] * length, SamplingParams(max_tokens=1))
