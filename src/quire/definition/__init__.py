"""What attention is, with no device in mind: a layer's spec, who owns which tokens, partial results, the oracle."""

from quire.definition.masks import PackedMask
from quire.definition.pages import PageTable, RaggedLayout
from quire.definition.spec import AttentionSpec

__all__ = ["AttentionSpec", "PackedMask", "PageTable", "RaggedLayout"]
