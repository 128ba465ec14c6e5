"""Attention of decoders that is written out: products of queries with past and new keys, a mask, a softmax, and a
product with past and new values.

In: a file. Out: its attentions by the names of their results, and what stands in the way of others.

Past keys and values are followed from where new ones are joined to them (Concat) to the first node that takes both:
that gives the result. On the way keys meet the queries. What lies between is not read node by node. It is computed, for
numbers of past and new tokens that no other size of a model is likely to have, and has to be attention (scores.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import onnx

from penstock.frontends.imported import Unimported
from penstock.frontends.onnx.report import problem_of
from penstock.frontends.onnx.source import OnnxFile, names_taken, node_name
from penstock.frontends.onnx.tensors import KnownTensor
from penstock.frontends.writer import Refused
from penstock.ir.graph import Value
from penstock.ir.liveness import drop_dead

from .interface import Attention, DecoderNames, HeadShapes, JoinedTensor, WrittenOut, fed_inputs, head_size
from .lengths import LengthSample, import_at, needed_for
from .scores import Region, check_scores, read_scores, visible_keys

# Rows that are compared at each length.
_ROWS = 8


def read_written(
    source: OnnxFile, names: DecoderNames, samples: Sequence[LengthSample], taken: Collection[str]
) -> tuple[dict[str, Attention], list[Unimported | str]]:
    """Return the attentions by the names of their results, and problems. Past inputs that are `taken` already are those
    of other attentions."""
    graph = source.model.graph
    pasts = [name for name, value in fed_inputs(graph).items() if _is_past(name, value, names) and name not in taken]
    joined = list(_joined(graph.node, pasts))
    if not joined:
        return {}, []
    importer = import_at(source, graph.node, names, samples[0])
    tensors = importer.scope.tensors
    attentions, problems = dict[str, Attention](), list[Unimported | str]()
    for written in _attentions(graph.node, joined, {n for n, t in tensors.items() if isinstance(t, Value)}):
        name = node_name(graph.node[written.at], written.at)
        try:
            written = replace(written, shapes=_shapes(written, tensors))
            regions = [_region(source, names, written, sample) for sample in samples]
            scale, cap, window = read_scores(regions)
        except Refused as error:
            problems.append(problem_of(name, graph.node[written.at], str(error)))
            continue
        attentions[written.result] = Attention(
            name,
            written.result,
            *written.fed,
            regions[0].shapes.heads,
            regions[0].shapes.key_heads,
            scale,
            window,
            cap,
            size=head_size(fed_inputs(graph)[written.keys.past]),
            pasts=(written.keys.past, written.values.past),
            presents=tuple(_same(graph.node, written.keys.result) + _same(graph.node, written.values.result)),
            written=written,
        )
    met = {past for a in attentions.values() for past in a.pasts}
    if not problems:
        problems += [
            f"input {one.past}: past keys or values that no attention takes" for one in joined if one.past not in met
        ]
    return attentions, problems


def at_context(
    source: OnnxFile, names: DecoderNames, attentions: Mapping[str, Attention], context: int
) -> tuple[dict[str, Attention], list[str]]:
    """Return attentions with the windows that they have for texts as long as the context, and problems: those that are
    others for longer texts than for short ones. Layers that are alike are looked at once."""
    windows: dict[tuple[object, ...], int] = {}
    there, problems = dict[str, Attention](), list[str]()
    for result, attention in attentions.items():
        if attention.written is None:
            there[result] = attention
            continue
        form = _region(source, names, attention.written, LengthSample(3, 2)).form()
        key = (form, attention.scale, attention.cap, attention.window)
        try:
            if key not in windows:
                windows[key] = _window_at(source, names, attention, attention.written, context)
            there[result] = replace(attention, window=windows[key])
        except Refused as error:
            problems.append(f"{attention.node}: {error}")
    return there, problems


def _window_at(source: OnnxFile, names: DecoderNames, attention: Attention, written: WrittenOut, context: int) -> int:
    seen = visible_keys(_region(source, names, written, LengthSample(context - 1, 1)))
    window = seen if seen < context else attention.window
    if attention.window and window != attention.window:
        raise Refused(f"a row sees {seen} keys of {context}, but {attention.window} of fewer")
    lengths = [size for power in range(5, 40) for size in (2**power, 3 * 2 ** (power - 1)) if size < context]
    for length in (*lengths, context):
        rows = min(_ROWS, length - 1)
        region = _region(source, names, written, LengthSample(length - rows, rows))
        check_scores(region, attention.scale, attention.cap, window)
    return window


def _is_past(name: str, value: onnx.ValueInfoProto, names: DecoderNames) -> bool:
    return name not in (names.tokens, names.mask, names.positions) and len(value.type.tensor_type.shape.dim) == 4


def _joined(nodes: Sequence[onnx.NodeProto], pasts: Sequence[str]) -> Iterator[JoinedTensor]:
    """Find where new keys or values are joined to past ones."""
    for node in nodes:
        if node.op_type == "Concat" and len(node.input) == 2 and node.input[0] in pasts:
            axis = next((a.i for a in node.attribute if a.name == "axis"), 0)
            if axis in (2, -2):
                yield JoinedTensor(node.input[0], node.input[1], node.output[0])


def _attentions(
    nodes: Sequence[onnx.NodeProto], joined: Sequence[JoinedTensor], computed: Collection[str]
) -> Iterator[WrittenOut]:
    """Follow joined keys and values to where they meet. `computed` are tensors that do not follow from lengths."""
    by_result = {one.result: one for one in joined}
    # What each tensor comes from, and the queries that each one of the joined met.
    come_from: dict[str, JoinedTensor] = {}
    queries: dict[JoinedTensor, str] = {}
    for at, node in enumerate(nodes):
        origins = {name: come_from[name] for name in node.input if name in come_from}
        different = list(dict.fromkeys(origins.values()))
        if len(different) == 2:
            keys = next((one for one in different if one in queries), None)
            if keys is not None:
                values = next(one for one in different if one is not keys)
                yield WrittenOut(at, node.output[0], queries[keys], keys, values)
            continue
        for name in node.output:
            if name in by_result:
                come_from[name] = by_result[name]
            elif len(different) == 1 and name in computed:
                come_from[name] = different[0]
        if len(different) == 1:
            others = [name for name in names_taken(node) if name in computed and name not in origins]
            if others:
                queries.setdefault(different[0], others[0])


def _shapes(written: WrittenOut, tensors: Mapping[str, object]) -> HeadShapes:
    """Return the heads of an attention, and their sizes."""
    dims = []
    for name in (*written.fed, written.result):
        tensor = tensors.get(name)
        if not isinstance(tensor, Value):
            raise Refused(f"{name} is not computed")
        dims.append(tensor.type.dims)
    q, k, v, y = dims
    if len(k) != 4 or len(v) != 4 or k[:3] != v[:3]:
        raise Refused(f"keys of {list(k)} and values of {list(v)} are not [1, heads, tokens, size]")
    merged = len(q) == 3
    heads, tokens = (q[0], q[1]) if merged else (q[1], q[2]) if len(q) == 4 else (0, 0)
    expected = [(heads, tokens, v[3])] if merged else [(1, heads, tokens, v[3])]
    if (tokens, q[-1]) != (k[2], k[3]) or y not in expected or heads % k[1]:
        raise Refused(f"queries of {list(q)}, keys of {list(k)} and a result of {list(y)} are no attention of heads")
    return HeadShapes(heads, k[1], k[3], v[3], merged)


def _region(source: OnnxFile, names: DecoderNames, written: WrittenOut, sample: LengthSample) -> Region:
    """Import what lies between queries, keys and values and the result, for one number of past and new tokens."""
    nodes, shapes = source.model.graph.node, written.shapes
    assert shapes is not None
    fed = dict(zip(written.fed, shapes.of_new(sample.tokens), strict=True))
    between = [node for node in needed_for(nodes, [written.result], fed) if fed.keys().isdisjoint(node.output)]
    importer = import_at(source, between, names, sample, fed)
    tensors = importer.scope.tensors
    result = tensors.get(written.result)
    if not isinstance(result, Value):
        raise Refused("what is between its queries, keys, values and its result cannot be imported")
    pasts = (written.keys.past, written.values.past)
    ins = [tensors[name] for name in (*fed, *pasts)]
    values = [value for value in ins if isinstance(value, Value)]
    module = importer.builder.module("region", importer.inputs, [("result", result)])
    main = drop_dead(module.graphs["main"])
    graph = replace(main, ins=tuple(values))
    defined = {*values, *(value for op in graph.ops for value in op.outs)}
    if strangers := sorted({value.name for op in graph.ops for value in op.ins} - {value.name for value in defined}):
        raise Refused(f"takes {', '.join(strangers)} besides queries, keys and values")
    weights = {op.var: importer.builder.weights[op.var] for op in graph.ops if op.kind == "read"}
    numbers = [t.array for t in tensors.values() if isinstance(t, KnownTensor) and t.array.size == 1]
    return Region(graph, weights, shapes, sample, tuple(float(n.reshape(())) for n in numbers if n.dtype.kind == "f"))


def _same(nodes: Sequence[onnx.NodeProto], name: str) -> list[str]:
    """Return the names of a tensor: its own, and those of nodes that give it again."""
    names = [name]
    for node in nodes:
        if node.op_type == "Identity" and node.input[0] in names:
            names.append(node.output[0])
    return names
