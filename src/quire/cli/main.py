"""Runs the command, and prints user errors as one line instead of a traceback."""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from quire.cli.arguments import parser
from quire.cli.loading import INTERRUPTED, ends_at_once, loading, raises_once


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, and return its exit code: 0 for success, 1 for an error in the result, 2 for an error in the
    arguments, and 130 for Ctrl-C.
    """
    # A caller that passes arguments continues afterwards.
    program = arguments is None
    try:
        with ends_at_once(for_good=program):
            return _run(parser().parse_args(arguments))
    finally:
        if not program:
            gc.unfreeze()


def _run(args: argparse.Namespace) -> int:
    try:
        with loading():
            run = import_module(f"quire.cli.{args.command}").run
        with raises_once():
            return run(args)
    except (ValueError, OSError, RuntimeError, ImportError) as error:
        if isinstance(error, BrokenPipeError):
            # The reader has closed the pipe, and flushing at exit would raise again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        if os.environ.get("QUIRE_DEBUG"):
            raise
        print(f"quire: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED
