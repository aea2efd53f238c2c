"""Which modules adapters change where modelling code is unusual: layers of one input that are called with others, heads
that compute all tokens, and layers that compute other rows than the tokens of a step.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("peft")

from transformers import AutoModelForCausalLM
from transformers.models.llama import modeling_llama

from helpers.adapters import assert_greedy, merged, save_adapter
from quire.engine import LLM, SamplingParams
from quire.engine.adapters.seen import seen_targets
from quire.engine.config import EngineConfig
from quire.engine.load import load_model

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8, 9, 7]]


@pytest.fixture
def mlp(monkeypatch):
    """Lets Llama's MLP compute in another way, which the attribute `kind` names."""

    class Mlp:
        kind = "own"

    def forward(self, x):
        if Mlp.kind == "other input":
            return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x.clone()))
        h = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        if Mlp.kind == "parts":
            return torch.cat([self.down_proj(part) for part in h.tensor_split(2, dim=1)], dim=1)
        return self.down_proj(h)

    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", forward)
    return Mlp


def network(adapted, name):
    return AutoModelForCausalLM.from_pretrained(adapted / ("base" if name is None else f"{name}-merged"))


def served(adapted, name, **options):
    return LLM(adapted / "base", max_adapters=1, adapter_rank_pages=3, adapters={"a": adapted / name}, **options)


def test_llm_merged_layer_that_is_called_with_another_input_adds_its_own_part(adapted, mlp):
    with served(adapted, "all", num_pages=64) as llm:
        mlp.kind = "other input"
        done = llm.generate(PROMPTS, GREEDY, adapter=["a", None, "a"])
    for prompt, name, completion in zip(PROMPTS, ("all", None, "all"), done, strict=True):
        assert_greedy(network(adapted, name), prompt, completion.token_ids)


def test_llm_layer_that_computes_other_rows_than_when_it_was_loaded_ends_the_request(adapted, mlp):
    with served(adapted, "all", num_pages=64) as llm:
        mlp.kind = "parts"
        done = llm.generate(PROMPTS, GREEDY, adapter=["a", None, None])
        assert "down_proj computes 3 rows of a step of 5: the adapters of the rows are not known" in done[0].error
        for prompt, completion in zip(PROMPTS[1:], done[1:], strict=True):
            assert_greedy(network(adapted, None), prompt, completion.token_ids)


def test_seen_targets_leave_out_layers_that_compute_other_rows_than_the_tokens(adapted, mlp):
    model = load_model(adapted / "base", torch.device("cpu"), EngineConfig(batch_invariant=True))
    width = model.width
    everything = seen_targets(model)
    mlp.kind = "parts"
    targets = seen_targets(model)
    assert model.chooses_rows
    assert {path for path in everything if path not in targets} == {f"model.layers.{i}.mlp.down_proj" for i in range(4)}
    assert {"lm_head", "model.embed_tokens", "model.layers.0.mlp.up_proj"} <= set(targets)
    assert model.width == width
    assert all(part.on for part in model.replacements)


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_llm_head_that_computes_all_tokens_adds_to_all(adapted, tmp_path, monkeypatch, batch_invariant):
    own = AutoModelForCausalLM.from_pretrained(adapted / "base")
    changed = merged(own, save_adapter(own, tmp_path / "head", r=5, target_modules=["lm_head", "q_proj"]))
    forward = modeling_llama.LlamaForCausalLM.forward

    def all_rows(self, *args, logits_to_keep=0, **kwargs):
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(modeling_llama.LlamaForCausalLM, "forward", all_rows)
    with LLM(
        adapted / "base",
        max_adapters=1,
        adapters={"a": tmp_path / "head"},
        num_pages=64,
        batch_invariant=batch_invariant,
    ) as llm:
        assert not llm._engine.runner.adapters.tables.head_has_rows
        done = llm.generate(PROMPTS, GREEDY, adapter=["a", None, "a"])
    for prompt, of, completion in zip(PROMPTS, (changed, network(adapted, None), changed), done, strict=True):
        assert_greedy(of, prompt, completion.token_ids)
