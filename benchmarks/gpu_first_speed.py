"""The last step of gpu_first.sh: the speed of a training step beside eager torch and torch.compile, without any file of weights.

In: a payload with the code and the IR of one training of a GPT for one GPU. Out: lines of a table. Weights are drawn by
name, the same for all contenders; a step is a forward and a backward pass and an update, the same batch again and again,
in bfloat16 over float32 parameters. Times are wall times between synchronisations, medians of rounds in which the
contenders take turns. The losses of the first steps must agree and fall.
"""

from __future__ import annotations

import statistics
import time
import zlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch_models

from penstock.backends.interface import stage_graphs
from penstock.ir.files import read_module
from penstock.ir.graph import PARAM, Module, signature
from penstock.ir.interpreter.ops import TYPED
from penstock.ir.interpreter.store import initial_arrays
from penstock.ir.types import numpy_dtype
from penstock.runtime.state.tensors import allocate, fill

if TYPE_CHECKING:
    from gpu_first import Payload

# Relative to the first loss. Both round to 8 bits, at other places.
LOSS_TOLERANCE = 2e-2
Step = Callable[[], torch.Tensor]


def drawn(module: Module) -> dict[str, np.ndarray]:
    """Draw the parameters: small matrices, scales of 1, offsets of 0."""
    arrays = {}
    for name, variable in module.vars.items():
        if variable.role != PARAM:
            continue
        dims = variable.type.dims
        if len(dims) > 1:
            rng = np.random.default_rng(zlib.crc32(name.encode()))
            arrays[name] = (0.02 * rng.standard_normal(dims, np.float32)).astype(np.float32)
        else:
            arrays[name] = np.full(dims, float(name.endswith("weight")), np.float32)
    return arrays


def penstock_step(payload: Payload, module: Module, weights: Mapping[str, np.ndarray], fed: Mapping[str, Any]) -> Step:
    """Return a step of Penstock, as a worker calls the graphs of its stage."""
    graphs = stage_graphs(module, 0)
    program = payload.program("speed.so", graphs)
    arrays = initial_arrays(module, weights, list(module.vars), TYPED)
    held = {name: fill(allocate(module.vars[name].type, program.device), array) for name, array in arrays.items()}
    slots = {graph.name: [held[slot.var] for slot in signature(graph).slots] for graph in graphs}
    types = {v.name: v.type for v in module.inputs}
    inputs = {
        name: fill(allocate(types[name], program.device), np.asarray(array).astype(numpy_dtype(types[name].dtype)))
        for name, array in fed.items()
    }

    def step() -> torch.Tensor:
        values = dict(inputs)
        for graph in graphs:
            results = program.call(graph.name, [*(values[v.name] for v in graph.ins), *slots[graph.name]])
            values |= dict(zip((v.name for v in graph.results), results, strict=True))
        return values[module.outputs[0]]

    return step


def torch_step(
    sizes: Mapping[str, Any],
    weights: Mapping[str, np.ndarray],
    fed: Mapping[str, Any],
    how: Mapping[str, float],
    compiled: bool,
) -> Step:
    """Return a step of torch, eager or compiled."""
    device = torch.device("cuda", 0)
    model = torch_models.filled("gpt", sizes, weights).to(device)
    tokens, labels = (torch.from_numpy(fed[name]).to(device) for name in ("tokens", "labels"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=how["lr"], weight_decay=how["weight_decay"])

    def loss_of(tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return torch.nn.functional.cross_entropy(model(tokens).flatten(0, -2).float(), labels.flatten())

    function = torch.compile(loss_of) if compiled else loss_of

    def step() -> torch.Tensor:
        loss = function(tokens, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def measure(payload: Payload, checked: int, timed: int, rounds: int) -> list[str]:
    """Compare and time all contenders; return what there is to say. Wrong losses are an error."""
    from gpu_first import Wrong

    facts = payload.facts["speed"]
    module = read_module(payload.home / "speed.ir")
    weights, sizes, shape = drawn(module), facts["sizes"], (facts["batch"], facts["sizes"]["positions"])
    rng = np.random.default_rng(2)
    fed = {name: rng.integers(0, sizes["vocab"], shape) for name in ("tokens", "labels")}
    steps = {"penstock": penstock_step(payload, module, weights, fed)}
    for name, compiled in (("torch", False), ("torch.compile", True))[: facts["contenders"]]:
        steps[name] = torch_step(sizes, weights, fed, facts["optimizer"], compiled)
    losses = {name: [float(step()) for _ in range(checked)] for name, step in steps.items()}
    first = losses["penstock"]
    lines = [f"losses of {name}: {', '.join(f'{x:.5f}' for x in values)}" for name, values in losses.items()]
    wrong = [
        n for n, values in losses.items() if not np.allclose(values, first, atol=LOSS_TOLERANCE * first[0], rtol=0)
    ]
    if wrong or not first[-1] < first[0]:
        raise Wrong("\n".join([*lines, "losses differ, or do not fall"]))
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(timed):
                step()
            torch.cuda.synchronize()
            seconds[name].append((time.perf_counter() - begin) / timed)
    if len(steps) == 1:
        lines.append("nothing beside it: this payload leaves torch out")
    tokens, ours = shape[0] * shape[1], statistics.median(seconds["penstock"])
    for name, times in seconds.items():
        median = statistics.median(times)
        lines.append(
            f"{name}: {1e3 * median:.2f} ms a step (from {1e3 * min(times):.2f} to {1e3 * max(times):.2f}), "
            f"{tokens / median:,.0f} tokens/s; penstock is {median / ours:.2f} times as fast"
        )
    return lines
