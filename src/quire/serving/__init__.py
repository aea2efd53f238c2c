"""Attention backends of serving engines, each under its own names: lorax, pymllm, vllm, sglang. All stand on `base`."""
