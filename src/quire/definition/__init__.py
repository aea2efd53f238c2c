"""What attention is, on any device: a layer's spec, page tables, masks, partial states, and the oracle in float64."""

from quire.definition.masks import PackedMask
from quire.definition.pages import PageTable, RaggedLayout
from quire.definition.spec import AttentionSpec, attention_spec
from quire.definition.versions import warn_of_untested

__all__ = ["AttentionSpec", "PackedMask", "PageTable", "RaggedLayout", "attention_spec"]

warn_of_untested()
