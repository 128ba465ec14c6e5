"""The choice of the initializers of an ONNX file that are trained.

These decide on a floating-point initializer, the first that says something:

* `frozen`, a regular expression, searched for anywhere in the name: not trained
* `trained`, another one: trained
* the exporter: torch's writes each weight's kind in the module into the metadata (KIND), parameter, buffer or constant
* the table of rules about use, name and elements (constants/rules.py)

All others are parameters.
"""

from __future__ import annotations

import onnx

from penstock.frontends.names import pattern_of
from penstock.ir.types import FLOATS, TensorType
from penstock.support.errors import UsageError

from .constants.rules import Stored, decide, looks_set
from .constants.uses import uses_in
from .report import Findings
from .source import OnnxFile, stored_in

# Metadata of the value of that name, as torch.onnx.export(dynamo=True) writes it.
KIND = "pkg.torch.export.graph_signature.InputSpec.kind"


class Trained:
    """The decision whether an initializer is trained. Decisions that may surprise are added to the findings."""

    def __init__(self, source: OnnxFile, findings: Findings, frozen: str | None, trained: str | None) -> None:
        self._source, self._findings = source, findings
        graph = source.model.graph
        self._readers = uses_in(source.model)
        self._said = {
            value.name: entry.value for value in graph.value_info for entry in value.metadata_props if entry.key == KIND
        }
        # A file that says the kind of each weight says it of the whole state dict. Other names are made up.
        self._from_torch = source.model.producer_name == "pytorch" and not self._said
        floating = [tensor.name for _, _, tensor in stored_in(graph) if source.is_float(tensor)]
        patterns = []
        for flag, text in (("frozen", frozen), ("trained", trained)):
            pattern = pattern_of(text, f"--{flag}", str(source.path))
            if pattern is not None and not any(map(pattern.search, floating)):
                raise UsageError(f"--{flag} {text!r} matches no floating-point initializer", where=str(source.path))
            patterns.append(pattern)
        self._frozen, self._trained = patterns

    def __call__(self, initializer: onnx.TensorProto, kind: TensorType) -> bool:
        if kind.dtype not in FLOATS:
            return False
        name, kind_in_module = initializer.name, self._said.get(initializer.name)
        if self._frozen is not None and self._frozen.search(name):
            self._findings.matched.append(name)
            return False
        tensor = Stored(
            name,
            kind.dims,
            self._readers(initializer),
            lambda: self._source.array(initializer),
            self._from_torch,
        )
        if (self._trained is not None and self._trained.search(name)) or kind_in_module == "PARAMETER":
            self._tell_unusual(tensor, "told to be trained")
            return True
        if kind_in_module in ("BUFFER", "CONSTANT_TENSOR"):
            self._findings.buffers.append(name)
            return False
        rule = decide(tensor)
        if rule is not None and not rule.trained:
            self._findings.constants.setdefault(rule.name, (rule.reason, []))[1].append(name)
            return False
        self._tell_unusual(tensor, rule.reason if rule is not None else "read as a weight or bias is")
        return True

    def _tell_unusual(self, tensor: Stored, why: str) -> None:
        """Note a tensor that is trained though it has one element, or the elements of a constant."""
        rule = looks_set(tensor)
        if rule is not None:
            self._note(f"{why}; but {rule.reason}", tensor)
        elif tensor.single:
            self._note(f"one element; {why}", tensor)

    def _note(self, reason: str, tensor: Stored) -> None:
        self._findings.unusual.setdefault(reason, []).append(tensor.name)
