"""The command line: quire generate | chat | serve | calibrate | check | env | bench."""

from quire.cli.main import main

__all__ = ["main"]
