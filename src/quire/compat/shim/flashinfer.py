"""On PYTHONPATH, makes `import flashinfer` mean Quire: see `quire.compat.path`."""

import sys
from importlib import import_module

del sys.modules[__name__]  # this file, which has done its work when it has found the other
import_module("quire.compat").install()
import_module("flashinfer")
