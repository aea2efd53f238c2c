"""Makes `import flashinfer` import Quire in this process, for programs that cannot be edited.

Importing this module installs the import hook, and `uninstall` removes it. Torch is imported when the program first
uses an operation. `path` is for other processes. docs/flashinfer.md describes what such programs find.
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

from quire.compat.unsupported import NAMES, unsupported

__all__ = ["FLASHINFER_VERSION", "install", "path", "uninstall"]

# Quire has the names and meanings of this version.
FLASHINFER_VERSION = "0.7.2"

_JIT, _UNSUPPORTED = "quire.compat.jit", "quire.compat.unsupported"
_IGNORED = "quire.compat.ignored"
_TRTLLM = "quire.compat.trtllm"
_OPERATIONS = (
    "activation",
    "cascade",
    "concat_ops",
    "core",
    "decode",
    "gemm",
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
# FlashInfer's modules, and the modules of Quire that provide their names. A module exists if the first module of Quire
# exists, or if `NAMES`, the table of names that Quire does not implement, has names of the module.
_SOURCES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(NAMES, ()),
    # Programs look for FlashInfer's precompiled kernels, and otherwise for a compiler, which Quire does not need.
    **dict.fromkeys(("flashinfer_cubin", "flashinfer_jit_cache"), ()),
    "flashinfer": ("quire", _IGNORED),
    **dict.fromkeys(("flashinfer.api_logging", "flashinfer.autotuner", "flashinfer.fi_trace"), (_IGNORED,)),
    "flashinfer.autotuner.autotuner": (_IGNORED,),
    "flashinfer.attention": ("quire.attention", _JIT),
    **dict.fromkeys(("flashinfer.cudnn", "flashinfer.cudnn.decode", "flashinfer.cudnn.prefill"), (_UNSUPPORTED,)),
    **dict.fromkeys(("flashinfer.cutile", "flashinfer.cutile.cutile_common"), (_UNSUPPORTED,)),
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
    **{f"flashinfer.{name}": (f"quire.{name}", _TRTLLM, _JIT) for name in ("decode", "prefill")},
}


def _exists(name: str) -> bool:
    sources = _SOURCES.get(name)
    return name in NAMES or (sources is not None and (not sources or find_spec(sources[0]) is not None))


class _StandIn(ModuleType):
    """A module of FlashInfer, whose names are looked up in modules of Quire when they are first used."""

    def _named(self) -> dict[str, ModuleType]:
        """The public names, and the module of Quire that provides each."""
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
            value = unsupported(self.__name__, name)
        # FlashInfer does not have this submodule of Quire.
        if value is None or isinstance(value, ModuleType):
            raise AttributeError(
                f"module {self.__name__!r} has no attribute {name!r}: Quire, which stands in for it, has none"
            )
        setattr(self, name, value)
        return value

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Call the function with the module's name: `flashinfer.xqa` and `flashinfer.fi_trace` are both at once."""
        return getattr(self, self.__name__.rpartition(".")[2])(*args, **options)

    def __dir__(self) -> list[str]:
        names = (name.rpartition(".") for name in _SOURCES if _exists(name))
        inner = {name for parent, _, name in names if parent == self.__name__}
        own = (name for name, source in self._named().items() if not isinstance(getattr(source, name), ModuleType))
        return sorted({*self.__dict__, *own, *inner, *NAMES.get(self.__name__, ())})


class _Finder(MetaPathFinder, Loader):
    """Finds FlashInfer's modules in Quire, and none of an installed FlashInfer."""

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
    """Make `import flashinfer` import Quire from now on, even if FlashInfer is installed. Further calls have no effect.

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
    """A folder for PYTHONPATH, before that of an installed FlashInfer, which makes `import flashinfer` import Quire in
    processes that a program starts by itself.
    """
    return str(Path(__file__).parent / "shim")


def uninstall() -> None:
    """Undo `install`. Imported names stay valid; later imports find an installed FlashInfer, if there is one."""
    if _FINDER in sys.meta_path:
        sys.meta_path.remove(_FINDER)
    for name in [name for name, module in sys.modules.items() if isinstance(module, _StandIn)]:
        del sys.modules[name]


install()
