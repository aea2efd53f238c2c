"""Picks the command, and turns a user's mistakes into one line instead of a traceback."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from quire import __version__


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code: 0 done, 1 something was wrong with the result, 2 with the arguments."""
    parser = argparse.ArgumentParser(prog="quire", description="Attention for LLM serving over paged key/value caches.")
    parser.add_argument("--version", action="version", version=f"quire {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    from quire.cli import bench, check, env, generate

    for module in (generate, check, env, bench):
        module.add_parser(commands)
    args = parser.parse_args(arguments)
    try:
        return args.run(args)
    except (ValueError, OSError, RuntimeError, ImportError) as error:
        if isinstance(error, BrokenPipeError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nobody reads any more
            return 1
        if os.environ.get("QUIRE_DEBUG"):
            raise
        print(f"quire: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
