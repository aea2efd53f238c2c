"""The messages between an engine's host and a client in another process, by msgspec, each after its length.

Only the first message to a process that is to host an engine is pickled, see `quire.engine.process`.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator

import msgspec

from quire.engine.embedding import EmbeddingParams
from quire.engine.model_info import AdapterInfo, ModelInfo
from quire.engine.params import SamplingParams
from quire.engine.prompts import TokenRequest
from quire.engine.stats import Stats
from quire.engine.step_log import StepRecord

_LENGTH = 4
# Bytes that are received at once.
_CHUNK = 1 << 18
# Bytes on their way in each direction, as far as the system allows. An engine whose client does not read waits.
_BUFFER = 4 << 20


class Start(msgspec.Struct, array_like=True, tag=True):
    """Begin to complete requests, which the client numbers from `first` on."""

    first: int
    requests: list[TokenRequest]


class StartEmbedding(msgspec.Struct, array_like=True, tag=True):
    """Begin to compute the embeddings of prompts, with parameters that have no missing values."""

    first: int
    prompts: list[list[int]]
    params: EmbeddingParams
    adapter: str | None = None


class Cancel(msgspec.Struct, array_like=True, tag=True):
    """Cancel requests. The client has no use for what they have produced, nor for their end."""

    numbers: list[int]


class Prepare(msgspec.Struct, array_like=True, tag=True):
    """Compile the grammar of parameters, or find out whether it is kept. The answer is `Prepared`."""

    key: int
    params: SamplingParams
    compiles: bool


class GetState(msgspec.Struct, array_like=True, tag=True):
    """Send the `State`, with the steps after this number."""

    key: int
    after: int


class LoadAdapter(msgspec.Struct, array_like=True, tag=True):
    """Read an adapter and give it a name. The answer is `AdapterChanged`, after `Adapters` to all clients."""

    key: int
    name: str
    folder: str


class UnloadAdapter(msgspec.Struct, array_like=True, tag=True):
    """Forget the name of an adapter. The answer is `AdapterChanged`, after `Adapters` to all clients."""

    key: int
    name: str


class Close(msgspec.Struct, array_like=True, tag=True):
    """Cancel all requests and end the engine."""


class Ready(msgspec.Struct, array_like=True, tag=True):
    """The engine has been made."""

    name: str
    info: ModelInfo


class Failed(msgspec.Struct, array_like=True, tag=True):
    """The exception because of which the engine, or a grammar, could not be made."""

    kind: str
    message: str


class Details(msgspec.Struct, array_like=True, gc=False):
    """Fields that few updates have, such as the first and the last one of a request."""

    finish_reason: str | None = None
    error: str | None = None
    logprobs: list[dict[int, float]] | None = None
    num_cached_tokens: int = 0
    # An embedding, as float32 with the lowest byte first.
    values: bytes = b""


class NumberedUpdate(msgspec.Struct, array_like=True, gc=False):
    """What a step has added to a request."""

    number: int
    token_ids: list[int]
    details: Details | None = None


class PromptLogprobs(msgspec.Struct, array_like=True, tag=True):
    """Log-probabilities and ranks of the next tokens of a request's prompt, see `Completion`. They come before the
    first update of the request, and in parts, since a client can do nothing else while it decodes a message.
    """

    number: int
    logprobs: list[dict[int, float] | None]
    ranks: list[int | None]


class StepUpdates(msgspec.Struct, array_like=True, tag=True):
    """What a step has added to all requests of the client."""

    updates: list[NumberedUpdate]


class Prepared(msgspec.Struct, array_like=True, tag=True):
    """Whether a grammar is kept, or why it is refused."""

    key: int
    kept: bool
    refused: Failed | None = None


class State(msgspec.Struct, array_like=True, tag=True):
    """The engine's counts, seconds since it started, and its last steps."""

    key: int
    stats: Stats
    now: float
    steps: list[StepRecord]


class Adapters(msgspec.Struct, array_like=True, tag=True):
    """The adapters that requests can name from now on."""

    infos: tuple[AdapterInfo, ...]


class AdapterChanged(msgspec.Struct, array_like=True, tag=True):
    """An adapter has been loaded or unloaded, or `refused` has the reason why not."""

    key: int
    info: AdapterInfo | None = None
    refused: Failed | None = None


# The exceptions that a caller of the engine may have to handle.
_EXPECTED: dict[str, Callable[[str], Exception]] = {
    error.__name__: error
    for error in (
        FileNotFoundError,
        PermissionError,
        ConnectionError,
        OSError,
        ImportError,
        TypeError,
        ValueError,
        RuntimeError,
    )
}
ToHost = Start | StartEmbedding | Cancel | Prepare | GetState | LoadAdapter | UnloadAdapter | Close
ToClient = StepUpdates | PromptLogprobs | Prepared | State | Adapters | AdapterChanged | Ready | Failed
_encoder = msgspec.msgpack.Encoder()
to_host = msgspec.msgpack.Decoder(ToHost)
to_client = msgspec.msgpack.Decoder(ToClient)


def frame(message: ToHost | ToClient | bytes) -> bytes:
    """A message as it is sent."""
    content = message if isinstance(message, bytes) else _encoder.encode(message)
    return len(content).to_bytes(_LENGTH, "little") + content


class Frames:
    """Takes messages out of the bytes that are received."""

    def __init__(self) -> None:
        self._received = bytearray()

    def add(self, data: bytes) -> Iterator[bytearray]:
        """The messages that are complete with these bytes."""
        received = self._received
        received += data
        start = 0
        while len(received) >= start + _LENGTH:
            begin = start + _LENGTH
            end = begin + int.from_bytes(received[start:begin], "little")
            if len(received) < end:
                break
            yield received[begin:end]
            start = end
        del received[:start]


def receive(sock: socket.socket) -> bytes:
    """The bytes that have arrived, or arrive next; b"" if the other side has ended.

    Raises:
        BlockingIOError: the socket does not wait, and there are none.
    """
    try:
        return sock.recv(_CHUNK)
    except BlockingIOError:
        raise
    except OSError:
        return b""


def connected_sockets() -> tuple[socket.socket, socket.socket]:
    """The ends of a connection between a host and a client."""
    pair = socket.socketpair()
    for end in pair:
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            end.setsockopt(socket.SOL_SOCKET, option, _BUFFER)
    return pair


def as_failed(error: BaseException) -> Failed:
    """The message about an exception; its kind is "" for those that no caller expects."""
    known = next((kind.__name__ for kind in type(error).__mro__ if kind.__name__ in _EXPECTED), "")
    return Failed(known, str(error) if known else f"{type(error).__name__}: {error}")


def as_error(kind: str, message: str) -> Exception:
    """The exception that a message is about."""
    return _EXPECTED.get(kind, RuntimeError)(message)
