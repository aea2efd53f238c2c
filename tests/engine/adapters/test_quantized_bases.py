"""Adapters over weights that stay quantized: tokens are those of PEFT's merge into the dequantized weights."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")
pytest.importorskip("peft")

from transformers import AutoModelForCausalLM

from helpers import quantized
from helpers.adapters import merged, save_adapter
from quire.engine import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPTS = [[1, 2, 3], [7] * 20, [40, 3, 1, 60, 11]]


# Of the formats, one that merges projections, and one whose columns are in different orders, so that it does not.
@pytest.mark.parametrize("name", ["fp8 block", "gptq act-order", "ct int4 asymmetric"])
@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_llm_with_an_adapter_over_weights_that_stay_quantized_has_the_tokens_of_merged_ones(
    compile, name, llama, tmp_path
):
    folder, dense = quantized.quantize(llama, tmp_path, name)
    model = AutoModelForCausalLM.from_pretrained(dense, dtype="float32")
    adapter = save_adapter(model, tmp_path / "adapter", r=5, lora_alpha=12, target_modules="all-linear")
    with LLM(dense, num_pages=64) as llm:
        alone = [done.token_ids for done in llm.generate(PROMPTS, GREEDY)]
    merged(model, adapter).save_pretrained(tmp_path / "merged")
    with LLM(tmp_path / "merged", num_pages=64) as llm:
        expected = [done.token_ids for done in llm.generate(PROMPTS, GREEDY)]
    assert expected != alone
    options = {"dequantize": False, "compile": compile, "max_adapters": 1, "num_pages": 64}
    with LLM(folder, adapters={"a": adapter}, **options) as llm:
        done = llm.generate(PROMPTS * 2, GREEDY, adapter=["a"] * 3 + [None] * 3)
        assert [each.token_ids for each in done] == expected + alone
