from __future__ import annotations

import math
from dataclasses import fields

import pytest
import torch

from quire.definition import attention_spec
from quire.definition.checks import as_dtype
from quire.definition.masks import MaskSpec

LAYER = {"num_qo_heads": 28, "num_kv_heads": 4, "head_dim_qk": 128}


def test_attention_spec_without_dtypes_takes_those_of_the_queries():
    spec = attention_spec(**LAYER, q_dtype=torch.bfloat16)
    assert (spec.head_dim_vo, spec.kv_dtype, spec.o_dtype) == (128, torch.bfloat16, torch.bfloat16)
    assert spec.sm_scale == 1 / math.sqrt(128)
    assert spec.group_size == 7


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_qo_heads": 30}, ["num_qo_heads", "30", "multiple of num_kv_heads = 4"]),
        ({"num_kv_heads": 0}, ["num_kv_heads", "0", "positive"]),
        ({"head_dim_qk": 100}, ["head_dim_qk", "100", "multiple of 8"]),
        ({"head_dim_qk": 264}, ["head_dim_qk", "264"]),
        ({"head_dim_vo": 4}, ["head_dim_vo", "4"]),
        ({"q_dtype": torch.float64}, ["q_dtype", "float64"]),
        ({"kv_dtype": torch.bfloat16}, ["kv_dtype", "bfloat16", "fp8"]),
        ({"window_left": -2}, ["window_left", "-2", "-1"]),
        ({"logits_soft_cap": -1.0}, ["logits_soft_cap", "-1.0"]),
        ({"logits_soft_cap": math.nan}, ["logits_soft_cap", "nan"]),
        ({"sm_scale": math.inf}, ["sm_scale", "inf"]),
        ({"pos_encoding": "ROPE"}, ["pos_encoding_mode", "'ROPE'", "ROPE_LLAMA"]),
        ({"rope_theta": 0.0}, ["rope_theta", "0.0", "positive"]),
    ],
)
def test_attention_spec_with_a_wrong_value_names_argument_value_and_bound(change, words):
    with pytest.raises(ValueError, match="not supported") as caught:
        attention_spec(**{**LAYER, **change})
    for word in words:
        assert word in str(caught.value)


def test_attention_spec_with_each_supported_head_dim_is_accepted():
    for dim in [*range(8, 257, 8), 512]:
        attention_spec(**{**LAYER, "head_dim_qk": dim})
    attention_spec(**{**LAYER, "head_dim_qk": 192, "head_dim_vo": 128})
    attention_spec(**{**LAYER, "head_dim_qk": 576, "head_dim_vo": 512})


def test_replace_with_a_wrong_value_is_refused():
    spec = attention_spec(**LAYER)
    assert spec.replace(window_left=5).mask.window_left == 5
    with pytest.raises(ValueError, match="window_left"):
        spec.replace(window_left=-3)


def test_replace_routes_settings_of_the_mask():
    spec = attention_spec(**LAYER, window_left=5, causal=False)
    changed = spec.replace(window_right=3, sm_scale=0.5)
    assert changed.mask == MaskSpec(causal=False, window_left=5, window_right=3)
    assert (changed.sm_scale, changed.num_qo_heads) == (0.5, 28)


def test_attention_spec_equal_settings_are_one_object():
    spec = attention_spec(**LAYER, window_left=5)
    assert attention_spec(**LAYER, window_left=5) is spec
    assert attention_spec(**LAYER, window_left=6) is not spec
    with pytest.raises(ValueError, match="window_left"):
        attention_spec(**LAYER, window_left=5.0)


@pytest.mark.parametrize("name", [f.name for f in fields(MaskSpec)])
def test_depends_on_positions_every_mask_but_causal_does(name):
    """A mask that is added later is refused by default where requests are cut into parts."""
    value = 4 if name.startswith("window") else not getattr(MaskSpec(), name)
    assert MaskSpec(**{name: value}).depends_on_positions == (name != "causal")


def test_alibi_slopes_of_8_and_12_heads_are_the_published_ones():
    """The published slopes for 8 heads; for 12, four more from the odd steps of the series for 16."""
    eight = attention_spec(num_qo_heads=8, num_kv_heads=8, head_dim_qk=8).alibi_slopes()
    assert eight.tolist() == [2.0**-i for i in range(1, 9)]
    twelve = attention_spec(num_qo_heads=12, num_kv_heads=12, head_dim_qk=8).alibi_slopes()
    assert twelve[:8].tolist() == eight.tolist()
    assert twelve[8:].tolist() == pytest.approx([2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5])


def test_as_dtype_of_an_unknown_name_is_refused():
    assert as_dtype("bfloat16") is torch.bfloat16
    assert as_dtype(torch.float16) is torch.float16
    with pytest.raises(ValueError, match="'float17'"):
        as_dtype("float17")
