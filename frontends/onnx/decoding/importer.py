"""The importer of ONNX decoders: a file and sizes of turns in, a module for each number of tokens out.

Modules are those that folders of Hugging Face become (frontends/huggingface/importer.py): inputs `turn.*`, caches
`layers.N.keys` and `layers.N.values`, and a token for each sequence. Elements of weights are shared by all of them.

    open_decoder     a path -> what the file is, with the largest context and the words that its tables allow
    import_decoder   the same and sizes -> a module for each number of tokens of a turn
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import onnx

from penstock.frontends.decoder_sizes import DecoderSizes
from penstock.frontends.imported import Imported, Unimported
from penstock.frontends.onnx.binding import bind
from penstock.frontends.onnx.importer import OnnxImporter
from penstock.frontends.onnx.node import Rule
from penstock.frontends.onnx.report import CannotImport, Findings, problem_of
from penstock.frontends.onnx.source import OnnxFile, node_name
from penstock.frontends.onnx.trained import Trained
from penstock.frontends.onnx.versions import opsets_of
from penstock.frontends.writer import Refused
from penstock.ir.ladder.bounds import Bounded
from penstock.support.errors import UsageError

from .grouped import is_grouped, lengths_of, read_grouped
from .interface import TURN, Attention, DecoderNames, fed_inputs, interface_problems
from .lengths import LengthSample, values_at
from .rows import lookups_of, row_problems
from .rules import RULES
from .turn import DOMAIN, Decoding, turn_of
from .written import at_context, read_written

# Sizes of past and new tokens at which lengths are computed, and tokens of the turn that is looked at first. No other
# size of a model is likely to be any of them.
_SAMPLES = (LengthSample(19, 7), LengthSample(37, 1))
_PROBE = 13


@dataclass(frozen=True)
class OnnxDecoder:
    """A decoder as read. `words` is the number of tokens, `longest` that of positions that its tables have, if any."""

    decoding: Decoding
    words: int
    longest: int | None


class TurnImporter(OnnxImporter):
    """The import of the model of a turn."""

    def rule_of(self, domain: str, kind: str) -> Rule | None:
        return RULES.get(kind) if domain == DOMAIN else super().rule_of(domain, kind)

    def why_unknown(self, node: onnx.NodeProto) -> str:
        return "" if node.domain == DOMAIN else super().why_unknown(node)


def open_decoder(path: str | Path, names: DecoderNames) -> OnnxDecoder:
    """Read a file, and look at its turns. Raise CannotImport where it is no decoder that can be had."""
    source = OnnxFile(path)
    if problem := source.check():
        raise UsageError(f"not a valid ONNX model: {problem}", where=str(path))
    decoding = Decoding(source, names, _attentions(source, names))
    module = _import(decoding, _PROBE, DecoderSizes(1, 1, (_PROBE,), logits=True)).module
    graph = module.graphs["main"]
    lookups = lookups_of(graph)
    problems = [*row_problems(graph), *lookups.problems]
    logits = next(value for value in graph.outs if value.name == f"{TURN}logits")
    words = logits.type.dims[1]
    if lookups.words is not None and lookups.words < words:
        problems.append(f"{words} logits, but a table has rows for {lookups.words} tokens")
    if problems:
        raise CannotImport(str(path), problems)
    return OnnxDecoder(decoding, words, lookups.positions)


def import_decoder(decoder: OnnxDecoder, sizes: DecoderSizes) -> dict[int, Imported]:
    """Import a decoder. Return it for each number of tokens of a turn."""
    decoding = decoder.decoding
    if decoder.longest is not None and sizes.context > decoder.longest:
        raise UsageError(
            f"a context of {sizes.context} positions, but the model was made for {decoder.longest}",
            where=decoding.where,
            hint=f"--context {decoder.longest} is the longest",
        )
    attentions, problems = at_context(decoding.source, decoding.names, decoding.attentions, sizes.context)
    if problems:
        raise CannotImport(decoding.where, problems)
    decoding = replace(decoding, attentions=attentions)
    imported = {tokens: _import(decoding, tokens, sizes) for tokens in sizes.rungs}
    largest = imported[max(imported)]
    for one in imported.values():
        mine, others = one.module.vars, largest.module.vars
        differing = sorted(name for name in mine.keys() | others.keys() if mine.get(name) != others.get(name))
        if differing:
            raise CannotImport(
                decoding.where, [f"variable {name}: depends on the number of tokens of a turn" for name in differing]
            )
    return {tokens: replace(one, weights=largest.weights) for tokens, one in imported.items()}


def _attentions(source: OnnxFile, names: DecoderNames) -> dict[str, Attention]:
    """Read the attentions of a file. One error lists all that is not to be had."""
    nodes: Sequence[onnx.NodeProto] = source.model.graph.node
    grouped = [(node_name(node, i), node) for i, node in enumerate(nodes) if is_grouped(node)]
    wanted = {name for _, node in grouped for name in lengths_of(node)}
    samples = [(sample, values_at(source, nodes, names, wanted, sample)) for sample in _SAMPLES]
    inputs = fed_inputs(source.model.graph)
    attentions, problems = dict[str, Attention](), list[Unimported | str]()
    for name, node in grouped:
        try:
            attentions[node.output[0]] = read_grouped(node, name, inputs, samples)
        except Refused as error:
            problems.append(problem_of(name, node, str(error)))
    written, others = read_written(source, names, _SAMPLES, {past for a in attentions.values() for past in a.pasts})
    attentions |= written
    problems += others
    if not attentions and not problems:
        problems.append(
            "no attention takes past keys and values: looked for is GroupQueryAttention of com.microsoft, or Concat of "
            "past keys [batch, heads, past, size] with new ones, products and a softmax"
        )
    if not problems:
        problems += interface_problems(source.model.graph, names, attentions.values())
    if problems:
        raise CannotImport(str(source.path), problems)
    return attentions


def _import(decoding: Decoding, tokens: int, sizes: DecoderSizes) -> Imported:
    part = turn_of(decoding, tokens, sizes)
    findings = Findings()
    importer = TurnImporter(part, opsets_of(part), findings, Trained(part, findings, _tables(decoding), None))
    graph = part.model.graph
    importer.take_inputs(graph, bind(graph, {}, {}, decoding.where))
    importer.take_initializers(graph)
    for index, node in enumerate(graph.node):
        importer.take_node(node, index, importer.scope)
    importer.complain()
    imported = importer.finish({})
    places = tuple((f"{TURN}{name}", 0) for name in ("tokens", "positions", "places"))
    return replace(imported, module=imported.module.but(bounds=(Bounded("tokens", tokens, False, places),)), symbols={})


def _tables(decoding: Decoding) -> str | None:
    """Return a pattern of the tables of cosines and sines, which are neither trained nor rounded."""
    names = {name for a in decoding.attentions.values() for name in (a.cosines, a.sines) if name}
    graph = decoding.source.model.graph
    for node in graph.node:
        if node.op_type == "RotaryEmbedding":
            names.update(node.input[2:4] if node.domain else node.input[1:3])
    stored = sorted(names.intersection(tensor.name for tensor in graph.initializer))
    return f"^({'|'.join(map(re.escape, stored))})$" if stored else None
