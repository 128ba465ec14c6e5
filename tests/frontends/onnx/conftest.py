"""The comparison with onnxruntime of a model in ONNX's text form."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

from penstock.frontends.onnx import Imported

from .cases import Arrays, compare, draw, write_model


@pytest.fixture
def same(tmp_path: Path) -> Callable[..., Imported]:
    """same(text, opset): inputs are drawn by their types; those whose name begins with w, or all if `constant`, are initializers instead."""

    def check_text(
        text: str, opset: int = 20, tolerance: float = 2e-5, constant: bool = False, **options: object
    ) -> Imported:
        path = write_model(tmp_path / "mini.onnx", text, opset)
        model = onnx.load(path)
        feeds: Arrays = {}
        for value in list(model.graph.input):
            kind = value.type.tensor_type
            shape = tuple(d.dim_value for d in kind.shape.dim)
            array = draw(value.name, np.dtype(onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)), shape)
            if value.name[0] == "w" or constant:
                model.graph.initializer.append(onnx.numpy_helper.from_array(array, value.name))
                model.graph.input.remove(value)
            else:
                feeds[value.name] = array
        onnx.save(model, path)
        return compare(path, feeds, tolerance, **options)

    return check_text
