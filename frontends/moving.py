"""Buffers that the forward pass changes, such as the running statistics of a batch norm: graph main reads them, then writes them.

In training they move once per microbatch, in the order of microbatches, on the one stage that has them. Without training nothing moves:
`at_rest` takes the writes out. A module of torch whose outputs depend on such a buffer is refused then, because its results would be those
of its first call for ever; calls of an ONNX model know nothing of each other anyway.
"""

from __future__ import annotations

from dataclasses import replace

from penstock.ir.graph import Module, written_vars
from penstock.ir.liveness import live_ops
from penstock.support.errors import UnsupportedModel


def at_rest(module: Module, pure: bool = False) -> Module:
    """The module for inference: nothing is written, and what only went into writes is not computed. `pure`: nothing is kept
    from call to call in the source either."""
    main = module.graphs["main"]
    moving = written_vars(main)
    if not moving:
        return module
    ops = tuple(live_ops([op for op in main.ops if op.kind != "write"], main.outs))
    read = {op.var for op in ops if op.kind == "read"}
    lost = [name for name in module.vars if name in moving & read]
    if lost and not pure:
        raise UnsupportedModel(
            f"outputs depend on {', '.join('@' + name for name in lost)}, which forward changes: without training nothing is kept "
            "from call to call",
            where=module.name,
            hint="import the module in the mode in which it uses what it has stored: eval()",
        )
    variables = {name: var for name, var in module.vars.items() if name in read}
    return module.with_graph(replace(main, ops=ops)).but(vars=variables)
