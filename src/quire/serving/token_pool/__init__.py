"""What the backends of pymllm and SGLang share: both keep keys and values in a pool with one slot per token."""
