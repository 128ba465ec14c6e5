"""Buffers that the forward pass changes, such as running statistics: graph main reads them, then writes them.

In training they change once per microbatch, in the order of microbatches, on the one stage that holds them. Without
training nothing changes: `at_rest` removes the writes. A torch module whose outputs depend on such a buffer is then
refused, because each of its calls would repeat the result of the first. An ONNX model passes: its calls are independent
of each other.
"""

from __future__ import annotations

from dataclasses import replace

from penstock.ir.graph import Module, written_vars
from penstock.ir.liveness import live_ops
from penstock.support.errors import UnsupportedModel


def at_rest(module: Module, pure: bool = False) -> Module:
    """Remove the writes of variables, and the operations that only they need, for inference.

    `pure` says that the source itself keeps nothing from call to call.
    """
    main = module.graphs["main"]
    moving = written_vars(main)
    if not moving:
        return module
    ops = tuple(live_ops([op for op in main.ops if op.kind != "write"], main.outs))
    read = {op.var for op in ops if op.kind == "read"}
    lost = [name for name in module.vars if name in moving & read]
    if lost and not pure:
        raise UnsupportedModel(
            f"outputs depend on {', '.join('@' + name for name in lost)}, which forward changes: "
            "without training nothing is kept from call to call",
            where=module.name,
            hint="import the module in the mode in which it uses what it has stored: eval()",
        )
    variables = {name: var for name, var in module.vars.items() if name in read}
    return module.with_graph(replace(main, ops=ops)).but(vars=variables)
