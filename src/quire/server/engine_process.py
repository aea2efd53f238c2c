"""The engine in a process of its own, which ends with this one."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from quire.engine import EngineConfig
from quire.engine.child_process import end_of, start_program
from quire.engine.messages import Failed, Frames, Ready, as_error, connected_sockets, frame, receive, to_client
from quire.engine.reading import import_tokenizers, load_tokenizer
from quire.server.engine_client import EngineClient

# Seconds for the process to end by itself, more than it gives itself.
_GRACE = 12.0


class EngineProcess:
    """An engine in a new process, whose model is loaded meanwhile; a context, at whose end the process ends.

    If this process ends in any way, so does the engine's. If that one ends, `client` ends all requests with an error.

    Args:
        model: the folder of a Hugging Face checkpoint, or its name on the hub; None: the bundled model.
        config: the configuration; by default that of `EngineConfig()`.
        clients: processes that use the engine. The client of this one is the first, with which the engine ends.
        adapters: the folders of adapters that are loaded at once, by their names, as of `quire.engine.LLM`.

    Attributes:
        config: as given.
        process: the engine's.
        further_sockets: connected to the engine, for the other clients. This process is to close them when the other
            processes have them.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        config: EngineConfig | None = None,
        clients: int = 1,
        adapters: Mapping[str, str | Path] | None = None,
    ) -> None:
        self.config = config or EngineConfig()
        pairs = [connected_sockets() for _ in range(clients)]
        self._sock, *self.further_sockets = (own for own, _ in pairs)
        with ExitStack() as others:
            descriptors = [others.enter_context(other).fileno() for _, other in pairs]
            self.process = start_program("quire.engine.process", descriptors, descriptors)
        # A process that has ended by now is noticed by `connect`.
        with suppress(OSError):
            self._sock.sendall(frame(pickle.dumps((model, self.config, dict(adapters or {})))))

    def connect(self) -> EngineClient:
        """Wait until the model is loaded, and return the client; to be called once.

        Raises:
            FileNotFoundError, ImportError, OSError, TypeError, ValueError: as for `quire.engine.LLM`.
            RuntimeError: as for that, or the process has ended.
        """
        import_tokenizers()
        ready = self._first_message()
        if isinstance(ready, Failed):
            raise as_error(ready.kind, ready.message)
        if not isinstance(ready, Ready):
            raise RuntimeError(f"{self.end()} before the model was loaded")
        tokenizer = load_tokenizer(Path(ready.info.folder), self.config.trust_remote_code)
        return EngineClient(self._sock, ready.name, ready.info, tokenizer, self.end)

    def end(self) -> str:
        """Wait for the process, which has begun to end, and return a description of how it ended."""
        return end_of(self.process, "the engine's process", _GRACE)

    def close(self) -> None:
        """End the process."""
        for sock in (self._sock, *self.further_sockets):
            sock.close()
        self.end()

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _first_message(self) -> Any:
        frames = Frames()
        while data := receive(self._sock):
            for content in frames.add(data):
                return to_client.decode(content)
        return None
