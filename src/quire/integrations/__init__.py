"""Doors into other people's programs; `quire.integrations.ray` serves an engine on several machines, by Ray Serve."""
