"""The adapters that requests can name, which come and go while the engine runs."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import torch

from quire.engine.adapters.adapter import Adapter
from quire.engine.adapters.peft import read_adapter
from quire.engine.adapters.pool import AdapterPool
from quire.engine.model_info import NUMBERED, AdapterInfo, unknown_adapter


class AdapterRegistry:
    """Adapters by their names; for any thread.

    Args:
        pool: has them on the device; None: the engine takes no adapters.
        dtype: of the model.
        removed: paths of the parts of the network that were removed, for messages.
    """

    def __init__(self, pool: AdapterPool | None, dtype: torch.dtype, removed: tuple[str, ...] = ()) -> None:
        self._pool, self._dtype = pool, dtype
        self._removed = removed
        # Whoever changes the names has the lock; a dictionary of names is replaced, not changed.
        self._lock = threading.Lock()
        self._named: dict[str, tuple[AdapterInfo, Adapter]] = {}
        self._numbers: dict[str, int] = {}

    @property
    def infos(self) -> tuple[AdapterInfo, ...]:
        """All adapters, in the order in which they were loaded."""
        return tuple(info for info, _ in self._named.values())

    def load(self, name: str, folder: Path) -> AdapterInfo:
        """Read an adapter and give it a name. One that has the name already, and the same contents, stays as it is.

        Raises:
            FileNotFoundError: the folder, or a file of it, is missing.
            ValueError: as for `LLM.load_adapter`.
        """
        pool = self._pool
        if not isinstance(name, str) or not name:
            raise ValueError(f"name = {name!r}: an adapter's name must be a string that is not empty")
        if pool is None:
            raise ValueError(f"max_adapters = 0: adapter {name!r} of {folder} needs an engine with 1 or more")
        tensors = read_adapter(folder, pool.targets, self._dtype, self._removed)
        info = AdapterInfo(
            name=name,
            folder=str(folder),
            digest=tensors.digest,
            rank=tensors.rank,
            base_model_name=tensors.base_model_name,
        )
        known = self._known(info) or self._equal(info.digest)
        try:
            adapter = pool.pack(tensors) if known is None else known
        except ValueError as error:
            raise ValueError(f"{folder} can't be used as an adapter: {error}") from error
        with self._lock:
            if self._known(info) is None:
                if len(self._numbers) < NUMBERED:
                    self._numbers.setdefault(name, len(self._numbers))
                info = replace(info, number=self._numbers.get(name))
                self._named = {**self._named, name: (info, self._equal(info.digest) or adapter)}
            return self._named[name][0]

    def _known(self, info: AdapterInfo) -> Adapter | None:
        """The adapter that has this name already, None if there is none; ValueError if its contents differ."""
        known, adapter = self._named.get(info.name, (info, None))
        if known.digest != info.digest:
            what = f"it names the adapter of {known.folder}, and that of {info.folder} differs"
            raise ValueError(f"name = {info.name!r}: {what}; unload it first")
        return adapter

    def _equal(self, digest: str) -> Adapter | None:
        """An adapter with these contents, whatever its name."""
        return next((adapter for _, adapter in self._named.values() if adapter.digest == digest), None)

    def unload(self, name: str) -> Adapter | None:
        """Forget a name; requests that have its adapter keep it.

        Returns:
            the adapter, unless another name means it, too.

        Raises:
            ValueError: there is no such name.
        """
        with self._lock:
            _, adapter = self._entry(name)
            self._named = {other: entry for other, entry in self._named.items() if other != name}
            return adapter if self._equal(adapter.digest) is None else None

    def has(self, adapter: Adapter) -> bool:
        """Whether a name means an adapter with these contents."""
        return self._equal(adapter.digest) is not None

    def get(self, name: str) -> Adapter:
        """The adapter of a name; ValueError if there is none."""
        return self._entry(name)[1]

    def _entry(self, name: str) -> tuple[AdapterInfo, Adapter]:
        named = self._named
        if name not in named:
            raise ValueError(unknown_adapter(name, named))
        return named[name]
