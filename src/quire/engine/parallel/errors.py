"""What ends an engine of several ranks."""

from __future__ import annotations


class RankError(RuntimeError):
    """A rank has ended, failed, or does not answer, so that the others cannot compute either."""
