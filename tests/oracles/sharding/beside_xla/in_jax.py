"""The sharded programs in jax, and the collectives that XLA's partitioner makes of them.

`python tests/oracles/sharding/beside_xla/in_jax.py` writes xla.json: for every program, forward alone and with
gradients, the collectives of the compiled text by kind, with the bytes that a device sends. `--print` prints it. That
needs jax (the extra `peers`), and no device but this processor, which stands for eight. Parameters and inputs without a
given layout lie as XLA likes.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # Relative imports of a program start where its package is said to be.
    sys.path[0], __package__ = str(Path(__file__).resolve().parents[3]), "oracles.sharding.beside_xla"

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .compiled_text import collectives_of
from .moved import DATA, FORWARD, GRADIENTS, summed
from .programs import HEADS, PROGRAMS, WIDTH, ShardedProgram

_DTYPES = {"f32": jnp.float32, "i64": jnp.int32}


def spec(layout: str) -> PartitionSpec:
    """Return a layout as a partition spec; three blocks are a dimension of their own."""
    entries: list[Any] = []
    for word in layout[1:-1].split(","):
        blocks, _, axes = word.rpartition("*")
        entries += [None] if blocks else []
        entries.append(tuple(axes.split("/")[1:]) if axes != "_" else None)
    return PartitionSpec(*entries)


class Declared:
    """A first reading of a program: the shapes of what it is fed and of its parameters."""

    def __init__(self) -> None:
        self.inputs: dict[str, jax.ShapeDtypeStruct] = {}
        self.parameters: dict[str, jax.ShapeDtypeStruct] = {}


class InJax:
    """The operations of programs in jax."""

    def __init__(self, program: ShardedProgram, mesh: Mesh, declared: Declared, held: dict[str, Any] | None) -> None:
        self.program, self.mesh, self.declared, self.held = program, mesh, declared, held

    def _get(self, listed: dict[str, jax.ShapeDtypeStruct], name: str, shape: Sequence[int], dtype: str) -> Any:
        listed[name] = jax.ShapeDtypeStruct(tuple(shape), _DTYPES[dtype])
        return jnp.zeros(shape, _DTYPES[dtype]) if self.held is None else self.held[name]

    def feed(self, name: str, *shape: int, dtype: str = "f32") -> Any:
        return self._get(self.declared.inputs, name, shape, dtype)

    def parameter(self, name: str, *shape: int) -> Any:
        return self._get(self.declared.parameters, name, shape, "f32")

    def named(self, name: str, x: Any) -> Any:
        if name not in self.program.given:
            return x
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec(self.program.given[name])))

    def matmul(self, x: Any, w: Any, tb: bool = False) -> Any:
        return x @ (jnp.swapaxes(w, -1, -2) if tb else w)

    def add(self, x: Any, y: Any) -> Any:
        return x + y

    def sub(self, x: Any, y: Any) -> Any:
        return x - y

    def mul(self, x: Any, y: Any) -> Any:
        return x * y

    def gelu(self, x: Any) -> Any:
        return jax.nn.gelu(x, approximate=False)

    def relu(self, x: Any) -> Any:
        return jax.nn.relu(x)

    def rsqrt(self, x: Any) -> Any:
        return 1 / jnp.sqrt(x + 1e-5)

    def mean(self, x: Any, axes: tuple[int, ...]) -> Any:
        return jnp.mean(x, axes, keepdims=True)

    def norm(self, x: Any, scale: Any, shift: Any) -> Any:
        below = x - jnp.mean(x, -1, keepdims=True)
        return below / jnp.sqrt(jnp.mean(below * below, -1, keepdims=True) + 1e-5) * scale + shift

    def reshape(self, x: Any, *shape: int) -> Any:
        return jnp.reshape(x, shape)

    def transpose(self, x: Any, *perm: int) -> Any:
        return jnp.transpose(x, perm)

    def joint(self, x: Any, name: str, width: int) -> tuple[Any, Any, Any]:
        weight, bias = self.parameter(f"{name}.weight", x.shape[-1], 3, width), self.parameter(f"{name}.bias", 3, width)
        y = jnp.einsum("bsd,dce->bsce", x, weight) + bias
        return y[:, :, 0], y[:, :, 1], y[:, :, 2]

    def attention(self, q: Any, k: Any, v: Any) -> Any:
        scores = jnp.einsum("bhsd,bhtd->bhst", q, k) * (WIDTH // HEADS) ** -0.5
        return jnp.einsum("bhst,bhte->bhse", jax.nn.softmax(scores, -1), v)

    def look_up(self, table: Any, ids: Any) -> Any:
        return table.at[ids].get(mode="promise_in_bounds")

    def conv(self, x: Any, w: Any, stride: int, pad: int) -> Any:
        return jax.lax.conv_general_dilated(x, w, (stride, stride), [(pad, pad)] * 2)

    def mse(self, x: Any, y: Any) -> Any:
        return jnp.mean((x - y) ** 2)

    def cross_entropy(self, x: Any, labels: Any) -> Any:
        is_label = jnp.arange(x.shape[-1]) == labels[..., None]
        return jnp.mean(jax.nn.logsumexp(x, -1) - jnp.sum(jnp.where(is_label, x, 0), -1))


def compiled(program: ShardedProgram, gradients: bool) -> str:
    """Return what XLA compiles a program to for one device."""
    devices = np.array(jax.devices()[: prod(program.mesh.values())]).reshape(tuple(program.mesh.values()))
    mesh, declared = Mesh(devices, tuple(program.mesh)), Declared()
    jax.eval_shape(lambda: program.write(InJax(program, mesh, declared, None)))

    def loss(parameters: dict[str, Any], inputs: dict[str, Any]) -> Any:
        return program.write(InJax(program, mesh, Declared(), {**parameters, **inputs}))

    def laid(names: Sequence[str]) -> dict[str, NamedSharding | None]:
        return {n: NamedSharding(mesh, spec(program.given[n])) if n in program.given else None for n in names}

    lies, whole = laid(list(declared.parameters)), NamedSharding(mesh, PartitionSpec())
    function: Callable[..., Any] = jax.value_and_grad(loss) if gradients else loss
    step = jax.jit(
        function,
        in_shardings=(lies, laid(list(declared.inputs))),
        out_shardings=(whole, lies) if gradients else whole,
    )
    return str(step.lower(declared.parameters, declared.inputs).compile().as_text())


def counted() -> dict[str, dict[str, dict[str, list[float]]]]:
    """Return the collectives of every program, forward alone and with gradients."""
    return {
        name: {
            what: {
                kind: list(both) for kind, both in summed(collectives_of(compiled(program, what == GRADIENTS))).items()
            }
            for what in (FORWARD, GRADIENTS)
        }
        for name, program in PROGRAMS.items()
    }


if __name__ == "__main__":
    text = json.dumps({"jax": jax.__version__, "programs": counted()}, indent=1) + "\n"
    if sys.argv[1:] == ["--print"]:
        print(text)
    else:
        DATA.write_text(text, encoding="utf-8")
