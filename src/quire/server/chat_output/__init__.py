"""What the output of a chat says: content, reasoning and calls of tools, each format of them in a file of its own.

Whole answers and streams use the same incremental parsers (`parser.py`): a whole answer is what all deltas add up to.
"""
