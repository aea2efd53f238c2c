"""Makes `import flashinfer` mean Quire within this process, for programs that cannot be edited.

Importing this module installs it; `uninstall` undoes that. Torch is not imported before the program asks for an
operation. `path` tells what reaches other processes. docs/flashinfer.md tells what such programs find.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from quire.compat.absent import NAMES, absent

__all__ = ["FLASHINFER_VERSION", "install", "path", "uninstall"]

FLASHINFER_VERSION = "0.7.2"  # whose names and meanings Quire's are

_JIT, _ABSENT, _INERT = "quire.compat.jit", "quire.compat.absent", "quire.compat.inert"
_OPERATIONS = (
    "cascade",
    "concat_ops",
    "core",
    "decode",
    "mla",
    "norm",
    "page",
    "pod",
    "prefill",
    "quantization",
    "rope",
    "sampling",
    "sparse",
)
# FlashInfer's modules, and ours that have their names. One appears where its first source exists, or where the table of
# what Quire has not has names of it.
_SOURCES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(NAMES, ()),
    # Programs look for FlashInfer's ready-made kernels, and without them for a compiler, which Quire does not need.
    **dict.fromkeys(("flashinfer_cubin", "flashinfer_jit_cache"), ()),
    "flashinfer": ("quire", _INERT),
    **dict.fromkeys(("flashinfer.api_logging", "flashinfer.autotuner", "flashinfer.fi_trace"), (_INERT,)),
    "flashinfer.attention": ("quire.attention", _JIT),
    **dict.fromkeys(("flashinfer.cudnn", "flashinfer.cudnn.decode", "flashinfer.cudnn.prefill"), (_ABSENT,)),
    **dict.fromkeys(("flashinfer.cutile", "flashinfer.cutile.cutile_common"), (_ABSENT,)),
    "flashinfer.jit": (_JIT,),
    "flashinfer.jit.attention": (_JIT,),
    "flashinfer.jit.attention.modules": (_JIT,),
    "flashinfer.jit.attention.variants": (_JIT,),
    "flashinfer.jit.core": (_JIT,),
    "flashinfer.jit.env": ("quire.compat.env",),
    "flashinfer.jit.utils": (_JIT,),
    "flashinfer.testing": ("quire.compat.testing",),
    "flashinfer.testing.utils": ("quire.compat.testing",),
    "flashinfer.trace": ("quire.compat.trace",),
    "flashinfer.triton": (),
    "flashinfer.triton.cascade": ("quire.cascade",),
    "flashinfer.utils": ("quire.compat.utils",),
    **{f"flashinfer.{name}": (f"quire.{name}", _JIT) for name in _OPERATIONS},
}


def _exists(name: str) -> bool:
    sources = _SOURCES.get(name)
    return name in NAMES or (sources is not None and (not sources or find_spec(sources[0]) is not None))


class _StandIn(ModuleType):
    """A module of FlashInfer's, whose names are looked up in Quire's when they are first used."""

    def _named(self) -> dict[str, ModuleType]:
        """The public names, and the module of ours that has each."""
        found: dict[str, ModuleType] = {}
        for source in map(import_module, filter(find_spec, _SOURCES[self.__name__])):
            for name in source.__all__:
                if not name.startswith("__"):
                    found.setdefault(name, source)
        return found

    def __getattr__(self, name: str) -> Any:
        if name == "__all__":
            return [public for public in self.__dir__() if not public.startswith("__")]
        inner, source = f"{self.__name__}.{name}", None if name.startswith("__") else self._named().get(name)
        if _exists(inner):
            return import_module(inner)
        value = None if source is None else getattr(source, name)
        if source is None and name in NAMES.get(self.__name__, ()):
            value = absent(self.__name__, name)
        if value is None or isinstance(value, ModuleType):  # a module of Quire's that FlashInfer has not
            raise AttributeError(
                f"module {self.__name__!r} has no attribute {name!r}: Quire, which stands in for it, has none"
            )
        setattr(self, name, value)
        return value

    def __call__(self, *args: Any, **options: Any) -> Any:
        """`flashinfer.xqa` and `flashinfer.fi_trace` are modules, and functions of the modules' names."""
        return getattr(self, self.__name__.rpartition(".")[2])(*args, **options)

    def __dir__(self) -> list[str]:
        parts = (name.rpartition(".") for name in _SOURCES if _exists(name))
        inner = {name for parent, _, name in parts if parent == self.__name__}
        own = (name for name, source in self._named().items() if not isinstance(getattr(source, name), ModuleType))
        return sorted({*self.__dict__, *own, *inner, *NAMES.get(self.__name__, ())})


class _Finder(MetaPathFinder, Loader):
    """Finds FlashInfer's modules among Quire's, and none of an installed FlashInfer."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not _exists(fullname):
            return None
        return ModuleSpec(fullname, self, origin="quire", is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name, f"Quire in the place of {spec.name}.")

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ == "flashinfer":
            module.__version__ = FLASHINFER_VERSION  # type: ignore[attr-defined]


_FINDER = _Finder()


def install() -> None:
    """Make `import flashinfer` mean Quire from now on, also where FlashInfer is installed. Again: without effect.

    Raises:
        RuntimeError: another flashinfer has been imported already.
    """
    loaded = sys.modules.get("flashinfer")
    if loaded is not None and not isinstance(loaded, _StandIn):
        where = getattr(loaded, "__file__", "an unknown place")
        raise RuntimeError(f"flashinfer is imported already, from {where}: quire.compat must come before it")
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)


def path() -> str:
    """A folder that makes `import flashinfer` mean Quire in any process that has it on PYTHONPATH, before the folder of
    an installed FlashInfer. For processes that a program starts by itself.
    """
    return str(Path(__file__).parent / "shim")


def uninstall() -> None:
    """Undo `install`: what has been imported stays as it is, the next import finds what is installed, if anything."""
    if _FINDER in sys.meta_path:
        sys.meta_path.remove(_FINDER)
    for name in [name for name, module in sys.modules.items() if isinstance(module, _StandIn)]:
        del sys.modules[name]


install()
