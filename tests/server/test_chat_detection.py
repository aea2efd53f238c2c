"""Which formats are found by a chat template, and what their templates take."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from transformers import AutoTokenizer

from helpers.chat_formats import TEMPLATES
from helpers.checkpoints import save_tokenizer
from quire.server.chat_output.detection import find_reasoning_format, find_tool_format
from quire.server.chat_output.markup import ChatMarkup

# The format of each template, and of its reasoning.
FOUND = {
    "hermes": ("hermes", "think"),
    "llama3": ("llama3", None),
    "mistral": ("mistral", None),
    "mistral_by_name": ("mistral", None),
    "deepseek": ("deepseek", None),
    "deepseek_v31": ("deepseek", None),
    "gpt_oss": ("gpt_oss", "gpt_oss"),
    "unknown": (None, None),
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder)
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("name", TEMPLATES)
def test_find_formats_of_a_template_are_those_that_it_writes(tokenizer, name):
    tokenizer.chat_template = TEMPLATES[name]
    found, style = find_tool_format(tokenizer)
    assert (found, find_reasoning_format(tokenizer)) == FOUND[name]
    assert style.json_arguments == name.startswith("deepseek")
    assert not style.empty_content


@pytest.mark.parametrize(
    ("template", "shown"),
    [
        ("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}", True),
        ("{% for m in messages %}{% if m.role in ('system', 'user') %}{{ m.content }}{% endif %}{% endfor %}", False),
        ("{% if messages[0].role != 'user' %}{{ raise_exception('no') }}{% endif %}{{ messages[0].content }}", False),
    ],
)
def test_markup_shows_developers_where_the_template_shows_their_messages(tokenizer, template, shown):
    tokenizer.chat_template = template
    assert ChatMarkup(tokenizer).shows_developers == shown


def test_find_tool_format_template_that_writes_xml_is_unknown(tokenizer):
    tokenizer.chat_template = TEMPLATES["unknown"].replace("<call ", "<tool_call>\n<function=")
    assert find_tool_format(tokenizer)[0] is None


def test_find_tool_format_several_templates_the_one_for_tools_counts(tokenizer):
    tokenizer.chat_template = {"default": "{{ messages[0].content }}", "tool_use": TEMPLATES["hermes"]}
    assert find_tool_format(tokenizer)[0] == "hermes"
    assert find_reasoning_format(tokenizer) == "think"


def test_find_tool_format_template_that_wants_text_takes_it(tokenizer):
    tokenizer.chat_template = TEMPLATES["hermes"].replace("{{ m.content or '' }}", "{{ m.content + '' }}")
    found, style = find_tool_format(tokenizer)
    assert (found, style.empty_content) == ("hermes", True)


@pytest.mark.parametrize(
    ("tool_format", "reasoning_format", "message"),
    [
        ("xml", None, "tool_format = 'xml': it must be one of hermes, gpt_oss"),
        (None, "xml", "reasoning_format = 'xml': it must be one of think, mistral"),
        ("transformers", None, "tool_format = 'transformers': the tokenizer has no response_template"),
    ],
)
def test_chat_markup_format_that_is_not_there_is_refused(tokenizer, tool_format, reasoning_format, message):
    with pytest.raises(ValueError, match=message):
        ChatMarkup(tokenizer, tool_format, reasoning_format)
