"""What the kernel families for GPUs share: launching compiled kernels, and replaying a launch."""
