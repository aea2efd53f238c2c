"""The command line: quire generate | chat | check | env | bench."""

from quire.cli.main import main

__all__ = ["main"]
