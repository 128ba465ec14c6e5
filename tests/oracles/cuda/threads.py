"""The translation of CUDA source to C++ for a processor, with a coroutine per thread of a block.

In: the source that nvcc gets. Out: C++ source for g++, with a function `launch` and a table of the kernels. A warp runs until all of its threads are at
a barrier of the block, or done; then the next warp has its turn. So warps are as far apart as barriers let them. Blocks run one after the other. The
types of nvcc's headers for 16-bit floats have a stand-in: bits that become a float when they are read, and are rounded to the nearest, ties to even, when
they are written.
"""

from __future__ import annotations

import re
from typing import NamedTuple

FLAGS = ("-O1", "-w", "-mf16c", "-fno-strict-aliasing", "-shared", "-fPIC")

FRONT = r"""
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <type_traits>
#include <ucontext.h>
using namespace std;
#define __global__
#define __shared__ static
#define __launch_bounds__(n)
#define alignas(n) __attribute__((aligned(n)))
#define CUDART_INF_F INFINITY
#define CUDART_INF HUGE_VAL
#define CUDART_NAN_F NAN
#define CUDART_NAN nan("")
typedef unsigned char uchar;
// Vectors are moved as a GPU moves them: from a boundary of their size, or not at all.
template <class T, int n> struct __attribute__((aligned(n * sizeof(T)))) Vector { T lanes[n]; };
typedef Vector<float, 2> float2;
typedef Vector<float, 4> float4;
typedef Vector<double, 2> double2;
typedef Vector<int, 2> int2;
typedef Vector<int, 4> int4;
typedef Vector<unsigned, 4> uint4;
typedef Vector<long long, 2> longlong2;
typedef Vector<uint16_t, 4> half4;
typedef Vector<uint16_t, 4> nv_bfloat164;
typedef Vector<uint16_t, 2> half2;
typedef Vector<uint16_t, 2> nv_bfloat162;
struct Place { unsigned x; };
static Place threadIdx, blockIdx;
static ucontext_t back, at[1024];
static bool done[1024], waiting[1024];
static int current;
static void hand_over() { int mine = current; swapcontext(&at[mine], &back); }
static void __syncthreads() { waiting[current] = true; hand_over(); }
static void __syncwarp() { hand_over(); }
// Registers of a warp: every thread lays its own down, then takes that of another one. All threads of the warp get here. Two places in turn: who is
// late still finds what was laid down before.
static double registers[2][1024];
static bool turn[1024];
template <class T> static T __shfl_xor_sync(unsigned mask, T value, int distance, int width) {
  int mine = current;
  double* place = registers[turn[mine] = !turn[mine]];
  *(T*)&place[mine] = value;
  __syncwarp();
  return *(T*)&place[mine ^ distance];
}
template <class T> static T __ldg(const T* p) { return *p; }
"""
HALVES = r"""
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
# Pieces of products in the registers of a warp: a thread has eight neighbours of the 256 elements, from its own address. To multiply, the threads of a warp
# lay theirs down and take what they need. A piece on no boundary of 32 bytes, or in lines of no multiple of 16 bytes, is no number.
TENSOR_CORES = r"""
namespace nvcuda { namespace wmma {
struct matrix_a; struct matrix_b; struct accumulator; struct row_major; struct col_major;
enum layout_t { mem_row_major, mem_col_major };
static float left[32][256], right[32][256];
template <class Use, int m, int n, int k, class T, class Layout = void> struct fragment { T x[8]; };
template <class Use, int m, int n, int k, class T, class L> void fill_fragment(fragment<Use, m, n, k, T, L>& f, float value) {
  for (int i = 0; i < 8; i++) f.x[i] = value;
}
template <class T> static bool aligned(const T* p, int line) { return (size_t)p % 32 == 0 && line * sizeof(T) % 16 == 0; }
static int offset(int place, int line, bool rows) { return rows ? place / 16 * line + place % 16 : place % 16 * line + place / 16; }
template <class Use, class T, class L> void load_matrix_sync(fragment<Use, 16, 16, 16, T, L>& f, const T* p, int line) {
  for (int i = 0; i < 8; i++) {
    f.x[i] = aligned(p, line) ? (float)p[offset(threadIdx.x % 32 * 8 + i, line, is_same<L, row_major>::value)] : NAN;
  }
}
template <class A, class B, class C>
void mma_sync(C& d, const A& a, const B& b, const C& c) {
  int warp = threadIdx.x / 32, first = threadIdx.x % 32 * 8;
  for (int i = 0; i < 8; i++) { left[warp][first + i] = a.x[i]; right[warp][first + i] = b.x[i]; }
  __syncwarp();
  for (int i = 0; i < 8; i++) {
    float sum = c.x[i];
    int row = (first + i) / 16, column = (first + i) % 16;
    for (int k = 0; k < 16; k++) sum += left[warp][row * 16 + k] * right[warp][k * 16 + column];
    d.x[i] = sum;
  }
  __syncwarp();
}
template <class T> void store_matrix_sync(T* p, const fragment<accumulator, 16, 16, 16, T>& f, int line, layout_t layout) {
  for (int i = 0; i < 8; i++) p[offset(threadIdx.x % 32 * 8 + i, line, layout == mem_row_major)] = aligned(p, line) ? f.x[i] : NAN;
}
}}
"""
_BACK = r"""
static void (*body)(void**);
static void** given;
static void start() { body(given); done[current] = true; swapcontext(&at[current], &back); }
static const size_t STACK = 1 << 16;
// One turn of each thread of a warp that is neither done nor at a barrier of the block: whether any is left.
static bool goes_on(int first, int end) {
  bool left = false;
  for (int t = first; t < end; t++) {
    if (!done[t] && !waiting[t]) { current = t; threadIdx.x = t; swapcontext(&back, &at[t]); left |= !done[t] && !waiting[t]; }
  }
  return left;
}
extern "C" void launch(void (*f)(void**), void** arguments, int blocks, int threads, int together) {
  static char* stacks = (char*)malloc(STACK * 1024);
  body = f; given = arguments;
  for (int b = 0; b < blocks; b++) {
    blockIdx.x = b;
    if (!together) { for (int t = 0; t < threads; t++) { threadIdx.x = t; f(arguments); } continue; }
    for (int t = 0; t < threads; t++) {
      getcontext(&at[t]); done[t] = waiting[t] = false;
      at[t].uc_stack.ss_sp = stacks + t * STACK; at[t].uc_stack.ss_size = STACK; at[t].uc_link = 0;
      makecontext(&at[t], start, 0);
    }
    for (bool left = true; left;) {
      left = false;
      for (int first = 0; first < threads; first += 32) while (goes_on(first, min(first + 32, threads))) {}
      for (int t = 0; t < threads; t++) { left |= !done[t]; waiting[t] = false; }
    }
  }
}
struct Kernel { const char* name; void (*run)(void**); int together, threads, shared; const int* parameters; };
"""
_SIGNATURE = re.compile(r'extern "C" __global__ void (?:__launch_bounds__\((\d+)\) )?(\w+)\(([^()]*)\) \{')
_SHARED = re.compile(r"__shared__ (?:alignas\(\d+\) )?([\w ]+?) \w+\[(\d+)\];")


class CudaKernel(NamedTuple):
    """A kernel of a source: its parameters, by type and name; if its threads meet at barriers; the threads it is compiled for, 0 if any number; its
    shared arrays, by element type and length."""

    name: str
    parameters: tuple[tuple[str, str], ...]
    together: bool
    threads: int
    shared: tuple[tuple[str, str], ...]


def kernels_of(source: str) -> list[CudaKernel]:
    """Return the kernels of a CUDA source, in their order."""
    found = list(_SIGNATURE.finditer(source))
    ends = [match.start() for match in found[1:]] + [len(source)]
    kernels = []
    for match, end in zip(found, ends, strict=True):
        parameters = [part.rsplit(" ", 1) for part in match[3].split(", ") if part]
        body = source[match.end() : end]
        kernels.append(
            CudaKernel(
                match[2],
                tuple((kind.replace("__restrict__", "").strip(), name) for kind, name in parameters),
                "__syncthreads" in body or "__shfl_" in body,
                int(match[1] or 0),
                tuple(_SHARED.findall(body)),
            )
        )
    return kernels


def translated(source: str) -> str:
    """Return C++ for the kernels of a CUDA source. `run_NAME` takes the addresses of a kernel's arguments; the table `kernels` has all of them."""
    source = source[source.index('extern "C"') :] if 'extern "C"' in source else ""
    lines, rows = [], []
    for kernel in kernels_of(source):
        values = ", ".join(f"*({kind}*)a[{i}]" for i, (kind, _) in enumerate(kernel.parameters))
        sizes = [f"(int)sizeof({kind})" if "*" not in kind else "-8" for kind, _ in kernel.parameters]
        shared = " + ".join(["0", *(f"{length} * (int)sizeof({kind})" for kind, length in kernel.shared)])
        lines.append(f'extern "C" void run_{kernel.name}(void** a) {{ {kernel.name}({values}); }}')
        lines.append(f"static const int sizes_{kernel.name}[] = {{{', '.join([*sizes, '0'])}}};")
        rows.append(
            f'{{"{kernel.name}", run_{kernel.name}, {int(kernel.together)}, {kernel.threads}, {shared}, sizes_{kernel.name}}},'
        )
    table = ['extern "C" { extern const Kernel kernels[] = {', *rows, "{0, 0, 0, 0, 0, 0}}; }"]
    return "\n".join([FRONT, HALVES, TENSOR_CORES, source, _BACK, *lines, *table])
