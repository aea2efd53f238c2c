"""Calls of tools as models write them, and texts that parsers of them must stand."""

from __future__ import annotations

import json
import random
from typing import Any

Call = tuple[str, dict[str, Any]]
_CALLS, _CALL = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"
_SEPARATOR, _END, _ENDS = "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"
MARKS = [
    "<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", _CALLS, _CALL, _SEPARATOR,
    _END, _ENDS, "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|start|>", "<|return|>", "<think>", "</think>",
    "```json\n", "\n```",
]  # fmt: skip
_TEXTS = [
    "",
    "a",
    "two words",
    'say "so"',
    "back\\slash\\",
    "tab\t",
    "größe",
    "数",
    "\U0001f60a",
    "{",
    "}]",
    "[{",
    '\\"',
]


def _dumps(value: Any, rng: random.Random) -> str:
    """JSON, in one of the forms that it may have."""
    return json.dumps(value, ensure_ascii=rng.random() < 0.3, indent=2 if rng.random() < 0.2 else None)


def _object(call: Call, arguments: str, rng: random.Random) -> str:
    return f'{{"name": {json.dumps(call[0])}, "{arguments}": {_dumps(call[1], rng)}}}'


def _hermes(calls: list[Call], rng: random.Random) -> str:
    return "\n".join(f"<tool_call>\n{_object(call, 'arguments', rng)}\n</tool_call>" for call in calls)


def _llama3(calls: list[Call], rng: random.Random) -> str:
    tag = rng.choice(["", "<|python_tag|>"])
    return tag + "; ".join(_object(call, "parameters", rng) for call in calls)


def _mistral(calls: list[Call], rng: random.Random) -> str:
    return f"[TOOL_CALLS][{', '.join(_object(call, 'arguments', rng) for call in calls)}]"


def _mistral_by_name(calls: list[Call], rng: random.Random) -> str:
    middle = rng.choice(["[ARGS]", "[CALL_ID]abcdefghi[ARGS]", ""])
    return "".join(f"[TOOL_CALLS]{name}{middle}{_dumps(arguments, rng)}" for name, arguments in calls)


def _deepseek(calls: list[Call], rng: random.Random) -> str:
    each = [
        f"{_CALL}function{_SEPARATOR}{name}\n```json\n{_dumps(arguments, rng)}\n```{_END}" for name, arguments in calls
    ]
    return _CALLS + "\n".join(each) + _ENDS


def _deepseek_v31(calls: list[Call], rng: random.Random) -> str:
    each = [f"{_CALL}{name}{_SEPARATOR}{_dumps(arguments, rng)}{_END}" for name, arguments in calls]
    return _CALLS + "".join(each) + _ENDS


def _gpt_oss(calls: list[Call], rng: random.Random) -> str:
    heads = ["<|channel|>commentary to=functions.{} <|constrain|>json<|message|>"]
    heads += [" to=functions.{}<|channel|>commentary json<|message|>"]
    each = [rng.choice(heads).format(name) + _dumps(arguments, rng) for name, arguments in calls]
    return "<|call|><|start|>assistant".join(each)


# The name of each format, and how calls are written in it; some formats have several ways.
WRITERS = [
    ("hermes", _hermes),
    ("llama3", _llama3),
    ("mistral", _mistral),
    ("mistral", _mistral_by_name),
    ("deepseek", _deepseek),
    ("deepseek", _deepseek_v31),
    ("gpt_oss", _gpt_oss),
]


_SHOWN = (
    "{% if tools %}<|system|>{{ tools | tojson }}<|eot|>{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}"
)
_CALL_OBJECT = '{"name": "{{ c.function.name }}", "KEY": {{ c.function.arguments | tojson }}}'
_LAST = "<|eot|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"


def _template(calls: str, last: str = _LAST) -> str:
    return f"{_SHOWN}{{% for c in m.tool_calls or [] %}}{calls}{{% endfor %}}{last}"


_THINKING = (
    "{% if add_generation_prompt %}{% if thinks is defined and not thinks %}<think>\n\n</think>\n\n"
    "{% elif reasoning_effort is defined %}<think>\n{% endif %}{% endif %}"
)
# Templates that write calls as the formats do; "unknown" writes them as no format does.
TEMPLATES = {
    "hermes": "{# <tool_call>{}</tool_call> #}" + _template(
        "<tool_call>\n" + _CALL_OBJECT.replace("KEY", "arguments") + "\n</tool_call>"
    ) + _THINKING,
    "llama3": _template(_CALL_OBJECT.replace("KEY", "parameters")),
    "mistral": _SHOWN + "{% if m.tool_calls %}[TOOL_CALLS][{% for c in m.tool_calls %}"
    "{% if c.id | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif %}"
    + _CALL_OBJECT.replace("KEY", "arguments") + "{% if not loop.last %}, {% endif %}{% endfor %}]{% endif %}" + _LAST,
    "mistral_by_name": _template("[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}"),
    "deepseek": _SHOWN + "{% if m.tool_calls %}" + _CALLS + "{% for c in m.tool_calls %}"
    + _CALL + "{{ c.type }}" + _SEPARATOR + "{{ c.function.name + '\n```json\n' + c.function.arguments + '\n```' }}"
    + _END + "{% endfor %}" + _ENDS + "{% endif %}" + _LAST + "{% if add_generation_prompt %}<think>\n{% endif %}",
    "deepseek_v31": _template(_CALL + "{{ c.function.name }}" + _SEPARATOR + "{{ c.function.arguments }}" + _END),
    "gpt_oss": "{% for m in messages %}<|start|>{{ m.role }}{% for c in m.tool_calls or [] %}"
    " to=functions.{{ c.function.name }}<|channel|>commentary json<|message|>"
    "{{ c.function.arguments | tojson }}<|call|>"
    "{% else %}{% if m.role == 'assistant' %}<|channel|>analysis<|message|>{{ m.thinking }}<|end|><|start|>assistant"
    "<|channel|>final{% endif %}<|message|>{{ m.content }}<|end|>{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}",
    "unknown": _template("<call {{ c.function.name }}>{{ c.function.arguments | tojson }}</call>"),
}  # fmt: skip


def random_value(rng: random.Random, depth: int = 3) -> Any:
    """A value of JSON, whose strings may have any marks."""
    kind = rng.choice(["text", "mark", "number", "other", *(["object", "array"] if depth else [])])
    if kind == "text":
        return "".join(rng.choices(_TEXTS, k=rng.randint(0, 3)))
    if kind == "mark":
        return "".join(rng.choices([*MARKS, *_TEXTS], k=rng.randint(1, 4)))
    if kind == "number":
        return rng.choice([rng.randint(-(10**12), 10**12), rng.uniform(-1e6, 1e6), 0, 1e300])
    if kind == "other":
        return rng.choice([True, False, None])
    if kind == "array":
        return [random_value(rng, depth - 1) for _ in range(rng.randint(0, 3))]
    return {key: random_value(rng, depth - 1) for key in rng.sample([*_TEXTS, *MARKS], rng.randint(0, 3))}


def random_calls(rng: random.Random, names: list[str]) -> list[Call]:
    """One call or several."""
    keys = [["value", "größe", "<tool_call>", ""][i] for i in range(4)]
    return [
        (rng.choice(names), {key: random_value(rng) for key in rng.sample(keys, rng.randint(0, 3))})
        for _ in range(rng.randint(1, 3))
    ]


def random_parts(rng: random.Random, text: str) -> list[str]:
    """A text in parts, some of which are empty."""
    places = sorted(rng.choices(range(len(text) + 1), k=rng.choice([0, 1, 3, 10, len(text)])))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
