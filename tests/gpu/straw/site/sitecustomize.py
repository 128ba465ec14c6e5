"""Straw in every process of a run: when torch is imported, it gets the devices of straw. With STRAW_INTERPRETER the reference back end uses them, too.
In: the variables of libraries.environment."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

TORCH, INTERPRETER = "torch", "penstock.backends.numpy_backend"


def _install(name: str) -> None:
    if name == TORCH:
        from gpu.straw.install import install

        install(Path(os.environ["STRAW"]))
    else:
        from gpu.rank.interpreted import install as install_interpreter

        install_interpreter()


class _Loader(Loader):
    """The loader of a module, and of what straw changes in it."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _install(module.__name__)


class _Finder(MetaPathFinder):
    """A finder of one module alone."""

    def __init__(self, name: str) -> None:
        self._name = name

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


if "STRAW" in os.environ:
    sys.meta_path.insert(0, _Finder(TORCH))
if "STRAW_INTERPRETER" in os.environ:
    sys.meta_path.insert(0, _Finder(INTERPRETER))
