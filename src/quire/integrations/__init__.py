"""Plug-ins for other programs: `quire.integrations.transformers` is an attention function of Transformers,
`quire.integrations.vllm` and `quire.integrations.sglang` are attention backends of vLLM and SGLang, and
`quire.integrations.ray` serves an engine on several machines, by Ray Serve.
"""
