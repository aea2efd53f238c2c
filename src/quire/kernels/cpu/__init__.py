"""Attention on CPUs: kernels in Numba, compiled for the machine that they run on."""
