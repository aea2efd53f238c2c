"""Makes `import flashinfer` import Quire if this folder is on PYTHONPATH: see `quire.compat.path`."""

import sys
from importlib import import_module

del sys.modules[__name__]  # this file, in whose place the next import finds the stand-in
import_module("quire.compat").install()
import_module("flashinfer")
