"""Which tests run with Triton's kernels interpreted on the CPU, in a run of its own: TRITON_INTERPRET=1 pytest.

The mark `interpret` chooses a test's cases on the CPU that Triton computes; keywords of the mark name parameters of the
test and the values to which they are restricted, where all cases would take too long.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import fields

import pytest

from quire.definition.masks import MaskSpec
from quire.definition.spec import AttentionSpec

INTERPRETED = bool(os.environ.get("TRITON_INTERPRET"))
# How many cases of each file are chosen. Changed together with a test, so that none is lost unnoticed.
COUNTS = {
    "engine/test_quantized_layers.py": 6,
    "face/test_activation.py": 15,
    "face/test_batch.py": 1,
    "face/test_block_tables.py": 4,
    "face/test_cascade.py": 25,
    "face/test_gemm.py": 5,
    "face/test_mla.py": 7,
    "face/test_norm.py": 21,
    "face/test_norm_rope_append.py": 16,
    "face/test_page.py": 7,
    "face/test_quantization.py": 13,
    "face/test_rope.py": 14,
    "face/test_rope_quantize.py": 4,
    "face/test_sampling.py": 15,
    "face/test_sampling_draws.py": 5,
    # A case for each setting of a layer, where `mask` stands for its own.
    "kernels/test_families.py": sum(f.init for f in fields(AttentionSpec)) - 1 + len(fields(MaskSpec)),
    "kernels/test_code_product.py": 33,
    "kernels/test_exchange.py": 23,
    "kernels/test_grouped_gemm.py": 5,
    "kernels/test_kernels.py": 24,
    "kernels/test_lora.py": 14,
    "kernels/test_page_table.py": 3,
    "kernels/test_skinny_gemm.py": 5,
    "kernels/test_topk.py": 4,
    "steps/test_steps.py": 14,
    "wrappers/test_compile.py": 1,
    "wrappers/test_int64_tables.py": 2,
    "wrappers/test_shared_prefix.py": 4,
}


def is_chosen(item: pytest.Item) -> bool:
    mark = item.get_closest_marker("interpret")
    if mark is None:
        return False
    params = item.callspec.params if hasattr(item, "callspec") else {}
    mine = {"device": ["cpu"], "family": ["triton"]} | mark.kwargs
    return all(params[name] in values for name, values in mine.items() if name in params or name in mark.kwargs)


def check_counts(items: list[pytest.Item]) -> None:
    """Fail where a file that was collected as a whole does not have as many chosen tests as it should."""
    files = {item.nodeid.split("::")[0].removeprefix("tests/") for item in items}
    found = Counter(item.nodeid.split("::")[0].removeprefix("tests/") for item in items if is_chosen(item))
    wrong = {file: found[file] for file in files if found[file] != COUNTS.get(file, 0)}
    if wrong:
        raise pytest.UsageError(f"tests that are interpreted: {wrong}, but helpers/interpret.py says {COUNTS}")
