"""The former name of `quire.backends`, for one release. Its modules are those of `quire.backends`, not copies."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

_NEW = "quire.backends"

warnings.warn(f"{__name__} is now {_NEW}; the old name ends with the next release", DeprecationWarning, stacklevel=2)


class _Alias(MetaPathFinder, Loader):
    """Imports modules of this package from `quire.backends`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(f"{__name__}.") or find_spec(_new_name(fullname)) is None:
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        # The import system takes the module that is here afterwards.
        sys.modules[module.__name__] = import_module(_new_name(module.__name__))


def _new_name(name: str) -> str:
    return _NEW + name.removeprefix(__name__)


# Before the finder of files, which would load copies: the packages here have the paths of those there.
sys.meta_path.insert(0, _Alias())
