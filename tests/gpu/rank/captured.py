"""A program: one stage on a device of straw, whose calls are captured, against the same calls kernel by kernel, and faults that are put in on purpose.

Out: a line of JSON: by the name of a case what differs, what the driver reports, the captured calls of each graph, the reasons, what captured calls keep, the
captures that torch's allocator takes for unfinished, and what the stream was told for the last call.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu.straw import libraries, streams
from gpu.straw.torch_device import devices

from penstock.backends.interface import CompileOptions
from penstock.backends.tvm.cuda import captures, torch_calls
from penstock.backends.tvm.cuda.build import build_graphs
from penstock.backends.tvm.cuda.load import CudaProgram
from penstock.backends.tvm.run.machine import give_back
from penstock.ir.graph import Graph, Op, Value
from penstock.ir.memory.captured import captured_bytes, made_values
from penstock.ir.ops import make
from penstock.ir.types import TensorType

STRAW, GPU, N = devices(), torch.device("cuda", 0), 48
CALLS = 9


def graphs() -> list[Graph]:
    """Return a forward with a product, a loss and two other results, and a backward that takes one and adds to a variable."""
    x, dy = (Value(name, TensorType("f32", (N, N))) for name in ("x", "dy"))
    product = make("matmul", [x, x], ["p"])
    product = Op(product.kind, product.ins, product.outs, {**product.attrs, "library": "torch"})
    tanh = make("tanh", product.outs, ["t"])
    root = make("exp", tanh.outs, ["e"])
    loss = make("sum", tanh.outs, ["l"], axes=(0, 1))
    forward = Graph("s0.F", (x,), (*root.outs, *loss.outs), (product, tanh, root, loss), saved=tanh.outs)
    scaled = make("mul", [dy, tanh.outs[0]], ["m"])
    total = make("neg", scaled.outs, ["n"])
    added = Op("accum", total.outs, (), {"var": "w"})
    return [forward, Graph("s0.B", (dy, tanh.outs[0]), (), (scaled, total, added))]


def on_gpu(array: np.ndarray) -> torch.Tensor:
    return torch.empty(array.shape, device=GPU).copy_(torch.from_numpy(array))


def worked(program: CudaProgram, calls: int = CALLS, flight: int = 2) -> tuple[list[np.ndarray], np.ndarray]:
    """Call forward and backward for some microbatches, a number of them in flight; return all results and the variable.
    Losses are kept to the end, as for a batch."""
    random = np.random.default_rng(0)
    w, results = torch.zeros(N, N, device=GPU), []
    w.is_variable = True  # type: ignore[attr-defined]
    waiting: list[Sequence[torch.Tensor]] = []
    losses: list[torch.Tensor] = []
    for _ in range(calls):
        x, dy = (random.standard_normal((N, N)).astype(np.float32) / 4 for _ in range(2))
        y, loss, saved = program.call("s0.F", [on_gpu(x)])
        losses.append(loss)
        waiting.append((y, saved, on_gpu(dy)))
        del y, saved
        if len(waiting) == flight:
            y, saved, dy_there = waiting.pop(0)
            results.append(y.cpu().numpy())
            program.call("s0.B", [dy_there, saved, w])
    return [*results, *(loss.cpu().numpy() for loss in losses)], w.cpu().numpy()


def synchronising(before: Callable[..., None]) -> Callable[..., None]:
    """Return a library call that looks at a result."""

    def call(a: Any, outs: Sequence[torch.Tensor], *ins: torch.Tensor) -> None:
        before(a, outs, *ins)
        outs[0].sum().item()

    return call


def set_of(name: str) -> int:
    """Return what a plan says that a captured call of a graph keeps."""
    (graph,) = (graph for graph in graphs() if graph.name == name)
    return captured_bytes(graph, made_values(graphs()))


def in_use() -> int:
    """Return the bytes of the device that are in use, by what the driver gave."""
    torch.cuda.synchronize(GPU)
    free, total = torch.cuda.mem_get_info(GPU)
    return total - free


def orders() -> int:
    """Return how often streams were told something."""
    number = ctypes.c_uint64()
    STRAW.runtime.straw_orders(ctypes.byref(number))
    return number.value


class Cases:
    """The cases; each changes something, and puts it back."""

    def __init__(self, library: Path) -> None:
        self.library = library
        self.expected = worked(self.program(wanted=False))

    def program(self, wanted: bool = True, room: int | None = None) -> CudaProgram:
        program = CudaProgram(self.library, graphs(), GPU, room=room)
        program.captures = program.captures if wanted else None
        return program

    def said(self, program: CudaProgram, **more: object) -> dict[str, object]:
        """Return what there is to say of a program that works as it should, or does not."""
        try:
            results, w = worked(program)
            same = all(np.array_equal(a, b) for a, b in zip(results, self.expected[0], strict=True))
            wrong = [] if same and np.array_equal(w, self.expected[1]) else ["results differ"]
        except RuntimeError as error:
            wrong = [f"error: {str(error).strip().splitlines()[-1]}"]
        try:
            # An operation of torch that has nothing to do with it.
            torch.zeros(1, device=GPU).cpu()
        except RuntimeError as error:
            wrong.append(f"torch: {error}")
        report, unfinished = libraries.report(STRAW.runtime), len(streams.RECORDING)
        streams.RECORDING.clear()
        STRAW.runtime.straw_clear()
        STRAW.failures.clear()
        assert program.captures is not None
        return {
            "wrong": wrong,
            "report": report,
            "numbers": program.captures.numbers(),
            "reasons": program.uncaptured(),
            "taken": program.captured_bytes(),
            "unfinished": unfinished,
            **more,
        }

    def sound(self) -> dict[str, object]:
        program, plain = self.program(), self.program(wanted=False)
        said, told = self.said(program), []
        for one in (program, plain):
            x = on_gpu(np.zeros((N, N), np.float32))
            before = orders()
            results = one.call("s0.F", [x])
            told.append(orders() - before)
            del results
        return {**said, "told": told}

    def callback_that_waits(self) -> dict[str, object]:
        before = torch_calls.CALLS["matmul"]
        torch_calls.CALLS["matmul"] = synchronising(before)
        try:
            return self.said(self.program())
        finally:
            torch_calls.CALLS["matmul"] = before

    def allocation(self) -> dict[str, object]:
        """The pool has no memory when a capture begins."""
        kind = captures.Captures
        before, kind._reserve = kind._reserve, lambda self, calls: give_back()
        try:
            return self.said(self.program())
        finally:
            kind._reserve = before

    def other_address(self) -> dict[str, object]:
        """The variable is another tensor, and captured calls are not told."""
        program, before = self.program(), captures._address
        captures._address = lambda x: 0 if hasattr(x, "is_variable") else x.data_ptr()
        try:
            worked(program)
            return self.said(program)
        finally:
            captures._address = before

    def short_of_memory(self) -> dict[str, object]:
        """Less memory is free than twice what a captured call takes."""
        before, torch.cuda.mem_get_info = torch.cuda.mem_get_info, lambda device: (4 * N * N, 1 << 32)
        try:
            return self.said(self.program())
        finally:
            torch.cuda.mem_get_info = before

    def losses_in_place(self) -> dict[str, object]:
        """Losses that are kept lie in the results of captured calls."""
        before, captures._SMALL = captures._SMALL, 0
        try:
            return self.said(self.program())
        finally:
            captures._SMALL = before

    def memory_that_ends(self) -> dict[str, object]:
        """A call takes more than is free, and the device says otherwise. TVM leaves the error in the runtime."""
        kind = captures.Captures
        before = kind._reserve

        def ends(self: captures.Captures, calls: object) -> None:
            give_back()
            filling.append(STRAW.allocate(torch.cuda.mem_get_info(GPU)[0], 0))
            before(self, calls)

        filling, left, forget = list[int](), list[int](), captures.forget_cuda_error

        def forgets() -> None:
            left.append(STRAW.runtime.cudaPeekAtLastError())
            forget()
            left.append(STRAW.runtime.cudaPeekAtLastError())
            STRAW.runtime.cudaFree(ctypes.c_void_p(filling.pop()))

        kind._reserve, captures.forget_cuda_error = ends, forgets
        try:
            return self.said(self.program(), left=left)
        finally:
            kind._reserve, captures.forget_cuda_error = before, forget

    def allocator_not_told(self) -> dict[str, object]:
        """A capture breaks, and torch's allocator is not told that it is over."""
        before, captures._end_capture = captures._end_capture, lambda graph, pool, device: graph.capture_end()
        try:
            return self.callback_that_waits()
        finally:
            captures._end_capture = before

    def interrupt(self) -> dict[str, object]:
        """Somebody interrupts a capture, and goes on later."""
        program, before, times = self.program(), torch_calls.CALLS["matmul"], [0]

        def call(a: Any, outs: Sequence[torch.Tensor], *ins: torch.Tensor) -> None:
            before(a, outs, *ins)
            if STRAW.capturing is not None:
                times[0] += 1
                raise KeyboardInterrupt

        torch_calls.CALLS["matmul"], interrupted = call, False
        try:
            worked(program)
        except KeyboardInterrupt:
            interrupted = True
        finally:
            torch_calls.CALLS["matmul"] = before
        return self.said(program, interrupted=interrupted, times=times[0])

    def room(self) -> dict[str, object]:
        """A plan leaves room for two calls of the forward, and for none of anything else."""
        return self.said(self.program(room=2 * set_of("s0.F")))

    def no_room(self) -> dict[str, object]:
        return self.said(self.program(room=min(map(set_of, ("s0.F", "s0.B"))) - 1))

    def account(self) -> dict[str, object]:
        """What the device gave for captured calls, and what the account says of them."""
        give_back()
        used = []
        for wanted in (False, True):
            program = self.program(wanted)
            worked(program)
            used.append(in_use())
        assert program.captures is not None
        calls, kept = program.captures.numbers(), program.captured_bytes()
        planned = sum(number * set_of(name) for name, number in calls.items())
        return self.said(program, grown=used[1] - used[0], planned=planned, kept=kept)

    def results_in_use(self) -> dict[str, object]:
        """A captured call is launched though tensors lie in its results."""
        kind = captures.CapturedCall
        before, kind.is_free = kind.is_free, lambda self: True
        try:
            return self.said(self.program())
        finally:
            kind.is_free = before

    def blocks_let_go(self) -> dict[str, object]:
        """Temporaries of a captured call go back to the pool, and from there to the device."""
        program = self.program()
        worked(program)
        assert program.captures is not None
        for calls in program.captures._calls.values():
            for captured in (c for some in calls.captured.values() for c in some):
                captured._blocks.clear()
        give_back()
        return self.said(program)


def main(folder: Path) -> dict[str, Any]:
    """Run every case."""
    cases = Cases(build_graphs(graphs(), folder / "stage.so", CompileOptions("sm_90")).path)
    names = [n for n in vars(Cases) if not n.startswith("_") and n not in ("program", "said")]
    return {name: getattr(cases, name)() for name in names}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
