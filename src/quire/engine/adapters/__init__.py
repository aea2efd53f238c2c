"""LoRA adapters of one model; each request may name one."""
