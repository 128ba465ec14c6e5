"""Targets: the CPU that code is compiled for, and the tile sizes that its vector registers allow.

In: a name: `host`, `portable`, or an LLVM CPU name such as `skylake-avx512`, with features after plus signs, as in
`rocketlake+amx-tile+amx-bf16`. Code for `portable` runs on every x86-64 machine with AVX2. Out: a TVM target and the
tile of the matrix kernel.

Rule: a tile has rows * vectors accumulators. They must leave registers for one row of the packed operand and one
broadcast value. That is at most 28 of 32 registers with AVX-512, 12 of 16 with AVX2, 8 of 16 without. A step of a tile
loads rows + vectors times for rows * vectors multiply-adds. A core does as many multiply-adds as loads. With AVX-512
the tile of matrix products is 6x4 (10 loads for 24). A panel that has left the first cache still keeps it busy; 12x2
(14 loads) needs the panel there.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from penstock.support.errors import UsageError

from .tile_permission import allow_tiles

PORTABLE = "x86-64-v3"
# The pass makes wrong code in LLVM 22.1.0, which TVM 0.27 has (llvm/llvm-project issues 174046, 214650, 222554):
# it took two indices of a loop from one register of 64 bits, and the first kept the second's bits. Kernels write
# their vectors themselves and do not miss it.
WITHOUT_VECTOR_COMBINE = "-disable-vector-combine:bool=true"
# LLVM's names of the features that products of bf16 on tile registers need.
TILES = ("amx-tile", "amx-bf16")


@dataclass(frozen=True, slots=True)
class TargetMachine:
    """The properties of a target that kernels need. `lanes` are f32 elements per vector; tiles are `rows` by `vectors`
    vectors."""

    name: str
    lanes: int
    rows: int
    vectors: int
    # The same for matrix products, whose panels are long.
    product_rows: int
    product_vectors: int
    # Elements below which a loop is not worth waking the other threads.
    serial_below: int = 16384
    # A GPU, whose kernels have loops of their own.
    is_device: bool = False
    # Registers that hold tiles of matrices, with products of bf16 (Intel AMX).
    has_tiles: bool = False
    # One instruction adds up four products of bytes (AVX-512 VNNI). Else one adds up two of 16 bits, if `has_words`.
    has_byte_products: bool = False
    has_words: bool = True


def host_cpu() -> str:
    """Return LLVM's name for the CPU of this machine."""
    from tvm.target import codegen  # lazy: heavy

    return str(codegen.llvm_get_system_cpu())


def host_features() -> tuple[str, ...]:
    """Return the features of this machine beyond what the name of its CPU says: LLVM goes by model numbers, and virtual
    machines hide theirs."""
    return TILES if allow_tiles() else ()


def machine_of(name: str) -> TargetMachine:
    """Return the machine of a target name; UsageError for names that LLVM does not know."""
    host = "+".join((host_cpu(), *host_features())) if name == "host" else ""
    cpu = {"host": host, "portable": PORTABLE}.get(name, name)
    return _machine(cpu)


@lru_cache(maxsize=32)
def _machine(cpu: str) -> TargetMachine:
    from tvm.target import codegen  # lazy: heavy

    if not codegen.llvm_is_valid_cpu(cpu.partition("+")[0], str(codegen.llvm_get_system_triple())):
        raise UsageError(
            f"unknown target CPU {cpu!r}",
            hint="`host`, `portable`, or an LLVM name such as skylake-avx512, znver4, x86-64-v3",
        )
    target = tvm_target(cpu)
    if codegen.target_has_features(["avx512f"], target):
        # By name only, although LLVM counts tiles among the features of some models: not every process on such a
        # machine may use them, and loading goes by the name of the library (run/load.py).
        tiles = set(TILES) <= set(cpu.split("+")[1:])
        bytes_too = codegen.target_has_features(["avx512vnni"], target)
        words = codegen.target_has_features(["avx512bw"], target)
        return TargetMachine(cpu, 16, 12, 2, 6, 4, has_tiles=tiles, has_byte_products=bytes_too, has_words=words)
    if codegen.target_has_features(["avx2"], target):
        return TargetMachine(cpu, 8, 6, 2, 6, 2)
    return TargetMachine(cpu, 4, 4, 2, 4, 2)


def tvm_target(cpu: str) -> Any:
    """Return TVM's target for an LLVM CPU name, with features after plus signs. The number of threads is set when the
    code is loaded, not here."""
    import tvm  # lazy: heavy

    name, *features = cpu.split("+")
    extra = {"mattr": [f"+{feature}" for feature in features]} if features else {}
    return tvm.target.Target(
        {"kind": "llvm", "mcpu": name, "num-cores": 1, "cl-opt": [WITHOUT_VECTOR_COMBINE], **extra}
    )
