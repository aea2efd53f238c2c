"""Every field of AttentionSpec and MaskSpec is computed by each kernel family, or in the list of those it declines."""

from __future__ import annotations

from dataclasses import fields, make_dataclass

import pytest
import torch

from helpers.families import LAYERS, compute
from helpers.interpret import INTERPRETED
from quire.bench.batches import Batch, random_batch, relative_error
from quire.definition import AttentionSpec, attention_spec, oracle
from quire.definition.items import Items
from quire.definition.masks import MaskSpec
from quire.definition.spec import MASK_FIELDS
from quire.kernels import registry
from quire.kernels.call import Call
from quire.kernels.family import Family

BF16 = torch.bfloat16
BASE = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim_qk": 64, "q_dtype": BF16}
# For each field a layer that differs from BASE in it, and in fields without which it would mean nothing.
CHANGES = {
    "num_qo_heads": {"num_qo_heads": 8},
    "num_kv_heads": {"num_kv_heads": 4},
    "head_dim_qk": {"head_dim_qk": 128},
    "head_dim_vo": {"head_dim_vo": 128},
    "q_dtype": {"q_dtype": torch.float16},
    "kv_dtype": {"kv_dtype": torch.float8_e4m3fn},
    "o_dtype": {"o_dtype": torch.float32},
    "causal": {"causal": False},
    "window_left": {"window_left": 4},
    "window_right": {"causal": False, "window_right": 2},
    "logits_soft_cap": {"logits_soft_cap": 0.5},
    "sm_scale": {"sm_scale": 0.5},
    "pos_encoding": {"pos_encoding": "ALIBI"},
    "rope_scale": {"pos_encoding": "ROPE_LLAMA", "rope_scale": 8.0},
    "rope_theta": {"pos_encoding": "ROPE_LLAMA", "rope_theta": 50.0},
    "custom_mask": {"custom_mask": True, "causal": False},
    "items": {"items": True},
    "sinks": {"sinks": True},
    "latent": {"latent": True, "num_qo_heads": 16, "num_kv_heads": 1, "head_dim_qk": 576, "head_dim_vo": 512},
    "batch_invariant": {"batch_invariant": True},
    "slopes": {"pos_encoding": "ALIBI", "slopes": (0.9, 0.1, 0.5, 0.3)},
}
SETTINGS = {f.name for record in (AttentionSpec, MaskSpec) for f in fields(record) if f.init} - {"mask"}
# Who declines a layer that sets one of these fields. Every family computes the others.
DECLINED = {
    "hopper": {"head_dim_vo", "rope_scale", "rope_theta"},
}
FAMILIES = [
    "cpu",
    "reference",
    pytest.param("triton", marks=() if INTERPRETED else pytest.mark.gpu),
    pytest.param("hopper", marks=pytest.mark.gpu),
]
Q_LENS, KV_LENS = [3, 1, 4], [40, 7, 33]


def batch_of(spec: AttentionSpec) -> tuple[Batch, Items | None]:
    """A batch of a layer: keys of a latent layer are still in one piece, as the oracle reads them."""
    batch = random_batch(spec, Q_LENS, KV_LENS, 16)
    if spec.sinks:
        batch.sinks.add_(2)  # or all of them may be too small to matter beside 40 keys
    if not spec.mask.items:
        return batch, None
    positions = torch.arange(1, 41).repeat(3) % 7
    return batch, Items(torch.tensor([5, 2, 9], dtype=torch.int32), positions.int(), 40)


def expected(batch: Batch, items: Items | None) -> torch.Tensor:
    """The definition. Values of a latent layer are the first part of its keys."""
    spec = batch.spec
    v = batch.k[..., : spec.head_dim_vo] if spec.latent else batch.v
    given = {"mask": batch.mask, "items": items, "sinks": batch.sinks}
    return oracle.attend_batch(batch.q, batch.k, v, batch.qo, batch.kv, spec, **given)[0]


@pytest.mark.interpret
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", CHANGES)
def test_family_given_each_field_computes_or_declines_it(name, family):
    spec = attention_spec(**{**BASE, **CHANGES[name]})
    device = torch.device("cuda" if family in ("triton", "hopper") and not INTERPRETED else "cpu")
    reason = registry.why_not(family, spec, device, max(Q_LENS))
    assert (reason is not None) == (name in DECLINED.get(family, ())), reason or "it is computed by now"
    if reason is not None:
        with pytest.raises(ValueError, match="no kernels for this attention"):
            registry.choose(spec, device, family, max(Q_LENS))
        return
    batch, items = batch_of(spec)
    given = {"items": items, "max_q_len": max(Q_LENS)}
    if spec.latent:
        first, second = spec.head_dim_vo, slice(spec.head_dim_vo, None)
        given |= {"q": batch.q[..., :first], "k": batch.k[..., :first], "v": batch.k[..., :first]}
        given |= {"q_pe": batch.q[..., second], "k_pe": batch.k[..., second]}
    out, _ = compute(batch, family, **given)
    exact = expected(batch, items)
    assert relative_error(out, exact) < 6e-3
    shape = {name: x for name, x in CHANGES[name].items() if name.startswith(("num_", "head_dim", "pos_", "latent"))}
    neutral = attention_spec(**{**BASE, **shape})
    if name in (
        "causal",
        "window_left",
        "window_right",
        "logits_soft_cap",
        "sm_scale",
        "custom_mask",
        "items",
        "sinks",
        "rope_scale",
    ):
        without = relative_error(expected(Batch(neutral, *tensors(batch)), None), exact)
        assert without > 0.02, "the field changes nothing here: who ignores it would pass"


def tensors(batch: Batch) -> tuple:
    return batch.q, batch.k, batch.v, batch.qo, batch.kv


def test_changes_and_layers_set_every_field():
    assert set(CHANGES) == SETTINGS
    drawn = {name for layer in LAYERS.values() for name in layer}
    missing = MASK_FIELDS - drawn - {"items"}  # which random batches do not have: see tests/definition/test_items.py
    assert not missing, f"LAYERS of helpers/families.py set no {missing}"
    for name in registry.FAMILIES:
        if name != "hopper" or registry.why_not("hopper", attention_spec(**BASE), torch.device("cpu")):
            family = registry.family(name)
            assert family.computes <= set(CHANGES), family.name
            assert family.name == name


def test_family_given_an_unknown_field_declines_it(monkeypatch):
    """Every family declines a layer that sets a field which its kernels do not name."""

    class Newer(Family):
        name, computes = "newer", registry.family("cpu").computes

        def declines(self, spec, device, max_q_len):
            return None

        def attend(self, call: Call, out, lse):
            return None

    spec = attention_spec(**BASE)
    grown = make_dataclass("Grown", [("glow", float, 0.0)], bases=(object,), frozen=True)
    monkeypatch.setattr("quire.kernels.family._DEFAULTS", {"glow": 0.0})
    assert Newer().why_not(grown(), torch.device("cpu")) is None
    assert Newer().why_not(grown(0.5), torch.device("cpu")) == "it does not compute glow"
    monkeypatch.undo()
    assert Newer().why_not(spec.replace(window_left=3), torch.device("cpu")) is None
