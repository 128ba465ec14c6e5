"""Straw in every process of a run: when torch is imported, it gets the devices of straw. In: the variables of libraries.environment."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType


class _Torch(Loader):
    """The loader of torch, and of what stands in for its devices."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        from gpu.straw.install import install

        install(Path(os.environ["STRAW"]))


class _Finder(MetaPathFinder):
    """A finder of torch alone."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            spec.loader = _Torch(spec.loader)
        return spec


if "STRAW" in os.environ:
    sys.meta_path.insert(0, _Finder())
