"""Other places for metrics beside their file: TensorBoard, Weights & Biases, MLflow, Prometheus.

In: the rows of runtime/telemetry/metrics.py. Out: whatever these make of them.

    tensorboard:DIR        event files in a directory                       pip install 'penstock[tensorboard]'
    wandb:PROJECT          a run of a project                               pip install 'penstock[wandb]'
    mlflow:EXPERIMENT      a run of an experiment                           pip install 'penstock[mlflow]'
    prometheus:PORT        http://127.0.0.1:PORT/metrics, newest numbers    (prometheus:HOST:PORT listens elsewhere)
    prometheus:FILE.prom   the newest numbers in a file, replaced as a whole, for node_exporter's textfile collector

Where PENSTOCK_METRICS_TOKEN names a file, a client of the server of Prometheus has to send the token in it
(Authorization: Bearer TOKEN). Servers, keys and the like are those of each package's own settings (WANDB_MODE,
MLFLOW_TRACKING_URI). Packages are imported when a run uses them. A number that a row does not know (null) is left out.
A sink that cannot be opened ends the run before its first step. One that fails later is named on stderr and gets no
more rows; the run goes on.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from hmac import compare_digest
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from penstock.backends.bundle.signing import read_key
from penstock.support.atomic_files import replacing
from penstock.support.errors import PenstockError, UsageError

Row = Mapping[str, float | int | str | None]
# Names the file with the token that a client of the server has to send.
TOKEN_VARIABLE = "PENSTOCK_METRICS_TOKEN"

Warn = Callable[[str], None]


class Sink(Protocol):
    """One place for metrics."""

    def add(self, step: int, numbers: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Scalars in event files."""

    def __init__(self, directory: str) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(directory)

    def add(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """A run of Weights & Biases."""

    def __init__(self, project: str) -> None:
        import wandb

        self._run: Any = wandb.init(project=project)

    def add(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        self._run.finish()


class Mlflow:
    """A run of MLflow."""

    def __init__(self, experiment: str) -> None:
        import mlflow

        self._mlflow: Any = mlflow
        mlflow.set_experiment(experiment)
        mlflow.start_run()

    def add(self, step: int, numbers: Mapping[str, float]) -> None:
        self._mlflow.log_metrics(dict(numbers), step=step)

    def close(self) -> None:
        self._mlflow.end_run()


def exposition(step: int, numbers: Mapping[str, float]) -> str:
    """Return the text format of Prometheus, version 0.0.4."""
    lines = []
    for name, value in {"step": float(step), **numbers}.items():
        text = "NaN" if value != value else {float("inf"): "+Inf", float("-inf"): "-Inf"}.get(value, repr(float(value)))
        lines += [f"# TYPE penstock_{name} gauge", f"penstock_{name} {text}"]
    return "\n".join(lines) + "\n"


class PrometheusFile:
    """The newest numbers in a file. Rows of evaluations have other numbers than those of steps; each stays until there
    is a newer one."""

    def __init__(self, path: str) -> None:
        self._numbers: dict[str, float] = {}
        self._path = Path(path)
        self._path.parent.mkdir(parents=True, exist_ok=True)

    def add(self, step: int, numbers: Mapping[str, float]) -> None:
        self._numbers |= numbers
        with replacing(self._path) as work:
            work.write_text(exposition(step, self._numbers), encoding="ascii")

    def close(self) -> None:
        pass


class PrometheusServer:
    """The newest numbers at /metrics; nothing else is answered. Port 0 is any that is free."""

    def __init__(self, host: str, port: int, token: bytes | None = None) -> None:
        self._numbers: dict[str, float] = {}
        self._text = b""
        self._server = ThreadingHTTPServer((host, port), partial(_Handler, lambda: self._text, token))
        self._server.daemon_threads = True
        self.address = self._server.server_address[:2]
        threading.Thread(target=self._server.serve_forever, name="prometheus", daemon=True).start()

    def add(self, step: int, numbers: Mapping[str, float]) -> None:
        self._numbers |= numbers
        self._text = exposition(step, self._numbers).encode("ascii")

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    timeout = 5

    def __init__(self, text: Callable[[], bytes], token: bytes | None, *args: Any) -> None:
        self._newest, self._token = text, token
        super().__init__(*args)

    def do_GET(self) -> None:
        authorization = self.headers.get("Authorization", "").encode("utf-8", "replace")
        if self._token is not None and not compare_digest(authorization, b"Bearer " + self._token):
            self.send_error(401)
            return
        if self.path != "/metrics":
            self.send_error(404)
            return
        text = self._newest()
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *args: object) -> None:
        """Log no requests."""


# ------------------------------------------------------------------------------------------------ from the command line

# The package that each kind needs, and the text behind its colon.
_PACKAGES = {"tensorboard": ("tensorboard", "DIR"), "wandb": ("wandb", "PROJECT"), "mlflow": ("mlflow", "EXPERIMENT")}
_MAKERS: Mapping[str, Callable[[str], Sink]] = {"tensorboard": TensorBoard, "wandb": Wandb, "mlflow": Mlflow}


def sink_problems(texts: Iterable[str]) -> list[str]:
    """List the problems of the sinks that are asked for, missing packages among them."""
    return [problem for text in texts if (problem := _problem(text))]


def _problem(text: str) -> str:
    kind, _, where = text.partition(":")
    if kind == "prometheus":
        host, _, port = where.rpartition(":")
        try:
            _token()
        except PenstockError as error:
            return f"--log {text}: {TOKEN_VARIABLE}: {error.where}: {error.what}"
        if where.endswith(".prom") or (port.isdecimal() and int(port) < 65536 and (host or ":" not in where)):
            return ""
        return f"--log {text}: prometheus takes a port, HOST:PORT, or a file that ends with .prom"
    if kind not in _PACKAGES:
        return (
            f"--log {text}: knows {', '.join(f'{name}:{what}' for name, (_, what) in _PACKAGES.items())}, "
            "prometheus:PORT"
        )
    package, what = _PACKAGES[kind]
    if not where:
        return f"--log {text}: expected {kind}:{what}"
    if find_spec(package) is None:
        return f"--log {text}: needs the package {package}, which is not installed (pip install 'penstock[{kind}]')"
    return ""


def _token() -> bytes | None:
    path = os.environ.get(TOKEN_VARIABLE)
    return read_key(path) if path else None


def open_sink(text: str) -> Sink:
    if problem := _problem(text):
        raise UsageError(problem)
    kind, _, where = text.partition(":")
    try:
        if kind != "prometheus":
            return _MAKERS[kind](where)
        if where.endswith(".prom"):
            return PrometheusFile(where)
        host, _, port = where.rpartition(":")
        return PrometheusServer(host or "127.0.0.1", int(port), _token())
    except OSError as error:
        raise UsageError(f"--log {text}: {error.strerror or error}") from error
    # The client libraries raise errors of their own kinds: no key, no server, a package half installed.
    except Exception as error:
        raise UsageError(f"--log {text}: {type(error).__name__}: {error}") from error


class Sinks:
    """All sinks of a run."""

    def __init__(self, texts: Iterable[str], warn: Warn) -> None:
        self._warn = warn
        self._open: dict[str, Sink] = {}
        try:
            for text in texts:
                self._open[text] = open_sink(text)
        except BaseException:
            self.close()
            raise

    def add(self, row: Row) -> None:
        numbers = {name: float(value) for name, value in row.items() if name != "step" and value is not None}
        step = row["step"]
        assert isinstance(step, int)
        self._each(lambda sink: sink.add(step, numbers))

    def close(self) -> None:
        self._each(lambda sink: sink.close())
        self._open.clear()

    def _each(self, act: Callable[[Sink], None]) -> None:
        for text, sink in list(self._open.items()):
            try:
                act(sink)
            except Exception as error:  # the client library or the server failed: a run of days must not end for it
                del self._open[text]
                self._warn(f"warning: --log {text} failed and gets no more: {type(error).__name__}: {error}")
