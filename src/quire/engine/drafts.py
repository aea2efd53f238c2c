"""Drafts of the next tokens of a request, which are guessed from the request's own tokens (prompt lookup).

Text that quotes itself, such as code that is edited or a document that is summarised, often goes on after a few tokens
as it did where the same tokens occurred before. A step computes drafts together with the token before them and samples
a token after each, so that one step may yield several tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

# The most and the fewest tokens that must match.
_MAX_MATCH, _MIN_MATCH = 3, 1


class PromptLookup:
    """Where the tokens of a request occurred last, by themselves and with one or two tokens before them."""

    def __init__(self) -> None:
        # The index after the last occurrence of each run of tokens, for indices up to `_num_known`.
        self._ends: dict[tuple[int, ...], int] = {}
        self._num_known = 0

    def draft(self, tokens: Sequence[int], max_drafts: int) -> list[int]:
        """At most `max_drafts` tokens that followed the last tokens of `tokens` where these occurred before, the
        longest match first; empty if they did not. A match of one token, which is often by chance, gives one draft.

        Args:
            tokens: prompt and output, which begin with the tokens of earlier calls.
        """
        if max_drafts <= 0:
            return []
        ends, count = self._ends, len(tokens)
        sizes = range(_MAX_MATCH, _MIN_MATCH - 1, -1)
        for end in range(self._num_known + 1, count):
            for size in sizes:
                if size <= end:
                    ends[tuple(tokens[end - size : end])] = end
        self._num_known = max(self._num_known, count - 1)
        for size in sizes:
            start = ends.get(tuple(tokens[-size:])) if size < count else None
            if start is not None:
                max_drafts = max_drafts if size > 1 else 1
                # Beyond the last known token, the drafts repeat themselves.
                drafts = list(tokens[start : start + max_drafts])
                period = count - start
                while len(drafts) < max_drafts:
                    drafts.append(drafts[-period])
                return drafts
        return []
