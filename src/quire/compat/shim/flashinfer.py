"""Makes `import flashinfer` import Quire if this folder is on PYTHONPATH: see `quire.compat.path`."""

import sys
from importlib import import_module

# The next import finds the stand-in instead of this file.
del sys.modules[__name__]
import_module("quire.compat").install()
import_module("flashinfer")
