"""The registry of back ends: their names, and the way from a name to its back end.

A back end's modules are imported only when its name is looked up, because its libraries are heavy.
"""

from __future__ import annotations

from penstock.support.cache import cache_bound
from penstock.support.errors import UsageError

from .interface import Backend

BACKENDS = ("tvm", "numpy")


def backend_of(name: str) -> Backend:
    """Return the back end of a name; UsageError for an unknown name."""
    if name == "tvm":
        from .tvm_backend import TvmBackend  # lazy: heavy

        return TvmBackend()
    if name == "numpy":
        from .numpy_backend import NumpyBackend  # lazy: heavy

        return NumpyBackend()
    raise UsageError(f"unknown back end {name!r}", hint=f"one of {', '.join(BACKENDS)}")


def check_cache(name: str) -> None:
    """Check the settings of a back end's cache before the work: compiling reads them when most of it is done."""
    if name == "tvm":
        cache_bound()
