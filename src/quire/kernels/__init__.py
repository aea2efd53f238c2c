"""The kernels. Each folder with a `host.py` is a family, which computes attention; `registry` chooses one of them."""
