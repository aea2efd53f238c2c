"""How llguidance compiles a grammar, within which limits; and a program that tries it in a process of its own.

llguidance bounds the expressions and items that it makes, but not all of its work: three thousand rules that begin with
each other overflow the stack, which ends the process. So this file is also a program (see
`quire.engine.grammar_process`) that compiles each grammar in a fork of itself, with bounded time and a small stack. It
imports neither torch nor anything of Quire.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
from reprlib import repr as shortened
from typing import Any

# The fuel counts expressions. All but step_lexer_fuel are below llguidance's defaults. Schemas of 30 KB with hundreds
# of properties need most of this, and a string of n characters whose length has a bound needs about 6 n states, at half
# a kilobyte each.
LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 200_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 20_000,
    "max_lexer_states": 100_000,
    "max_grammar_size": 100_000,
}
# CPU time of one grammar.
CPU_SECONDS = 2.0
# Wall-clock time of one grammar, in case it waits instead of computing.
_WALL_SECONDS = 60.0
# Bytes, less than any thread of the engine has.
_STACK = 1 << 20
# Between the tokens of JSON: a few spaces, or one new line and its indentation. Without a bound, a model can fill its
# output with white space.
SPACE = r"[ \t]{1,4}|\r?\n[ \t]{0,64}"
# The beginning of a rule of GBNF. No line of a Lark grammar begins so.
_GBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
# A backslash and what it escapes; the groups are the code points of characters with leading zeros.
_ESCAPE = re.compile(r"\\(?:u(0[0-9a-fA-F]{3})|U(0[0-9a-fA-F]{7})|.)", re.DOTALL)


def compiled(tokenizer: Any, end: int, name: str, text: str) -> Any:
    """The matcher of a grammar at its start.

    Args:
        tokenizer: of llguidance.
        end: its end token, which is no token of the model.
        name, text: the attribute of SamplingParams that has the grammar, and its value.

    Raises:
        ValueError: the grammar is not one, allows no text, or exceeds a limit.
    """
    from llguidance import LLMatcher, LLParserLimits

    make = {
        "json_schema": lambda: LLMatcher.grammar_from_json_schema(text, defaults={"whitespace_pattern": SPACE}),
        "regex": lambda: LLMatcher.grammar_from_regex(text),
        "grammar": lambda: LLMatcher.grammar_from_lark(_lark(text)),
    }
    limits = LLParserLimits(verbose_errors=False, **LIMITS)
    try:
        state = LLMatcher(tokenizer, make[name](), log_level=0, limits=limits)
    except ValueError as error:
        raise refused(name, text, str(error)) from None
    # The first masks take the longest, and copies share the lexer states that they find. Some grammars fail only at
    # their first token.
    first = next((token for token in _tokens(state.compute_bitmask()) if token != end), None)
    probe = state.deep_copy()
    if first is not None:
        probe.consume_token(first)
        probe.compute_bitmask()
    elif state.is_accepting() or reason(state) == "NoExtensionBias":
        raise refused(name, text, f"it allows {'only the empty text' if state.is_accepting() else 'no text'}")
    if probe.is_error():
        raise refused(name, text, reason(probe))
    return state


def _lark(text: str) -> str:
    """A grammar in Lark's language, which may be given as GBNF.

    Raises:
        ValueError: it is given as GBNF, and llguidance does not convert it.
    """
    if not _GBNF_RULE.search(text):
        return text
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return gbnf_to_lark(_ESCAPE.sub(_character, text))
    except Exception as error:
        # The converter raises `Exception` itself, and Python an IndexError for texts that end within an escape.
        why = "it ends within an escape" if isinstance(error, IndexError) else str(error)
        raise ValueError(f"it is not a grammar in GBNF: {why[:300]}") from None


def _character(escape: re.Match[str]) -> str:
    """An escape of GBNF without leading zeros, which llguidance's converter drops: "\\u0410" would become "\\u410"."""
    digits = escape[1] or escape[2]
    if digits is None:
        return escape[0]
    code = int(digits, 16)
    # Characters that have a meaning in a class or a string stay escaped.
    return f"\\x{code:02x}" if code < 128 else chr(code) if code <= sys.maxunicode else escape[0]


def refused(name: str, text: str, why: str) -> ValueError:
    """The error of a grammar."""
    return ValueError(f"{name} = {shortened(text)}: {why}")


def reason(state: Any) -> str:
    """Why a matcher has failed, without its state or a backtrace; lines that quote a long grammar are cut."""
    lines = state.get_error().partition("\n<")[0].strip().splitlines()
    text = "\n".join(line if len(line) <= 300 else f"{line[:150]} ... {line[-150:]}" for line in lines)
    if "too many expressions" in text:
        text += f": {LIMITS['initial_lexer_fuel']} are the most at its start, {LIMITS['step_lexer_fuel']} for a token"
    return text


def _tokens(mask: bytes) -> Any:
    """The tokens of a mask of bits, the lowest bit first."""
    return (8 * i + bit for i, byte in enumerate(mask) if byte for bit in range(8) if byte >> bit & 1)


def _answer(tokenizer: Any, end: int, name: str, text: str) -> str:
    """Compile a grammar in a fork of this process; return why it is refused, or ""."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        _bounded(lambda: os.write(writer, b"+" + _refusal(tokenizer, end, name, text).encode()[:8192]))
    os.close(writer)
    with open(reader, "rb") as file:
        answer = file.read().decode("utf-8", "replace")
    status = os.waitpid(child, 0)[1]
    if answer:
        return answer[1:]
    if not os.WIFSIGNALED(status):
        return str(refused(name, text, "llguidance fails"))
    if os.WTERMSIG(status) in (signal.SIGPROF, signal.SIGALRM):
        return str(refused(name, text, f"llguidance needs more than {CPU_SECONDS:g} s for it, which are the most"))
    return str(refused(name, text, f"llguidance fails with {signal.Signals(os.WTERMSIG(status)).name}"))


def _refusal(tokenizer: Any, end: int, name: str, text: str) -> str:
    try:
        compiled(tokenizer, end, name, text)
    except ValueError as error:
        return str(error)
    return ""


def _bounded(work: Any) -> None:
    """Do the work of this process, with bounded time and stack, and end the process."""
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    signal.setitimer(signal.ITIMER_REAL, _WALL_SECONDS)
    threading.stack_size(_STACK)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    os._exit(0)


def main() -> None:
    """Read lines of JSON: the module path, the tokenizer, its size and its end token; then a grammar in each. Write
    "null" when the tokenizer is ready, and for each grammar why it is refused, as JSON.
    """
    # Where all cores are busy, the engine is first: its requests do not wait for the grammars of others.
    os.nice(10)
    # Ctrl-C in a terminal is for the process that started this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    lines = map(json.loads, sys.stdin.buffer)
    sys.path[:], source, size, end = next(lines)
    from llguidance import LLTokenizer

    tokenizer = LLTokenizer(source, n_vocab=size, eos_token=end)
    print("null", flush=True)
    for name, text in lines:
        print(json.dumps(_answer(tokenizer, end, name, text)), flush=True)


if __name__ == "__main__":
    main()
