"""quire chat: talk to a model in the terminal."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import ExitStack, aclosing
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from quire.cli.loading import engine_config, loading, on_interrupt
from quire.distribution import pip_install
from quire.engine import SamplingParams
from quire.engine.chat import render_chat

if TYPE_CHECKING:
    from quire.engine import LLM

_HELP = """/reset  forget what has been said
/help   show this
/quit   end, as Ctrl-D does
Ctrl-C stops an answer. The text so far is kept."""
_NO_TEMPLATE = "the model has no chat template: it completes the text so far, as it is"
Messages = list[dict[str, str]]


class _Local:
    """Answers by an engine in this process."""

    def __init__(self, llm: LLM, params: SamplingParams) -> None:
        self._llm, self._tokenizer = llm, llm.model.tokenizer
        if self._tokenizer is None:
            raise ValueError(f"{llm.name} has no tokenizer: quire chat needs one")
        self.completes = not self._tokenizer.chat_template
        self._params = (
            replace(params, max_tokens=None) if params.max_tokens == "auto" and not self.completes else params
        )
        self.name = llm.name

    async def answer(self, messages: Messages) -> AsyncGenerator[str, None]:
        """Yield parts of the answer's text.

        Raises:
            ValueError: the conversation does not fit into the context.
            RuntimeError: the request failed.
        """
        prompt: Any = completed(messages)
        if not self.completes:
            text = render_chat(self._tokenizer, messages, add_generation_prompt=True)
            prompt = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        stream: Any = self._llm.stream(prompt, self._params)
        async with aclosing(stream):
            async for part in stream:
                yield part.text
                if part.finish_reason == "error":
                    raise RuntimeError(part.error)


class _Remote:
    """Answers by a server with OpenAI's interface."""

    def __init__(self, url: str, api_key: str | None, model: str | None, given: dict[str, Any]) -> None:
        try:
            from quire.bench import client
        except ImportError as error:
            raise ValueError(f"quire chat --url needs httpx: {pip_install('chat')} ({error})") from error
        self._client = client
        self._to = (url, api_key)
        self._given = given
        self.completes = False
        self.name = model or asyncio.run(self._first_model())

    async def _first_model(self) -> str:
        async with self._client.connected(*self._to) as server:
            return await self._client.first_model(server)

    async def answer(self, messages: Messages) -> AsyncGenerator[str, None]:
        """Yield parts of the answer's text; RuntimeError if the request fails. If the server says that the model has no
        chat template, it is asked for completions from then on.
        """
        body = {"model": self.name, "stream": True, **self._given}
        if not self.completes:
            received: set[str] = set()
            try:
                async for event in self._events("/v1/chat/completions", {**body, "messages": messages}):
                    for choice in event.get("choices") or ():
                        delta = choice.get("delta", {})
                        received |= {name for name in ("content", "reasoning_content") if delta.get(name)}
                        yield delta.get("content") or ""
                if received == {"reasoning_content"}:
                    _note("the answer ended within the model's reasoning, which is not shown (--max-tokens)")
                return
            except self._client.Refused as error:
                if error.kind != "HTTP 400" or "chat template" not in str(error):
                    raise
                self.completes = True
                _note(_NO_TEMPLATE)
        async for event in self._events("/v1/completions", {"max_tokens": 128, **body, "prompt": completed(messages)}):
            for choice in event.get("choices") or ():
                yield choice.get("text") or ""

    async def _events(self, path: str, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        async with (
            self._client.connected(*self._to) as server,
            aclosing(self._client.events(server, path, body)) as stream,
        ):
            async for event in stream:
                yield event


def completed(messages: Messages) -> str:
    """The text of a conversation with a model that has no chat template: all that was said, each line of the user's on
    a new line.
    """
    text = ""
    for message in messages:
        if message["role"] == "user" and text and not text.endswith("\n"):
            text += "\n"
        text += message["content"]
    return text


def run(args: argparse.Namespace) -> int:
    given = {f.name: getattr(args, f.name) for f in fields(SamplingParams) if hasattr(args, f.name)}
    params = SamplingParams(**given)
    # The package may be missing, so it is imported before the model is loaded.
    read = _reader()
    with ExitStack() as stack:
        responder: _Local | _Remote
        if args.url is not None:
            responder = _Remote(args.url, args.api_key, args.model, given)
        else:
            with loading():
                from quire.engine import LLM

                llm = LLM(args.model, engine_config(args))
            responder = _Local(stack.enter_context(llm), params)
        if sys.stdin.isatty():
            _note(f"{responder.name}: /help lists the commands, Ctrl-C stops an answer, Ctrl-D ends")
        if responder.completes:
            _note(_NO_TEMPLATE)
        return _talk(responder, read())


def _reader() -> Callable[[], Iterator[str]]:
    """The function that yields what the user enters, until Ctrl-D or the end of a pipe."""
    if not sys.stdin.isatty():
        return lambda: (line.rstrip("\r\n") for line in sys.stdin)
    try:
        from prompt_toolkit import PromptSession
    except ImportError as error:
        raise ValueError(f"quire chat needs prompt_toolkit: {pip_install('chat')} ({error})") from error

    def lines() -> Iterator[str]:
        # The session keeps the lines that were entered, for the arrow keys.
        session: Any = PromptSession()
        while True:
            try:
                yield session.prompt("> ")
            except KeyboardInterrupt:
                # Ctrl-C drops the line.
                continue
            except EOFError:
                return

    return lines


def _talk(responder: _Local | _Remote, lines: Iterator[str]) -> int:
    """Answer lines until there are no more; 1 if an answer failed."""
    messages: Messages = []
    failed = False
    for line in lines:
        if line.strip() == "/quit":
            break
        if line.strip() == "/reset":
            messages.clear()
            _note("forgotten")
        elif line.startswith("/"):
            _note(_HELP if line.strip() == "/help" else f"there is no command {line.split()[0]}\n{_HELP}")
        elif line.strip():
            messages.append({"role": "user", "content": line})
            parts: list[str] = []
            try:
                _answered(responder, messages, parts)
            except (ValueError, RuntimeError) as error:
                failed = True
                _note(f"quire: error: {error}")
            if any(parts):
                messages.append({"role": "assistant", "content": "".join(parts)})
            else:
                # Without an answer, the question is dropped from the conversation.
                messages.pop()
    return 1 if failed else 0


def _answered(responder: _Local | _Remote, messages: Messages, parts: list[str]) -> None:
    """Print an answer as it comes, and add its parts to `parts`; Ctrl-C cancels the request and returns."""

    async def answer() -> None:
        async with aclosing(responder.answer(messages)) as stream:
            async for part in stream:
                parts.append(part)
                print(part, end="", flush=True)

    async def until_interrupted() -> None:
        loop, task = asyncio.get_running_loop(), asyncio.create_task(answer())
        with on_interrupt(lambda number, frame: loop.call_soon_threadsafe(task.cancel)):
            await asyncio.wait([task])
        if not task.cancelled():
            task.result()

    try:
        asyncio.run(until_interrupted())
    finally:
        if not "".join(parts).endswith("\n"):
            print(flush=True)


def _note(text: str) -> None:
    """Print a message that is no part of an answer to stderr."""
    print(text, file=sys.stderr, flush=True)
