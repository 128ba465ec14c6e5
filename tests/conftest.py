"""Fixtures of all tests: small hand-built pipelines, so that tests of late passes do not depend on the early ones."""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, is_hypothesis_test, settings

from penstock.backends.tvm.compile import pool
from penstock.ir.graph import Module
from penstock.ir.text import parse_module

# Modules that are imported while tests are collected stay: the garbage collector need not scan them, then or in every
# test.
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call() -> None:
    _forget_name_of_test()


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup() -> None:
    _forget_name_of_test()


def _forget_name_of_test() -> None:
    """Remove the variable of pytest from the environment.

    Ranks are forked from a process with the environment of their launcher (forkserver.py). With the variable, each test
    would import torch anew for its own.
    """
    os.environ.pop("PYTEST_CURRENT_TEST", None)


# Plans of tests depend on no measurement of the machine that runs them, but for tests that ask for it.
os.environ.setdefault("PENSTOCK_RATES", "assumed")
# Makes oracles, samples and acceptance importable. What one room shares is imported relatively: a top-level `ir` or
# `passes` would be a folder of tests, or a second copy of the product.
sys.path.insert(0, str(Path(__file__).parent))
# A shell lets jobs in the background ignore interrupts, and so do their children; tests that interrupt children need
# the default.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# For property tests that set no number of examples. A busy machine is no reason to fail.
settings.register_profile("quick", max_examples=40, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("quick")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--shuffle", type=int, metavar="SEED", help="run files of tests, and the tests of each, in another order"
    )
    parser.addoption(
        "--long", type=int, metavar="N", help="run laws only, with N times the examples and new ones in each run"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if (seed := config.getoption("--shuffle")) is not None:
        # Files stay together, so that the fixtures of a file are made once.
        draw = random.Random(seed)
        files: dict[Path, list[pytest.Item]] = {}
        for item in items:
            files.setdefault(item.path, []).append(item)
        groups = [draw.sample(group, len(group)) for group in files.values()]
        items[:] = [item for group in draw.sample(groups, len(groups)) for item in group]
    if (times := config.getoption("--long")) is not None:
        laws = [item for item in items if isinstance(item, pytest.Function) and is_hypothesis_test(item.obj)]
        for test in {item.function for item in laws}:
            current = test._hypothesis_internal_use_settings
            test._hypothesis_internal_use_settings = settings(
                current,
                max_examples=current.max_examples * times,
                derandomize=False,
                database=None,
                deadline=None,
                print_blob=True,
            )
        items[:] = laws


@pytest.fixture(scope="session", autouse=True)
def _compiled_here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Compile in the test process, and keep kernels for this run alone, for all of its processes.

    Tests compile a few kernels each, which takes less than starting compiler processes; those have tests in
    backends/tvm/compile/test_pool.py.
    """
    base = tmp_path_factory.getbasetemp()
    cache = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "kernels"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "usable_cores", lambda: 1)
        patch.setenv("XDG_CACHE_HOME", str(cache))
        yield


@pytest.fixture(scope="session")
def toy() -> Callable[..., Module]:
    """Return toy(stages, skip=False, trains=True): a split module, ready for the schedule pass."""
    from oracles.toy import toy_text

    return lambda *args, **kwargs: parse_module(toy_text(*args, **kwargs), "toy.ir")


@pytest.fixture(scope="module")
def symbolic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model whose first dimension has a name."""
    import onnx
    from oracles.planned_models import SIZES

    from penstock.models import write_mlp

    path = write_mlp(tmp_path_factory.mktemp("planning") / "mlp.onnx", SIZES, batch=4)
    model = onnx.load(path)
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_param = "batch"
    onnx.save(model, path)
    return path


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use an empty cache, without earlier measurements."""
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
