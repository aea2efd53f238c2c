"""Code that the backends of pymllm and SGLang share. Both keep keys and values in a pool with one slot per token."""
