"""ATen operations that resize images, or sample them at computed places."""

from __future__ import annotations

import torch

from penstock.frontends.formulas.resizing import pick, resample, taps_of
from penstock.frontends.formulas.sampling import grid_sample
from penstock.frontends.torch.node import Result, Rule, TorchNode


def nearest(r: int) -> Rule:
    """Make a rule that copies entries. Applied to 0, 1, 2, ..., torch's operation gives the places along each axis."""

    def rule(n: TorchNode) -> Result:
        x = n.value(_picture(n))
        for i, out in enumerate(_wanted(n)):
            line = torch.arange(x.type.dims[2 + i], dtype=torch.float64)[:, None]
            x = pick(n, x, 2 + i, _along_one(n, line, i, r, out)[:, 0].long().numpy())
        return x

    return rule


def _picture(n: TorchNode) -> str:
    """Return the name of the argument that is resized."""
    return "input" if "input" in n.names else "self"


def _wanted(n: TorchNode) -> tuple[int, ...]:
    """Return the sizes after resizing."""
    if n.has("output_size"):
        return n.ints("output_size")
    x = n.type(_picture(n))
    return tuple(int(size * factor) for size, factor in zip(x.dims[2:], n.arg("scale_factors"), strict=True))


def _along_one(n: TorchNode, columns: torch.Tensor, i: int, r: int, out: int) -> torch.Tensor:
    """Apply torch's operation to each column [size] along spatial dimension i of an image.

    The image is constant along the others, which have size 2. Return [out, columns].
    """
    size, count = columns.shape
    shape, wanted = [1] * r, [2] * r  # torch 2.13 gives the first row throughout where antialiased pictures are 1 wide
    result: torch.Tensor
    shape[i], wanted[i] = size, out
    arguments: list[object] = []
    for name in list(n.names)[1:]:
        match name:
            case "output_size":
                arguments.append(wanted if not n.has("scale_factors") else None)
            case "scales_h" | "scales_w":  # of two dimensions
                arguments.append(n.arg(name) if name == ("scales_h", "scales_w")[i] else None)
            case "scale_factors":
                arguments.append([n.arg(name)[j] if j == i else 1.0 for j in range(r)] if n.has(name) else None)
            case _:
                arguments.append(n.arg(name))
    laid = columns.T.reshape(1, count, *shape).expand(1, count, *(size if j == i else 2 for j in range(r)))
    result = n.target(laid.contiguous(), *arguments)  # type: ignore[operator]
    return result.movedim(2 + i, -1).reshape(count, -1, out)[:, 0].T.contiguous()


def _grid_sample(n: TorchNode) -> Result:
    mode, padding = int(n.arg("interpolation_mode")), int(n.arg("padding_mode"))
    modes, paddings = ("linear", "nearest", "cubic"), ("zeros", "border", "reflection")
    return grid_sample(
        n, n.value("input"), n.value("grid"), modes[mode], paddings[padding], bool(n.arg("align_corners"))
    )


def linear(r: int) -> Rule:
    """Make the rule of a separable interpolation: a product with a matrix of weights along each axis.

    torch computes the weights from the unit vectors.
    """

    def rule(n: TorchNode) -> Result:
        x = n.value(_picture(n))
        for i, (size, out) in enumerate(zip(x.type.dims[2:], _wanted(n), strict=True)):
            weights = _along_one(n, torch.eye(size, dtype=torch.float64), i, r, out)
            if not torch.equal(weights, torch.eye(size, dtype=torch.float64)):
                x = resample(n, x, 2 + i, taps_of(weights.numpy()))
        return x

    return rule


RULES: dict[str, Rule] = {
    "grid_sampler_2d": _grid_sample,
    "upsample_nearest1d.vec": nearest(1),
    "upsample_nearest2d.vec": nearest(2),
    "upsample_nearest3d.vec": nearest(3),
    "upsample_linear1d.vec": linear(1),
    "upsample_bilinear2d.vec": linear(2),
    "upsample_trilinear3d.vec": linear(3),
    "upsample_bicubic2d.vec": linear(2),
    "_upsample_bilinear2d_aa": linear(2),
    "_upsample_bicubic2d_aa": linear(2),
}
