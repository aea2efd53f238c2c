"""Outputs that grammars constrain: complete ones are valid, in any batch and whenever the tokens are read."""

from __future__ import annotations

import json
import queue
import re
import subprocess
import sys
from functools import partial

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("llguidance")

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from helpers.checkpoints import save, save_with_tokenizer
from helpers.engines import captured_on_the_host, pages_add_up, read, same, until_idle
from helpers.schemas import is_valid, random_schema
from quire.engine import LLM, SamplingParams
from quire.engine.completion import NO_TOKEN
from quire.engine.sampler import Sampler

PROMPTS = ["import json\ndata = ", "def add(a, b):\n    return", "x = [", "for i in range("]
OBJECT = {"type": "object"}
LONG = {"type": "array", "items": {"type": "string", "minLength": 9, "maxLength": 9}, "minItems": 6, "maxItems": 6}


@pytest.fixture(scope="module")
def random_weights(tmp_path_factory):
    torch.manual_seed(13)
    return save_with_tokenizer("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def llm(random_weights):
    with LLM(random_weights) as llm:
        yield llm


@pytest.fixture(params=["shipped", "random weights"])
def folder(request):
    return None if request.param == "shipped" else request.getfixturevalue("random_weights")


def random_params(rng, **given):
    options = [
        {"temperature": 0},
        {"temperature": 1.0, "seed": rng.randrange(1000)},
        {"temperature": 0.7, "seed": rng.randrange(1000), "top_k": 20, "top_p": 0.9, "min_p": 0.01},
        {"temperature": 0, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
        {"temperature": 1.0, "seed": rng.randrange(1000), "presence_penalty": 1.0, "logprobs": rng.randrange(3)},
    ]
    return SamplingParams(**{**rng.choice(options), "max_tokens": 150, **given})


def requests_with_schemas(rng, count):
    """Prompts, parameters and schemas; every fourth request is free, and every fourth has an output of many tokens."""
    schemas = [(None, LONG, random_schema(rng), random_schema(rng))[i % 4] for i in range(count)]
    free = {"max_tokens": rng.randint(40, 60)}
    params = [random_params(rng, **(free if schema is None else {"json_schema": schema})) for schema in schemas]
    return [rng.choice(PROMPTS) for _ in schemas], params, schemas


@pytest.mark.slow
def test_json_schema_in_any_batch_and_depth_gives_valid_outputs(folder, rng):
    """In a pool so small that requests are preempted, with results read at once and one step late."""
    sizes = {"page_size": 4, "num_pages": 44, "max_num_seqs": 12, "max_batched_tokens": 24, "max_model_len": 176}
    prompts, params, schemas = requests_with_schemas(rng, 16)
    with LLM(folder, page_size=4, num_pages=44, max_model_len=176) as llm:
        alone = [llm.generate([prompt], given)[0] for prompt, given in zip(prompts, params, strict=True)]
    complete = [(c.text, s) for c, s in zip(alone, schemas, strict=True) if s is not None and c.finish_reason == "stop"]
    for text, schema in complete:
        assert is_valid(schema, json.loads(text)), (schema, text)
    assert len(complete) >= 4
    assert {c.finish_reason for c in alone} <= {"stop", "length"}
    for how in ("at once", "late", "late, inputs of graphs"):
        with LLM(folder, **sizes) as llm:
            llm._engine.depth = int(how != "at once")
            if how == "late, inputs of graphs":
                captured_on_the_host(llm, max_tokens=48)
            done = llm.generate(prompts, params)
            until_idle(llm)
            assert llm.stats.preemptions > 0
            same(done, alone, llm, prompts, params)
            assert pages_add_up(llm)


def test_json_schema_of_any_object_gives_objects(folder, rng):
    params = [random_params(rng, json_schema=OBJECT, temperature=1.0, seed=i, max_tokens=120) for i in range(24)]
    with LLM(folder, max_model_len=200) as llm:
        done = [c for c in llm.generate([PROMPTS[0]] * 24, params) if c.finish_reason == "stop"]
    assert done
    assert all(isinstance(json.loads(c.text), dict) for c in done)


@pytest.mark.parametrize(("options", "space"), [({}, r"[ \t]{0,4}|\r?\n[ \t]{0,64}"), ({"whitespace_pattern": ""}, "")])
def test_json_schema_with_whitespace_options_bounds_whitespace(llm, options, space):
    schema = {"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 4, "x-guidance": options}
    params = [SamplingParams(temperature=1, seed=i, max_tokens=240, json_schema=schema) for i in range(16)]
    done = [c for c in llm.generate([PROMPTS[0]] * 16, params) if c.finish_reason == "stop"]
    assert done
    assert all(re.fullmatch(rf"\[((,?)({space})[12]({space}))+\]", c.text) for c in done)


@pytest.mark.parametrize("depth", [0, 1])
def test_regex_and_grammar_outputs_match_them(folder, depth):
    regex = r"[0-9]{3}-(ab|größe)+;"
    grammar = 'start: "let " NAME " = " (NAME | "(" NAME ")") ";"\nNAME: /[a-z]{1,5}/'
    params = [SamplingParams(temperature=1, seed=i, max_tokens=90, regex=regex) for i in range(8)]
    params += [SamplingParams(temperature=1, seed=i, max_tokens=90, grammar=grammar) for i in range(8)]
    with LLM(folder, max_model_len=200) as llm:
        llm._engine.depth = depth
        done = llm.generate([PROMPTS[0]] * 16, params)
    for i, completion in enumerate(done):
        if completion.finish_reason == "stop":
            pattern = regex if i < 8 else r"let [a-z]{1,5} = ([a-z]{1,5}|\([a-z]{1,5}\));"
            assert re.fullmatch(pattern, completion.text), completion.text
    assert sum(c.finish_reason == "stop" for c in done) >= 8


GBNF = r"""
# JSON without nesting, in the form of llama.cpp's own grammars.
root   ::= "{" ws ( pair ("," ws pair){0,2} )? "}"
pair   ::= string ":" ws (string | number | "true" | "null")
string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt/] | "u" [0-9a-fA-F]{4}) # escapes
  ){0,4} "\""
number ::= "-"? ([0-9] | [1-9] [0-9]{0,3}) ("." [0-9]{1,3})?
ws     ::= " "?
"""


def test_gbnf_grammar_outputs_are_in_its_language(folder):
    with LLM(folder, max_model_len=200) as llm:
        params = [SamplingParams(temperature=1, seed=i, max_tokens=150, grammar=GBNF) for i in range(16)]
        done = llm.generate([PROMPTS[0]] * 16, params)
    complete = [json.loads(c.text) for c in done if c.finish_reason == "stop"]
    assert len(complete) >= 8
    assert all(isinstance(value, dict) for value in complete)


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        (r'root ::= "\u0410a\u0041\U0001F60A\\u0041"', "\u0410aA\U0001f60a\\u0041"),
        (r'root ::= "\u0022\x5c\u005c"', '"\\\\'),
        (r"root ::= [\u0410-\u0410] [^\u0000-\u0040\u0042-\U0010FFFF]", "\u0410A"),
        (r"root ::= [\u005d] [\u002d] [\u005e] [\x41-\x41]", "]-^A"),
        ('root ::= first-part fooBar\r\nfirst-part ::= "a/b" [/]\r\nfooBar ::= "::=\\n"', "a/b/::=\n"),
        ('start: "x ::= " A\nA: "y"', "x ::= y"),
    ],
)
def test_grammar_of_one_text_gives_this_text(llm, grammar, text):
    (done,) = llm.generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=60, grammar=grammar))
    assert (done.text, done.finish_reason) == (text, "stop")


def test_regex_without_a_last_character_ends_by_an_end_token_or_the_limit(llm):
    """A number can always have one more digit: the end token ends it, unless the request ignores end tokens."""
    (end,) = llm.model.end_ids
    params = [SamplingParams(temperature=1, seed=i, max_tokens=60, regex="[0-9]+") for i in range(30)]
    done = llm.generate([PROMPTS[0]] * 30, params)
    assert {c.token_ids[-1] for c in done if c.finish_reason == "stop"} == {end}
    assert all(c.text.isdecimal() for c in done)
    ignoring = SamplingParams(temperature=1, seed=1, max_tokens=20, regex="[0-9]+", ignore_eos=True)
    (digits,) = llm.generate(PROMPTS[0], ignoring)
    assert (len(digits.token_ids), digits.finish_reason) == (20, "length")
    assert digits.text.isdecimal()


def test_stop_tokens_beside_a_regex_end_complete_outputs_alone(llm):
    """Stop tokens that the grammar would take for text are no text."""
    stops = [llm.encode(letter)[0] for letter in "qxyz"]
    params = SamplingParams(temperature=1, max_tokens=60, regex="[a-z]{4,}", stop_token_ids=stops, ignore_eos=True)
    done = llm.generate([PROMPTS[0]] * 16, params)
    for completion in done:
        *before, last = completion.token_ids
        assert not set(stops) & set(before)
        if completion.finish_reason == "stop":
            assert last in stops
            assert re.fullmatch("[a-z]{4,}", completion.text)
    assert any(c.finish_reason == "stop" for c in done)


def test_logprobs_beside_a_regex_are_those_of_all_tokens(folder):
    """A grammar changes which token is chosen, not the report."""
    with LLM(folder) as llm:
        free = llm.generate(PROMPTS[1], SamplingParams(temperature=0, max_tokens=1, logprobs=5))[0]
        bound = llm.generate(PROMPTS[1], SamplingParams(temperature=0, logprobs=5, regex="[0-9]{3}"))[0]
    top_logprobs = {token: free.logprobs[0][token] for token in list(free.logprobs[0])[:5]}
    assert bound.text.isdecimal()
    reported = {token: value for token, value in bound.logprobs[0].items() if token in top_logprobs}
    assert reported == pytest.approx(top_logprobs, abs=1e-4)
    assert bound.token_ids[0] in bound.logprobs[0]


def test_mask_that_allows_no_token_ends_its_request_alone(random_weights):
    with LLM(random_weights) as llm:
        ends = [token for token in range(llm.model.vocab_size) if {*"bd"} & {*llm.model.tokenizer.decode([token])}]
        stuck = SamplingParams(temperature=1, seed=1, regex="[ac][bd]", stop_token_ids=ends, max_tokens=9)
        others = [SamplingParams(temperature=1, seed=i, json_schema=OBJECT, max_tokens=30) for i in range(3)]
        others += [SamplingParams(temperature=1, seed=9, max_tokens=30, logprobs=1)]
        expected = llm.generate(PROMPTS, others)
        for depth in (0, 1):
            llm._engine.depth = depth
            *done, failed = llm.generate([*PROMPTS, PROMPTS[0]], [*others, stuck])
            assert failed.finish_reason == "error"
            assert (failed.error, len(failed.token_ids)) == (NO_TOKEN, 1)
            until_idle(llm)
            same(done, expected, llm, PROMPTS, others)
            assert pages_add_up(llm)


def test_masked_logits_that_are_not_finite_end_their_request(random_weights):
    with LLM(random_weights) as llm:
        digits = llm._engine.request(PROMPTS[0], SamplingParams(regex="[0-9]{3}", temperature=0), lambda update: None)
        free = llm._engine.request(PROMPTS[0], SamplingParams(temperature=0), lambda update: None)
        allowed = llm.encode("5")[0]
        logits = torch.randn(2, llm.model.vocab_size)
        logits[:, 2] = 99.0
        broken = {value: logits.clone() for value in (torch.nan, torch.inf, -torch.inf)}
        for value, rows in broken.items():
            rows[0, :] = -torch.inf if value == -torch.inf else rows[0]
            rows[0, 2] = 99.0 if value == -torch.inf else value
        sampler = Sampler(torch.device("cpu"), 2)
        good, other = read(sampler.launch(logits, [digits, free]))
        assert llm.model.tokenizer.decode([good.token]).isdecimal()
        assert other.token == 2
        for rows in broken.values():
            bad, other = read(sampler.launch(rows, [digits, free]))
            assert bad.token is None
            assert other.token == 2
        penalised = logits.clone()
        penalised[0] = -5.0
        penalised[0, allowed] = 5.0
        assert read(sampler.launch(penalised, [digits, free]))[0].token == allowed


MANY_RULES = "start: " + " | ".join(f"r{i}" for i in range(2500)) + "".join(f"\nr{i}: /x/ /{i}/" for i in range(2500))
BAD = [
    ({"json_schema": {"type": "strin"}}, 'json_schema = \'{"type": "strin"}\': Invalid type: strin'),
    ({"json_schema": {"type": "array", "uniqueItems": True}}, "json_schema = .*uniqueItems"),
    ({"json_schema": {"enum": []}}, "json_schema = .*Unsatisfiable"),
    ({"json_schema": '{"const": "\\ud800"}'}, "json_schema = .*hex escape"),
    ({"json_schema": {"$ref": "http://host.invalid/schema"}}, "json_schema = .*not"),
    ({"regex": "(a"}, r"regex = '\(a': .*unclosed group"),
    ({"regex": "[^\\x00-\\x{10ffff}]"}, "regex = .*: it allows no text"),
    ({"regex": "()"}, "regex = .*: it allows only the empty text"),
    ({"regex": "(" * 20_000 + "a" + ")" * 20_000}, "regex = .*nest"),
    ({"grammar": "start: missing"}, "grammar = 'start: missing': .*missing"),
    ({"grammar": "start: /a/ <|other|>"}, "grammar = .*special token"),
    ({"grammar": 'root ::= ("a"'}, "grammar = .*it is not a grammar in GBNF: Expected '\\)' at line 1"),
    ({"grammar": "root ::= missing"}, "grammar = .*GBNF: Rule 'missing' not found"),
    ({"grammar": f"root ::= {'x' * 5000}"}, "grammar = .*GBNF: Rule 'xxx"),
    ({"grammar": 'first ::= "a"'}, "grammar = .*GBNF: No 'root' rule found"),
    ({"grammar": 'root ::= "a\\'}, "grammar = .*GBNF: it ends within an escape"),
    ({"grammar": f'root ::= {"(" * 20_000}"a"{")" * 20_000}'}, "grammar = .*GBNF: maximum recursion depth"),
    ({"grammar": r'root ::= "\["'}, "grammar = .*lexer error"),
    ({"grammar": r'root ::= "\U0000d800"'}, "grammar = .*surrogates not allowed"),
    ({"grammar": MANY_RULES}, "grammar = .*max is 2000"),  # which the first token shows
]


@pytest.mark.parametrize(("given", "message"), BAD, ids=lambda x: str(x)[:40])
def test_request_with_an_invalid_grammar_names_it(llm, given, message):
    for make in (partial(llm.generate, PROMPTS[0]), llm.prepare):
        with pytest.raises(ValueError, match=f"(?s)^{message}") as caught:
            make(SamplingParams(**given))
        assert len(str(caught.value)) < 2000


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"json_schema": "[]"}, r"json_schema = '\[\]': it must be a JSON schema"),
        ({"json_schema": "{"}, "json_schema = '{': it must be a JSON schema"),
        ({"json_schema": 5}, "json_schema = 5: it must be a JSON schema"),
        ({"json_schema": {"const": float("nan")}}, "json_schema = .*not JSON compliant"),
        ({"json_schema": {"const": {1}}}, "json_schema = .*set"),
        ({"json_schema": '{"items":' * 50_000 + "1" + "}" * 50_000}, "json_schema = .*recursion"),
        ({"regex": ""}, "regex = ''"),
        ({"grammar": 5}, "grammar = 5"),
        ({"regex": "\ud800"}, "regex = "),
        ({"json_schema": {}, "grammar": "start: A"}, "json_schema and grammar can't be combined"),
    ],
    ids=lambda x: str(x)[:40],
)
def test_params_with_an_invalid_constraint_name_it(given, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**given)


def test_params_with_a_schema_as_dict_or_text_are_equal():
    params = SamplingParams(json_schema=OBJECT)
    assert params.json_schema == '{"type": "object"}'
    assert params == SamplingParams(json_schema=params.json_schema)
    assert params.constraint == ("json_schema", params.json_schema)
    assert len({params, SamplingParams(regex="a"), SamplingParams()}) == 3


def test_json_schema_without_a_usable_tokenizer_is_refused(tmp_path):
    with LLM(save("llama", tmp_path / "none")) as llm, pytest.raises(ValueError, match="json_schema needs a tokenizer"):
        llm.generate([[1, 2]], SamplingParams(json_schema=OBJECT))
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "{": 1, "}": 2}, unk_token="[UNK]"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]").save_pretrained(tmp_path / "words")
    with LLM(save("llama", tmp_path / "words")) as llm:
        with pytest.raises(ValueError, match="json_schema can't be used: llguidance does not read the tokenizer"):
            llm.generate([[1, 2]], SamplingParams(json_schema=OBJECT))
        assert len(llm.generate([[1, 2]], SamplingParams(max_tokens=2, ignore_eos=True))[0].token_ids) == 2


@pytest.mark.slow
def test_json_schema_without_llguidance_names_the_package():
    code = """
import sys
sys.modules["llguidance"] = None
from quire.engine import LLM, SamplingParams
with LLM(num_pages=8, device="cpu") as llm:
    print(llm.generate("x", SamplingParams(max_tokens=2))[0].finish_reason, flush=True)
    llm.generate("x", SamplingParams(json_schema={}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "length"
    assert "ImportError: json_schema needs llguidance: pip install 'quire-attention[structured]'" in done.stderr


@pytest.mark.gpu
def test_json_schema_on_a_gpu_at_any_depth_gives_equal_outputs(random_weights, rng):
    """With graphs and without, results read at once and one step late."""
    prompts, params, schemas = requests_with_schemas(rng, 24)
    done = []
    for graphs in (True, False):
        with LLM(random_weights, device="cuda", dtype="float32", cuda_graphs=graphs, max_model_len=176) as llm:
            for depth in (0, 1):
                llm._engine.depth = depth
                done.append(llm.generate(prompts, params))
                until_idle(llm)
    for completions in done:
        for completion, schema in zip(completions, schemas, strict=True):
            assert completion.finish_reason in ("stop", "length")
            if schema is not None and completion.finish_reason == "stop":
                assert is_valid(schema, json.loads(completion.text))
        same(completions, done[0], llm, prompts, params)


@pytest.mark.parametrize(
    "hostile",
    [
        pytest.param({"regex": "(((a{100}){100}){100}){7}"}, id="too many expressions"),
        pytest.param(
            {"grammar": "start: r0\n" + "".join(f'r{i}: r{i + 1} "a"\n' for i in range(3000)) + 'r3000: "b"\n'},
            id="stack overflow",
        ),
    ],
)
def test_prepare_hostile_grammar_is_refused_and_remembered(llm, hostile, monkeypatch):
    """The process lives on, and a second request does no work."""
    params, fine = SamplingParams(**hostile), SamplingParams(regex="[0-9]{3}")
    with pytest.raises(ValueError, match=r"are the most|SIGSEGV") as first:
        llm.prepare(params)
    llm.prepare(fine)
    assert llm.prepared(fine)
    monkeypatch.setattr(llm._engine.grammars, "_compile", None)
    for known in (llm.prepare, llm.prepared):
        with pytest.raises(ValueError, match=r"are the most|SIGSEGV") as second:
            known(params)
        assert str(second.value) == str(first.value)


def test_prepare_endless_work_ends_at_the_bound_of_time(llm, monkeypatch):
    from quire.engine import grammar_compiler

    monkeypatch.setattr(grammar_compiler, "CPU_SECONDS", 0.05)

    def endless(*arguments):
        while True:
            pass

    monkeypatch.setattr(grammar_compiler, "_refusal", endless)
    assert "more than 0.05 s" in grammar_compiler._answer(None, 0, "regex", "a")


def test_prepare_compiler_that_raises_is_a_refusal(monkeypatch):
    from quire.engine import grammar_compiler

    def panic(*arguments):
        raise BaseException("panic")

    monkeypatch.setattr(grammar_compiler, "_refusal", panic)
    assert grammar_compiler._answer(None, 0, "regex", "a") == "regex = 'a': llguidance fails"


def test_start_grammar_that_is_held_is_not_compiled_again(llm, monkeypatch):
    """The engine has forgotten it since it was prepared."""
    params, parts = SamplingParams(regex="held [0-9]{2}", max_tokens=30), queue.SimpleQueue()
    grammar = llm.prepare(params)
    llm._engine.grammars.forget(grammar)
    assert llm.prepared(params) is None
    monkeypatch.setattr(llm._engine.grammars, "_compile", lambda *given: pytest.fail("it is compiled again"))
    llm.start([PROMPTS[0]] * 2, params, lambda index, part: parts.put((index, part)), grammar)
    ended = {}
    while len(ended) < 2:
        index, part = parts.get(timeout=60)
        ended |= {index: part.finish_reason} if part.finish_reason else {}
    assert set(ended.values()) <= {"stop", "length"}


def test_start_grammar_of_other_params_is_not_used(llm):
    other, parts = llm.prepare(SamplingParams(regex="[a-z]{9}")), queue.SimpleQueue()
    params = SamplingParams(regex="[0-9]{3}", max_tokens=30)
    llm.start(PROMPTS[0], params, lambda index, part: parts.put(part), other)
    text, reason = "", None
    while reason is None:
        part = parts.get(timeout=60)
        text, reason = text + part.text, part.finish_reason
    assert re.fullmatch("[0-9]{3}", text)
