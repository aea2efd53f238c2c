"""The name of the package on the index, where `quire` is another project's."""

from __future__ import annotations

DISTRIBUTION = "quire-attention"


def pip_install(extra: str) -> str:
    """The command that installs an extra, for messages: "pip install 'quire-attention[server]'"."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"
