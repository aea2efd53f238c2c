"""What the server accepts at most."""

from __future__ import annotations

import math
from dataclasses import dataclass

from quire.server.config import option


@dataclass(frozen=True)
class ServerLimits:
    """Bounds of requests, in place before the engine sees them.

    Attributes:
        max_body: bytes of a request's body.
        max_containers, max_strings, max_values: lists and objects, strings, and values of a body of JSON.
        max_queue: completions that wait beyond those that the engine runs at once; more are answered 429.
        max_n: completions of each prompt.
        max_inputs: texts of a request for embeddings.
        max_tokens: tokens of a completion; None: as many as the context has room for.
        max_stop, max_stop_length: stop strings of a request, also its stop tokens, and characters of a stop string.
        max_bad_words: texts that a completion must not have; each has at most max_stop_length characters.
        max_token_ids: tokens in `logit_bias`, and in `allowed_token_ids`.
        max_grammar: characters of a JSON schema, a regular expression or a grammar.
        max_grammars: different ones that are compiled or wait for it, one at a time; more are answered 429.
        max_logprobs: most likely tokens that are reported for each token.
        max_loaded_adapters: adapters at once; a request that would load one more is refused.
        max_connections: open connections; beyond them the one that has been without a request longest is closed.
        max_head: bytes of a request's line and headers, unless they arrive in one piece, of 256 KiB at most.
        header_timeout: seconds for these to arrive, after the connection was made or after the first of them.
        keep_alive: seconds that a connection may be without a request after an answer; more than clients keep theirs,
            so that none sends a request on a connection that is being closed.
        body_timeout: seconds for a request's body to arrive, after its headers.
        send_timeout: seconds that a client may leave what is sent to it unread before its connection is closed.
        grace: seconds after SIGTERM for requests to finish; those that have not are answered with an error.
    """

    max_body: int = option(4 << 20, "of a request", metavar="BYTES")
    max_queue: int = option(1024, "completions that wait, beyond those that run", metavar="N")
    max_n: int = option(16, "completions of each prompt", metavar="N")
    max_tokens: int | None = option(None, "tokens of a completion; default: what the context allows", type=int)
    max_inputs: int = 2048
    max_containers: int = 16_384
    max_strings: int = 65_536
    max_values: int = 1 << 20
    max_stop: int = 16
    max_stop_length: int = 256
    max_bad_words: int = 256
    max_token_ids: int = 1 << 16
    max_grammar: int = 128 << 10
    max_grammars: int = 256
    max_logprobs: int = 20
    max_loaded_adapters: int = 1024
    max_connections: int = 4096
    max_head: int = 64 << 10
    header_timeout: float = 10.0
    keep_alive: int = 75
    body_timeout: float = 30.0
    send_timeout: float = 60.0
    grace: float = option(30.0, "for requests to finish after SIGTERM", metavar="SECONDS")

    def __post_init__(self) -> None:
        sizes = ("max_body", "max_n", "max_stop", "max_stop_length", "max_bad_words", "max_grammar", "max_grammars")
        counts = ("max_inputs", "max_token_ids", "max_containers", "max_strings", "max_values", "max_connections")
        times = ("keep_alive", "header_timeout", "body_timeout", "send_timeout")
        for name in (*sizes, *counts, "max_head", "max_loaded_adapters", *times):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} = {getattr(self, name)!r}: it must be above 0")
        for name in ("max_queue", "max_logprobs", "grace"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} = {getattr(self, name)!r}: it must be 0 or larger")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"max_tokens = {self.max_tokens!r}: it must be 1 or larger")
