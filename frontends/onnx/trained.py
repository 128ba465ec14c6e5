"""The choice of the initializers of an ONNX file that are trained.

Every floating-point initializer that is used as a tensor is a parameter, except

* those whose name matches `frozen` (a regular expression, searched for anywhere in the name),
* those that the exporter calls buffers: torch's writes each weight's kind in the module into the metadata (KIND),
* the running mean and variance of a BatchNormalization; the rule of the operator updates them in training mode,
* operands that a rule needs as numbers (a bound of Clip, the value of Pad); that rule reads them,
* those of rank 0: exporters write the numbers of the source text (a scale, an epsilon) that way.

`trained` names exceptions from all of these but `frozen`. An initializer that the exporter calls a parameter is one, of
any rank.
"""

from __future__ import annotations

from penstock.frontends.names import pattern_of
from penstock.ir.types import FLOATS, TensorType
from penstock.support.errors import UsageError

from .report import Findings
from .source import OnnxFile, stored_in

# Metadata of the value of that name, as torch.onnx.export(dynamo=True) writes it.
KIND = "pkg.torch.export.graph_signature.InputSpec.kind"


class Trained:
    """The decision by name whether an initializer is trained. Decisions that may surprise are added to the findings."""

    def __init__(self, source: OnnxFile, findings: Findings, frozen: str | None, trained: str | None) -> None:
        self._findings = findings
        graph = source.model.graph
        self._said = {
            value.name: entry.value for value in graph.value_info for entry in value.metadata_props if entry.key == KIND
        }
        floating = [tensor.name for _, _, tensor in stored_in(graph) if source.is_float(tensor)]
        patterns = []
        for flag, text in (("frozen", frozen), ("trained", trained)):
            pattern = pattern_of(text, f"--{flag}", str(source.path))
            if pattern is not None and not any(map(pattern.search, floating)):
                raise UsageError(f"--{flag} {text!r} matches no floating-point initializer", where=str(source.path))
            patterns.append(pattern)
        self._frozen, self._trained = patterns

    def __call__(self, name: str, kind: TensorType) -> bool:
        if kind.dtype not in FLOATS:
            return False
        kind_in_module = self._said.get(name)
        if self._frozen is not None and self._frozen.search(name):
            self._findings.matched.append(name)
            return False
        if (self._trained is not None and self._trained.search(name)) or kind_in_module == "PARAMETER":
            return True
        if kind_in_module == "BUFFER":
            self._findings.buffers.append(name)
            return False
        if kind.rank == 0:
            self._findings.scalars.append(name)
        return kind.rank > 0
