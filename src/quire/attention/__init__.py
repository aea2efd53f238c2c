"""What attention is, with no device in mind: a layer's spec, who owns which tokens, partial results, the oracle."""

from quire.attention.masks import PackedMask
from quire.attention.pages import PageTable, RaggedLayout
from quire.attention.spec import AttentionSpec

__all__ = ["AttentionSpec", "PackedMask", "PageTable", "RaggedLayout"]
