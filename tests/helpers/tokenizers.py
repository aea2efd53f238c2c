"""Small tokenizers of several kinds."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

_PIECES = ["▁", "a", "b", "c", "é", "▁a", "▁b", "ab", "▁ab", "▁▁", "\n"]
_ENDS = ["<unk>", "<s>", "</s>"]


def byte_fallback(strip: bool = True) -> PreTrainedTokenizerFast:
    """A tokenizer as those of Llama 2 and Gemma: words begin with "▁", and characters without a piece are single bytes.
    With `strip`, a text begins with a space that decoding takes away.
    """
    vocab = {piece: i for i, piece in enumerate([*_ENDS, *(f"<0x{byte:02X}>" for byte in range(256)), *_PIECES])}
    merges = [("▁", "a"), ("▁", "b"), ("a", "b"), ("▁a", "b"), ("▁", "▁")]
    own = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    prepended = [normalizers.Prepend("▁")] if strip else []
    own.normalizer = normalizers.Sequence([*prepended, normalizers.Replace(" ", "▁")])
    stripped = [decoders.Strip(" ", 1, 0)] if strip else []
    own.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *stripped])
    own.add_special_tokens([AddedToken(end, special=True, normalized=False) for end in _ENDS])
    return PreTrainedTokenizerFast(tokenizer_object=own, eos_token="</s>", bos_token="<s>")


def metaspace() -> PreTrainedTokenizerFast:
    """A unigram tokenizer whose words begin with "▁", without tokens for bytes, and with a normalizer (NFC)."""
    pieces = [("<unk>", 0.0), ("</s>", 0.0), *((piece, -1.0) for piece in _PIECES)]
    own = Tokenizer(models.Unigram(pieces, unk_id=0))
    own.normalizer = normalizers.NFC()
    own.pre_tokenizer = pre_tokenizers.Metaspace()
    own.decoder = decoders.Metaspace()
    own.add_special_tokens([AddedToken("</s>", special=True, normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=own, eos_token="</s>")
