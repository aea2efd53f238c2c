"""The drivers of examples/backends complete prompts as the engine and Transformers do: in chunks, over cached prefixes
that may be computed in the same step, after preemptions and, on a GPU, by captured graphs.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from array import array
from itertools import product

import pytest
import torch

pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM

from helpers.paths import ROOT
from quire.backends import vllm
from quire.engine import LLM, SamplingParams
from quire.engine.batch import Chunk
from quire.engine.llm import shipped_model
from quire.engine.request import Request
from quire.engine.runner import Runner

FOLDER = ROOT / "examples" / "backends"
LAYOUTS = {"lorax": ["NHD"], "pymllm": ["NHD"], "sglang": ["NHD"], "vllm": ["NHD", "HND"]}  # by driver


def load(name):
    """A driver's module, by its path; the folder does not stay where imports look, since one is called vllm."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    before = list(sys.path)
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path[:] = before
    return module


def cases():
    """Each driver with both page sizes on the CPU, and with everything on a GPU."""
    for name, layouts in LAYOUTS.items():
        yield "cpu", name, layouts[0], 1, 20, "float32"
        yield pytest.param("cpu", name, layouts[-1], 16, -1, "bfloat16", marks=pytest.mark.slow)
        for rest in product(layouts, (1, 16), (-1, 20), ("float32", "bfloat16")):
            yield pytest.param("cuda", name, *rest, marks=pytest.mark.gpu)


@pytest.mark.parametrize(("device", "name", "layout", "page_size", "window", "dtype"), list(cases()))
def test_examples_drivers_have_the_engines_tokens(device, name, layout, page_size, window, dtype, monkeypatch, capsys):
    monkeypatch.setattr(vllm, "FLASHINFER_KV_CACHE_LAYOUT", layout)  # the driver sets it, and here it is undone
    options = {"--layout": layout, "--page-size": page_size, "--window": window, "--dtype": dtype, "--device": device}
    code = load(name).main([f"{key}={value}" for key, value in options.items()])
    report = capsys.readouterr().out
    assert code == 0, report
    reused, preemptions = (int(x) for x in re.search(r"(\d+) tokens of prompts reused, (\d+) pre", report).groups())
    assert reused > 0
    assert preemptions > 0


def test_examples_all_drivers_are_tested():
    assert {path.stem for path in FOLDER.glob("*.py")} - {"common", "token_pool"} == set(LAYOUTS)


def random_load(rng, page_size):
    """Prompts that arrive together. After each new one comes another with the same full pages and one token more, whose
    first chunk has thus one token; then some that share fewer pages, have longer ends, or are equal to it.
    """
    prompts = []

    def tokens(count):
        return [rng.randrange(300, 1000) for _ in range(count)]

    while len(prompts) < 8:
        first = tokens(rng.randint(1, 2) * page_size)
        prompts += [first + tokens(1), first + tokens(1)]
        for _ in range(rng.randint(0, 3)):
            shared = rng.randint(1, len(first) // page_size) * page_size
            end = tokens(rng.choice((1, 2, page_size, page_size + 1)))
            prompts.append(rng.choice((prompts[-1], first[:shared] + end)))
    return prompts


def observed(runner):
    """A subclass that counts its chunks of one token that read pages which a longer chunk of the same step writes."""

    class Observed(runner):
        dependent = 0

        def run(self, chunks):
            written = set()
            for chunk in chunks:
                pages = chunk.request.pages
                if chunk.count > 1:
                    written.update(pages[chunk.start // self.page_size :])
                else:
                    Observed.dependent += not written.isdisjoint(pages)
            return super().run(chunks)

    return Observed


@pytest.fixture(scope="module")
def reference():
    """The shipped model in Transformers, with attention of its own and without a cache."""
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(shipped_model(), **options).eval()


def check(reference, completions):
    """Assert that each token is the most likely after those before it, and as likely as the driver says."""
    rows = [torch.tensor(done.prompt_token_ids + done.token_ids) for done in completions]
    # A causal model's logits do not depend on the padding after a row.
    with torch.inference_mode():
        logits = reference(torch.nn.utils.rnn.pad_sequence(rows, batch_first=True), use_cache=False).logits
    for done, row in zip(completions, logits.log_softmax(-1), strict=True):
        start = len(done.prompt_token_ids) - 1
        exact = row[start : start + len(done.token_ids)]
        chosen = exact.gather(1, torch.tensor(done.token_ids)[:, None])[:, 0]
        given = torch.tensor([likely[token] for token, likely in zip(done.token_ids, done.logprobs, strict=True)])
        torch.testing.assert_close(chosen, exact.amax(1), atol=1e-3, rtol=0)
        torch.testing.assert_close(given, chosen, atol=1e-3, rtol=0)


@pytest.fixture
def driver(device, name, page_size, rng, monkeypatch):
    """An example's runner, observed, with one of its layouts."""
    layout = rng.choice(LAYOUTS[name])
    monkeypatch.setattr(vllm, "FLASHINFER_KV_CACHE_LAYOUT", layout)
    common, module = load("common"), load(name)
    own = [x for x in vars(module).values() if getattr(x, "__module__", None) == module.__name__]
    (runner,) = (x for x in own if isinstance(x, type) and issubclass(x, Runner))
    return observed(common.set_up(runner, common.arguments("", [f"--layout={layout}", f"--page-size={page_size}"])))


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("device", DEVICES)
def test_examples_prompts_with_one_prefix_arrive_together_same_tokens_as_transformers(
    device, name, page_size, rng, reference, driver
):
    params = SamplingParams(temperature=0, max_tokens=page_size + 6, ignore_eos=True, logprobs=1)
    # The cache has room for the longest prompt and its output. All requests together mostly cause preemptions.
    options = {"page_size": page_size, "num_pages": 6 + 8 // page_size, "max_batched_tokens": 5 * page_size + 3}
    with LLM(device=device, dtype="float32", runner=driver, **options) as llm:
        for _ in range(2):
            check(reference, llm.generate(random_load(rng, page_size), params))
    assert driver.dependent > 0


@pytest.mark.parametrize("page_size", [4])
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("device", DEVICES)
def test_examples_preempted_request_shares_pages_of_its_step_same_logits_as_transformers(
    device, name, page_size, rng, reference, driver
):
    """Of two equal requests that are admitted again, the second has output and one token that no page has."""
    tokens = [rng.randrange(300, 1000) for _ in range(2 * page_size + 1)]
    pages = [array("i", [3, 1, last]) for last in (0, 2)]
    requests = [Request(tokens, SamplingParams(), None, frozenset(), lambda update: None) for _ in pages]
    for request, own in zip(requests, pages, strict=True):
        request.pages, request.prompt_len = own, page_size
    chunks = [Chunk(requests[0], 0, len(tokens), True), Chunk(requests[1], len(tokens) - 1, 1, True)]
    options = {"page_size": page_size, "num_pages": 6}
    with LLM(device=device, dtype="float32", runner=driver, **options) as llm, torch.inference_mode():
        logits = llm._engine.runner.run(chunks).cpu()
        exact = reference(torch.tensor([tokens]), use_cache=False).logits[0, -1:]
    torch.testing.assert_close(logits, exact.expand(2, -1), atol=1e-3, rtol=1e-3)
