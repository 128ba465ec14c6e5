"""The check of a bundle with bounded dimensions: every rung, or one size, against the interpreter.

In: a bundle, sizes. Out: comparisons of the answers to requests of these sizes with the reference of the largest rung
in float64. That one gets the request filled up, with padding as large as the request's numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from penstock.backends.bundle.format import Bundle
from penstock.ir.graph import Module
from penstock.ir.ladder.bounds import Bounded, print_sizes
from penstock.ir.names import shown
from penstock.runtime.job.job import open as open_job
from penstock.runtime.job.sized_requests import SizedRequests
from penstock.support.errors import UsageError

from .inputs import synthetic_batch
from .verdicts import Comparison, Judge

Arrays = Mapping[str, np.ndarray]
# Results of a graph in float64, and functions that give them as its types say, and with noise.
Runs = Callable[[Arrays], tuple[dict[str, np.ndarray], Callable[[], Arrays], Callable[..., Arrays]]]


def sizes_to_check(bundle: Bundle, chosen: Mapping[str, int]) -> list[dict[str, int]]:
    """Return the sizes of all rungs, or those that are chosen; a dimension that is left open has its largest size."""
    most = bundle.ladder.most
    if unknown := [name for name in chosen if name not in most]:
        raise UsageError(f"the bundle has no bounded dimension {unknown[0]}", hint=f"it has {', '.join(most)}")
    if beyond := [name for name, size in chosen.items() if not 1 <= size <= most[name]]:
        raise UsageError(f"{print_sizes(chosen)}: {beyond[0]} has sizes from 1 to {most[beyond[0]]}")
    return [{**most, **chosen}] if chosen else [dict(rung.sizes) for rung in bundle.ladder]


def compared_sizes(
    bundle: Bundle,
    reference: Module,
    sizes: Sequence[Mapping[str, int]],
    seed: int,
    runs: Runs,
    compare: Callable[[Judge[str], str, str, np.ndarray], Comparison],
) -> list[Comparison]:
    """Compare the outputs of a bundle at some sizes with those of the interpreter."""
    rows = []
    with open_job(bundle.path) as job:
        for of_request in sizes:
            inputs, filled = _request(bundle, of_request, seed)
            answer = job.infer(inputs)
            exact, rounded, noisy = runs(filled)

            def cut(arrays: Arrays, of_request: Mapping[str, int] = of_request) -> dict[str, np.ndarray]:
                return {name: _cut(bundle.module.bounds, name, arrays[name], of_request) for name in reference.outputs}

            judge = Judge(
                cut(exact),
                lambda cut=cut, rounded=rounded: cut(rounded()),  # type: ignore[misc]
                lambda noise, cut=cut, noisy=noisy: cut(noisy(noise)),  # type: ignore[misc]
                seed,
            )
            theirs = shown(reference.outputs, bundle.renamed)
            for name in reference.outputs:
                result = answer[theirs[name]].reshape(judge.exact[name].shape)
                rows.append(compare(judge, f"{print_sizes(of_request)}: {theirs[name]}", name, result))
    return rows


def _request(
    bundle: Bundle, sizes: Mapping[str, int], seed: int
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return inputs of some sizes by the model's names, and by ours filled up to the largest, with the sizes."""
    module = bundle.module
    whole = synthetic_batch(module, 1, seed)
    ours = {name: _cut(module.bounds, name, array, sizes) for name, array in whole.items()}
    outside = shown([value.name for value in module.data_inputs], bundle.renamed)
    named = {outside[name]: np.ascontiguousarray(array) for name, array in ours.items()}
    requests = SizedRequests(bundle)
    padded = requests.padded(named, bundle.ladder.largest, 0, sizes)
    filled = {name: _noisy(padded[outside[name]], ours[name]) for name in ours}
    asked_for = {value.name for value in module.inputs}
    live = {bound.input: np.array(sizes[bound.name]) for bound in module.bounds if bound.input in asked_for}
    return named, {**filled, **live}


def _noisy(padded: np.ndarray, own: np.ndarray) -> np.ndarray:
    """Return an array whose padding holds numbers: the largest element of the request, where it is of floats."""
    if padded.shape == own.shape or padded.dtype.kind != "f":
        return padded
    whole = np.full(padded.shape, np.max(np.abs(own), initial=0.0) + 1.0, padded.dtype)
    whole[tuple(slice(0, n) for n in own.shape)] = own
    return whole


def _cut(bounds: Sequence[Bounded], name: str, array: np.ndarray, sizes: Mapping[str, int]) -> np.ndarray:
    keep = [slice(None)] * array.ndim
    for bound in bounds:
        for dim in bound.dims_of(name):
            keep[dim] = slice(0, array.shape[dim] // bound.size * sizes[bound.name])
    return array[tuple(keep)]
