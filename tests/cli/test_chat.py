"""`quire chat`: lines of a pipe, a terminal, Ctrl-C, templates, and a server."""

from __future__ import annotations

import io
import os
import select
import signal
import subprocess
import sys
import time

import pytest

pytest.importorskip("transformers")

from helpers.openai_server import FakeServer
from quire.cli import chat, main
from quire.engine import LLM, SamplingParams, shipped_model
from quire.engine import llm as engine

FIRST, SECOND = "def add(a, b):", "def sub(a, b):"
_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


@pytest.fixture
def prompts(monkeypatch):
    """The prompts that reach the engine."""
    seen, stream = [], LLM.stream

    def spied(self, prompt, params):
        seen.append(prompt)
        return stream(self, prompt, params)

    monkeypatch.setattr(LLM, "stream", spied)
    return seen


def ended(text):
    return text if text.endswith("\n") else f"{text}\n"


def talk(monkeypatch, capsys, text, *arguments):
    """The exit code, and what a conversation over a pipe prints to stdout and stderr."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    return main(["chat", *arguments]), *capsys.readouterr()


def test_chat_without_a_template_completes_the_text(monkeypatch, capsys, prompts):
    lines = f"{FIRST}\n\n{SECOND}\n/reset\n{SECOND}\n/quit\n{FIRST}\n"
    code, out, err = talk(monkeypatch, capsys, lines, "--max-tokens", "6")
    assert code == 0
    with LLM() as llm:
        first, second, anew = [d.text for d in llm.generate(prompts, SamplingParams(temperature=0, max_tokens=6))]
    assert prompts == [FIRST, ended(FIRST + first) + SECOND, SECOND]
    assert out == "".join(map(ended, (first, second, anew)))
    assert err.count("no chat template") == 1


def test_chat_unknown_command_prints_help(monkeypatch, capsys, prompts):
    code, out, err = talk(monkeypatch, capsys, "/help\n/frobnicate now\n")
    assert (code, out, prompts) == (0, "", [])
    assert "there is no command /frobnicate\n" in err
    assert err.count("/reset  forget") == 2


def test_chat_with_the_checkpoints_template_renders_messages(monkeypatch, capsys, prompts, tmp_path):
    for file in shipped_model().iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "chat_template.jinja").write_text(_TEMPLATE)
    code, out, err = talk(monkeypatch, capsys, "one\ntwo\n", str(tmp_path), "--max-tokens", "5")
    assert code == 0
    assert "template" not in err
    with LLM() as llm:
        decode = llm.model.tokenizer.decode
        first, second = [d.text for d in llm.generate(prompts, SamplingParams(temperature=0, max_tokens=5))]
    assert out == ended(first) + ended(second)
    assert decode(prompts[0]) == "<user>one\n<a>"
    assert decode(prompts[1]).rstrip() == f"<user>one\n<assistant>{first}\n<user>two\n<a>"


def test_chat_failed_request_is_reported_and_dropped(monkeypatch, capsys, prompts):
    code, out, err = talk(monkeypatch, capsys, f"{'y' * 9000}\n{FIRST}\n", "--max-tokens", "3")
    assert code == 1
    assert "quire: error: prompt" in err
    assert prompts[1] == FIRST
    assert len(out.strip()) > 0


def test_chat_ctrl_c_stops_the_answer_alone(monkeypatch, capsys, prompts):
    part, parts = engine._delta, []

    def interrupted(update):
        parts.append(part(update))
        if len(parts) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return parts[-1]

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr(engine, "_delta", interrupted)
    try:
        given = ("--max-tokens", "500", "--ignore-eos")
        code, _, err = talk(monkeypatch, capsys, f"{FIRST}\n/help\n", *given)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert code == 0
    assert len(parts) < 100
    assert "/reset  forget" in err


def test_chat_with_a_url_sends_messages_to_the_server(monkeypatch, capsys):
    pytest.importorskip("httpx")
    with FakeServer() as server:
        server.text = "hé\u2028"
        given = ("--url", server.url, "--max-tokens", "2", "--temperature", "0.5", "--api-key", "secret")
        assert talk(monkeypatch, capsys, "one\ntwo\n", *given) == (0, "hé\u2028hé\u2028\n" * 2, "")
        assert server.keys == {"Bearer secret"}
    first, second = server.bodies
    assert (first["model"], first["temperature"], first["max_tokens"]) == ("fake", 0.5, 2)
    assert [m["role"] for m in second["messages"]] == ["user", "assistant", "user"]
    assert second["messages"][1]["content"] == "hé\u2028hé\u2028"
    code, _, err = talk(monkeypatch, capsys, "one\n", *given)
    assert code == 2
    assert "no connection" in err


def test_chat_with_a_server_whose_answer_is_reasoning_alone_says_so(monkeypatch, capsys):
    pytest.importorskip("httpx")
    with FakeServer() as server:
        server.field = "reasoning_content"
        code, out, err = talk(monkeypatch, capsys, "one\n", "--url", server.url, "--max-tokens", "2")
    assert (code, out.strip()) == (0, "")
    assert "the answer ended within the model's reasoning" in err


def test_chat_with_a_server_without_a_template_completes_the_text(monkeypatch, capsys):
    pytest.importorskip("httpx")
    with FakeServer() as server:
        server.template, server.text = False, "xy"
        code, out, err = talk(monkeypatch, capsys, "one\ntwo\n", "--url", server.url, "--max-tokens", "2")
    assert (code, out) == (0, "xyxy\nxyxy\n")
    assert err.count("no chat template") == 1
    assert [body.get("prompt") for body in server.bodies] == [None, "one", "onexyxy\ntwo"]


def test_chat_without_prompt_toolkit_names_the_extra(monkeypatch, capsys):
    stdin = io.StringIO()
    stdin.isatty = lambda: True
    monkeypatch.setattr(sys, "stdin", stdin)
    monkeypatch.setitem(sys.modules, "prompt_toolkit", None)
    assert main(["chat"]) == 2
    assert "pip install 'quire-attention[chat]'" in capsys.readouterr().err


def test_completed_text_of_a_conversation_ends_each_turn():
    said = [("user", "a"), ("assistant", "b\n"), ("user", "c"), ("assistant", "d"), ("user", "e")]
    assert chat.completed([{"role": role, "content": text} for role, text in said]) == "ab\ncd\ne"


_READY, _ENTERED = b"\x1b[?2004h", b"\x1b[?2004l"  # prompt_toolkit switches the marks of pasted text on and off
_CHILD = """if True:
    import fcntl, signal, sys, termios
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    from quire.cli import main
    sys.exit(main(["chat", *sys.argv[1:], "--max-tokens", "1000"]))
    """


class Terminal:
    """The user's end of a terminal."""

    def __init__(self, end: int) -> None:
        self.end, self.shown = end, b""

    def wait(self, text: bytes) -> bytes:
        """What is shown until `text`, and drop it."""
        limit = time.monotonic() + 30
        while text not in self.shown:
            assert select.select([self.end], [], [], max(0, limit - time.monotonic()))[0], (text, self.shown)
            self.shown += os.read(self.end, 4096)
        before, self.shown = self.shown.split(text, 1)
        return before

    def type(self, text: bytes) -> None:
        os.write(self.end, text)


def test_chat_in_a_terminal_handles_ctrl_c_and_ctrl_d():
    """Ctrl-C stops an answer of ten seconds, and drops a line at the prompt; Ctrl-D ends."""
    pytest.importorskip("httpx")
    pytest.importorskip("prompt_toolkit")
    pty = pytest.importorskip("pty")
    ours, theirs = pty.openpty()
    env = {**os.environ, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"}
    server = FakeServer(gap=0.01)
    server.text = "line\n"
    command = [sys.executable, "-c", _CHILD, "--url", server.url]
    child = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=env, start_new_session=True)
    os.close(theirs)
    try:
        with server:
            terminal = Terminal(ours)
            terminal.wait(b"Ctrl-D ends")
            terminal.wait(_READY)
            terminal.type(b"hello\r")
            terminal.wait(_ENTERED)
            terminal.wait(b"line")
            terminal.type(b"\x03")
            assert len(terminal.wait(_READY)) < 3000
            terminal.type(b"nonsense\x03")
            terminal.wait(_READY)
            terminal.type(b"/help\r")
            terminal.wait(b"forget what has been said")
            terminal.wait(_READY)
            terminal.type(b"\x04")
            assert child.wait(20) == 0
    finally:
        child.kill()
        child.wait()
        os.close(ours)
