"""quire serve: serve a model over HTTP."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

from quire.cli.loading import engine_options, loading

if TYPE_CHECKING:
    from quire.server.run import Server


def run(args: argparse.Namespace) -> int:
    with loading():
        from quire.engine import LLM
        from quire.server import Limits, create_app, serve

        names = ("max_body", "max_queue", "max_n", "max_tokens", "grace")
        limits = Limits(**{name: getattr(args, name) for name in names})
        key = args.api_key if args.api_key is not None else os.environ.get("QUIRE_API_KEY") or None
        memory = {n: getattr(args, n) for n in ("kv_cache_dtype", "kv_cache_scales", "gpu_memory_utilization")}
        llm = LLM(args.model, **engine_options(args), **memory)
    with llm:
        app = create_app(
            llm,
            name=args.served_model_name,
            limits=limits,
            api_key=key,
            allowed_origins=args.allowed_origin or (),
            metrics_prefix=args.metrics_prefix,
        )

        def started(server: Server) -> None:
            host, port = server.address
            shown = f"[{host}]" if ":" in host else host
            print(f"quire: serving {app.state.service.name} at http://{shown}:{port}", file=sys.stderr, flush=True)

        serve(app, host=args.host, port=args.port, log_level=args.log_level, started=started)
    return 0
