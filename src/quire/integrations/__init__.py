"""Doors into other people's programs: `quire.integrations.transformers` is an attention function of Transformers, and
`quire.integrations.ray` serves an engine on several machines, by Ray Serve.
"""
