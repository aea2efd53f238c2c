"""Attention backends of other serving engines, with the names that each engine uses: lorax, pymllm, sglang, vllm."""
