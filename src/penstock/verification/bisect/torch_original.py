"""A torch module as the original: its exported program is run call by call, and every result is kept.

For Python; the command line reads ONNX.

bisect_torch(module, (x,), cluster=ps.Cluster.local(2), training=ps.Training(loss="mse"), schedule="2bw")
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.export.graph_signature import InputKind

from penstock.frontends.names import legal
from penstock.frontends.torch.source import exported
from penstock.inspection.dump import Dump
from penstock.ir.interpreter.ops import Array
from penstock.planning.model import from_torch
from penstock.planning.options import PlanOptions
from penstock.planning.pipeline import plan_model
from penstock.planning.plan import Plan
from penstock.planning.watching import Feedback

from .search import Options, bisect
from .sources import planned_trail

if TYPE_CHECKING:
    from penstock.frontends.training import Training
    from penstock.ir.cluster.cluster import Cluster


DEFAULTS = Options()


class TorchOriginal:
    """An exported program as the original of an import.

    `names` are its names of inputs that the module spells otherwise, `outputs` the module's names of its results.
    """

    def __init__(
        self,
        source: object,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
        names: Mapping[str, str],
        outputs: Sequence[str],
    ) -> None:
        self.program = exported(source, args, kwargs, type(source).__name__)
        self.names, self.outputs = names, outputs
        self.name = f"torch {torch.__version__}"
        self.targets: dict[str, str] = {}

    def values(self, inputs: Mapping[str, Array]) -> Iterator[tuple[str, Array]]:
        """Run the program, and yield its values by their names in the module."""
        tensors = {self.names.get(name, name): torch.from_numpy(np.array(array)) for name, array in inputs.items()}
        state: dict[str, Any] = {**self.program.constants, **self.program.state_dict}
        arguments = [
            tensors[spec.arg.name] if spec.kind == InputKind.USER_INPUT else state[str(spec.target)]
            for spec in self.program.graph_signature.input_specs
        ]
        recorder = _Recorder(self.program.graph_module)
        with torch.no_grad():
            results = recorder.run(*arguments)
        self.targets = {legal(name): target for name, target in recorder.targets.items()}
        yield from ((legal(name), array) for name, array in recorder.results)
        # Results of `forward` have other names in the module; before them, a program returns the new values of buffers.
        final = [_array(x) for x in results[len(results) - len(self.outputs) :]]
        yield from ((name, array) for name, array in zip(self.outputs, final, strict=False) if array is not None)

    def optimised(self, inputs: Mapping[str, Array]) -> Iterator[tuple[str, Array]]:
        """Yield nothing: a program of torch has one way to round."""
        return iter(())

    def source_of(self, name: str) -> str:
        """Describe the call that makes a value."""
        target = self.targets.get(name)
        return f"call {name} ({target})" if target else ""


class _Recorder(torch.fx.Interpreter):
    """An interpreter of torch.fx that keeps the result of every call."""

    def __init__(self, module: torch.fx.GraphModule) -> None:
        super().__init__(module)
        self.results: list[tuple[str, Array]] = []
        self.targets: dict[str, str] = {}

    def run_node(self, n: torch.fx.Node) -> Any:
        result = super().run_node(n)
        if n.op == "call_function":
            several = isinstance(result, tuple | list)
            for i, entry in enumerate(result if several else [result]):
                name, array = f"{n.name}.{i}" if several else n.name, _array(entry)
                if array is not None:
                    self.results.append((name, array))
                    self.targets[name] = str(n.target)
        return result


def _array(x: object) -> Array | None:
    if not isinstance(x, torch.Tensor):
        return None
    wide = x.detach().float() if x.dtype == torch.bfloat16 else x.detach()
    return wide.cpu().numpy()


def bisect_torch(
    source: object,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    cluster: Cluster,
    training: Training | None = None,
    backend: str = "tvm",
    options: Options = DEFAULTS,
    **planned: Any,
) -> int:
    """Run `penstock verify MODEL --bisect` for a torch module and its example arguments; `planned` are arguments of
    `ps.plan`.
    """
    model = from_torch(source, args, kwargs)
    original = TorchOriginal(source, args, kwargs, model.imported.names, model.module.outputs)
    with tempfile.TemporaryDirectory(prefix="penstock-") as scratch:
        folder = Path(scratch) / "dumps"

        def plan() -> Plan:
            return plan_model(model, cluster, training, PlanOptions(**planned), Feedback(Dump(folder)))

        with planned_trail(type(source).__name__, plan, lambda: model, lambda _: original, folder, backend) as trail:
            return bisect(trail, options)
