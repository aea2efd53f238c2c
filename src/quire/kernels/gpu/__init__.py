"""What the kernel families of GPUs share: how compiled kernels are launched, and launched again."""
