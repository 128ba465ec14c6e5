"""The CUDA source of kernels, run on the CPU: what nvcc gets, compiled by g++, with a coroutine per thread of a block.

In: graphs of one operation. Out: a program that runs their kernels, launch by launch. A barrier hands over to the next thread, and all go on when all
have come to it. Blocks run one after the other. The types of nvcc's headers for 16-bit floats have a stand-in: bits that become a float when they are
read, and are rounded to the nearest, ties to even, when they are written.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import tvm
from tvm import tirx

from penstock.backends.tvm.cuda.pipeline import PIPELINE
from penstock.backends.tvm.cuda.target import cuda_target, device_machine
from penstock.backends.tvm.lower.lower import plan_kernels
from penstock.ir.graph import Graph
from penstock.runtime.state.store import allocate

_FRONT = r"""
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <ucontext.h>
using namespace std;
#define __global__
#define __shared__ static
#define __launch_bounds__(n)
#define alignas(n)
#define CUDART_INF_F INFINITY
#define CUDART_INF HUGE_VAL
#define CUDART_NAN_F NAN
#define CUDART_NAN nan("")
typedef unsigned char uchar;
struct Place { unsigned x; };
static Place threadIdx, blockIdx;
static ucontext_t back, at[1024];
static bool done[1024];
static int current;
static void __syncthreads() { int mine = current; swapcontext(&at[mine], &back); }
template <class T> static T __ldg(const T* p) { return *p; }
"""
_HALVES = r"""
#include <immintrin.h>
#include <cstring>
struct half {
  uint16_t bits;
  half() = default;
  template <class T> half(T x) : bits(_cvtss_sh((float)x, _MM_FROUND_TO_NEAREST_INT)) {}
  operator float() const { return _cvtsh_ss(bits); }
};
struct nv_bfloat16 {
  uint16_t bits;
  nv_bfloat16() = default;
  template <class T> nv_bfloat16(T given) {
    float x = (float)given;
    uint32_t word;
    memcpy(&word, &x, 4);
    bits = x != x ? 0x7fff : (word + 0x7fff + (word >> 16 & 1)) >> 16;
  }
  operator float() const { uint32_t word = (uint32_t)bits << 16; float x; memcpy(&x, &word, 4); return x; }
};
static half __float2half_rn(float x) { return half(x); }
static nv_bfloat16 __float2bfloat16_rn(float x) { return nv_bfloat16(x); }
"""
_BACK = r"""
static void (*body)(void**);
static void** given;
static void start() { body(given); done[current] = true; swapcontext(&at[current], &back); }
static const size_t STACK = 1 << 16;
extern "C" void launch(void (*f)(void**), void** arguments, int blocks, int threads, int together) {
  static char* stacks = (char*)malloc(STACK * 1024);
  body = f; given = arguments;
  for (int b = 0; b < blocks; b++) {
    blockIdx.x = b;
    if (!together) { for (int t = 0; t < threads; t++) { threadIdx.x = t; f(arguments); } continue; }
    for (int t = 0; t < threads; t++) {
      getcontext(&at[t]); done[t] = false;
      at[t].uc_stack.ss_sp = stacks + t * STACK; at[t].uc_stack.ss_size = STACK; at[t].uc_link = 0;
      makecontext(&at[t], start, 0);
    }
    for (bool left = true; left;) {
      left = false;
      for (int t = 0; t < threads; t++) if (!done[t]) { current = t; threadIdx.x = t; swapcontext(&back, &at[t]); left |= !done[t]; }
    }
  }
}
"""
_SIGNATURE = re.compile(r'extern "C" __global__ void (?:__launch_bounds__\(\d+\) )?(\w+)\(([^()]*)\) \{')


class SourceProgram:
    """Graphs of one kernel each, from their CUDA source."""

    def __init__(self, graphs: Sequence[Graph], folder: Path) -> None:
        self.device = torch.device("cpu")
        self.kernels = {}
        for i, graph in enumerate(graphs):
            (step,) = plan_kernels(graph, device_machine("sm_90")).steps
            self.kernels[graph.name] = (f"k{i}", graph, step.kernel)
        functions = {
            name: kernel.function.with_attr("global_symbol", name) for name, _, kernel in self.kernels.values()
        }
        target = cuda_target("sm_90")
        with target:
            built = tvm.tirx.build(tvm.IRModule(functions), target=target, pipeline=PIPELINE)
        source = "\n".join(m.inspect_source() for m in built.imports)
        source = source[source.index('extern "C"') :] if 'extern "C"' in source else ""
        self.parameters, wrappers = {}, []
        for name, text in _SIGNATURE.findall(source):
            pairs = [part.rsplit(" ", 1) for part in text.split(", ") if part]
            self.parameters[name] = [parameter.removesuffix("_ptr") for _, parameter in pairs]
            casts = ", ".join(f"({kind.replace('__restrict__', '')})a[{i}]" for i, (kind, _) in enumerate(pairs))
            wrappers.append(f'extern "C" void run_{name}(void** a) {{ {name}({casts}); }}')
        self.together = {
            n
            for n, _ in _SIGNATURE.findall(source)
            if "__syncthreads" in source.split(f" {n}(", 2)[2].split('extern "C"')[0]
        }
        (folder / "kernels.cpp").write_text("\n".join([_FRONT, _HALVES, source, *wrappers, _BACK]))
        command = [
            "g++",
            "-O1",
            "-w",
            "-mf16c",
            "-fno-strict-aliasing",
            "-shared",
            "-fPIC",
            "-o",
            "kernels.so",
            "kernels.cpp",
        ]
        subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
        self.library = ctypes.CDLL(str(folder / "kernels.so"))

    def hold(self, graph: str, slots: Sequence[torch.Tensor]) -> None:
        """Nothing is packed."""

    def call(self, graph: str, args: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        name, owner, kernel = self.kernels[graph]
        outs = [allocate(v.type) for v in kernel.outs]
        named = dict(zip(owner.ins, args, strict=True))
        given = [*(named[v] for v in kernel.ins), *outs]
        # Parameter b3 of the function is seen through the flat buffer f3.
        memory = {f"f{p.name[1:]}": tensor for p, tensor in zip(kernel.function.params, given, strict=True)}
        number = 0
        for statement in _statements(kernel.function.body):
            if isinstance(statement, tirx.AllocBuffer):
                size, kind = int(statement.buffer.shape[0]), getattr(torch, str(statement.buffer.dtype))
                memory[statement.buffer.name] = torch.full((size,), 77, dtype=kind)
            elif isinstance(statement, tirx.AttrStmt):
                self._launch(
                    f"{name}_kernel" + (f"_{number}" if number else ""),
                    memory,
                    int(statement.value),
                    int(statement.body.value),
                )
                number += 1
        found = dict(zip(kernel.outs, outs, strict=True))
        return [found[v] for v in owner.outs]

    def _launch(self, name: str, memory: dict[str, torch.Tensor], blocks: int, threads: int) -> None:
        pointers = [memory[parameter].data_ptr() for parameter in self.parameters[name]]
        array = (ctypes.c_void_p * max(len(pointers), 1))(*pointers)
        self.library.launch(getattr(self.library, f"run_{name}"), array, blocks, threads, int(name in self.together))


def _statements(body: Any) -> list[Any]:
    return [s for part in body.seq for s in _statements(part)] if isinstance(body, tirx.SeqStmt) else [body]
