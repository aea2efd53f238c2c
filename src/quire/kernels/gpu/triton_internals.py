"""Private internals of Triton and Gluon. No other file reads any.

They are those of Triton 3.6. `tests/kernels/test_triton_internals.py` compares each function with the code of Triton
that it stands for, and fails on other versions until somebody has done so. Without them, launches take Triton's own
path, which is slower: see `has_direct_launch`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import is_dataclass
from functools import lru_cache, wraps
from inspect import getclosurevars
from types import NoneType, UnionType
from typing import Any, NamedTuple, TypeVar, get_args, get_type_hints

import torch
import triton
from triton.runtime import jit
from triton.runtime.interpreter import InterpretedFunction
from typing_extensions import dataclass_transform

T = TypeVar("T")
KNOWN_VERSION = "3.6"


@triton.jit
def _empty_kernel():
    pass


# TRITON_INTERPRET=1: kernels run on the CPU, slowly.
INTERPRETED = isinstance(_empty_kernel, InterpretedFunction)


@lru_cache
def has_direct_launch() -> bool:
    """Whether the function behind Triton's launch path is known, so that kernels are launched by address. Warns, once,
    if it is that of another version, with which no kernel has been run on a GPU.
    """
    if torch.version.cuda is None:
        return False
    if triton.__version__.startswith(f"{KNOWN_VERSION}."):
        return True
    warnings.warn(
        f"Quire's kernels were run on GPUs with Triton {KNOWN_VERSION}, not with {triton.__version__}: `quire check`"
        " compares them with the oracle. They are launched by Triton's own path, which takes more time on the host",
        stacklevel=2,
    )
    return False


def direct_launch(compiled: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The function that launches a compiled kernel, and its arguments between the stream and the kernel's own."""
    launcher = compiled.run
    if has_direct_launch() and launcher.global_scratch_size == launcher.profile_scratch_size == 0:
        # Triton's Python launcher takes a microsecond to find that it has no scratch memory to allocate. This is the
        # function that it calls.
        modes = (launcher.launch_cooperative_grid, launcher.launch_pdl)
        return launcher.launch, (compiled.function, *modes, None, None, compiled.packed_metadata, None, None, None)
    return launcher, (compiled.function, compiled.packed_metadata, None, None, None)


def descriptor_launch(compiled: Any) -> Callable[..., Any]:
    """The function to which the launch function of a kernel that takes TMA descriptors passes them, once it has encoded
    them.
    """
    launch: Callable[..., Any] = getclosurevars(compiled.run.launch).nonlocals["launcher"]
    return launch


def accept_records_in_hooks() -> None:
    """Let kernels with dataclasses as constants be compiled where a program has set hooks for compilations.

    vLLM sets one once it is warm. For hooks, Triton writes the constants as JSON, and raises TypeError for objects.
    This makes it write the text of dataclasses.
    """
    serialize = jit.serialize_specialization_data
    if hasattr(serialize, "__wrapped__"):
        return

    @wraps(serialize)
    def with_text(name: str, signature: Any, constants: dict[Any, Any], *rest: Any) -> str:
        texts = {key: repr(value) if is_dataclass(value) else value for key, value in constants.items()}
        text: str = serialize(name, signature, texts, *rest)
        return text

    jit.serialize_specialization_data = with_text


accept_records_in_hooks()


class DescriptorFormat(NamedTuple):
    """What a compiled kernel asks of a TMA descriptor: its boxes' shape, their swizzle in shared memory, and the size
    and the type of elements.
    """

    box: tuple[int, ...]
    swizzle: int
    element_size: int
    element_type: int

    def encode(self, address: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
        """The descriptor of a tensor at an address. Reads beyond its shape give zeros."""
        fill = triton.runtime.driver.active.utils.fill_tma_descriptor
        return fill(address, self.swizzle, self.element_size, self.element_type, self.box, shape, strides, 0)


def descriptor_formats(compiled: Any) -> list[DescriptorFormat]:
    """The formats of the descriptors that a compiled kernel takes, in their order."""
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

    return [
        DescriptorFormat(
            tuple(of["block_size"]), of["swizzle"], of["elem_size"], TMA_DTYPE_DEVICE_TO_HOST[of["elem_type"]]
        )
        for of in compiled.metadata.tensordesc_meta
    ]


@dataclass_transform()
def aggregate(cls: type[T]) -> type[T]:
    """Make a class of values in Gluon kernels: annotated fields, and methods by `gluon.jit`.

    In addition to Triton's own decorator, the class has a constructor of all fields, in order or by name, as a
    dataclass has. A field of type `gl.constexpr` takes any value that is known to the compiler, one of `X | None` an X
    or None. `cls.fields` has the fields' names.
    """
    from triton.language.core import _aggregate, base_value, constexpr
    from triton.runtime.jit import constexpr_function

    def kind(hint: Any) -> Any:
        """What `isinstance` takes for a type, with None as a constant."""
        if isinstance(hint, UnionType):
            return tuple(kind(each) for each in get_args(hint))
        return constexpr if hint is NoneType else hint

    kinds = {name: kind(hint) for name, hint in get_type_hints(cls).items()}

    def __init__(self, *values, **named):  # noqa: N807
        for name, value in (dict(zip(kinds, values, strict=False)) | named).items():
            setattr(self, name, value if isinstance(value, base_value) else constexpr(value))

    constructor = constexpr_function(__init__)
    # Triton's keys of compiled kernels have the sources of an aggregate's methods. This adds its fields.
    constructor.hash = f"{cls.__qualname__} {kinds}"
    cls.__annotations__, cls.__init__ = kinds, constructor  # type: ignore[method-assign]
    made: Any = _aggregate(cls)
    made.fields = tuple(kinds)
    return made
