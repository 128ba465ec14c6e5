"""Tests of recurrent layers whose states `[layers, batch, width]` are inputs and outputs: requests of any size, by
onnxruntime. The control is the same bundle with samples along first dimensions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch

import penstock as ps
from penstock.backends.bundle.format import open_bundle
from penstock.runtime.data.batches import BatchCuts
from penstock.runtime.data.samples import FileSamples, data_spec
from penstock.runtime.job.requests import SampleLayout
from penstock.support.errors import UsageError

BATCH, STEPS, WIDTH, INNER = 4, 3, 5, 6
NAMES = ("x", "h", "c", "y", "hn", "cn")


class TwoLayers(torch.nn.Module):
    """An LSTM of two layers with a product behind it."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.layers = torch.nn.LSTM(WIDTH, INNER, 2, batch_first=batch_first)
        self.head = torch.nn.Linear(INNER, 2)

    def forward(self, x: torch.Tensor, h: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y, (h, c) = self.layers(x, (h, c))
        return torch.sigmoid(self.head(y)), h, c


def axis_of(name: str, batch_first: bool) -> int:
    """Return the dimension of samples as torch documents it."""
    return 0 if batch_first and name in "xy" else 1


@pytest.fixture(scope="module", params=[True, False], ids=["batch-first", "time-first"])
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bool]:
    batch_first: bool = request.param
    path = tmp_path_factory.mktemp("states") / "lstm.onnx"
    torch.manual_seed(0)
    arrays = inputs_of(2, batch_first)
    axes = {name: {axis_of(name, batch_first): "batch"} for name in NAMES}
    torch.onnx.export(
        TwoLayers(batch_first).eval(),
        tuple(map(torch.from_numpy, arrays.values())),
        str(path),
        dynamo=False,
        input_names=list(NAMES[:3]),
        output_names=list(NAMES[3:]),
        dynamic_axes=axes,
    )
    return path, batch_first


@pytest.fixture(scope="module")
def bundle(exported: tuple[Path, bool], tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = ps.from_onnx(exported[0], dims={"batch": BATCH})
    plan = ps.plan(model, ps.Cluster.local(2))
    return Path(ps.compile(plan, tmp_path_factory.mktemp("states") / "bundle"))


def inputs_of(samples: int, batch_first: bool, seed: int = 0) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    shapes = {"x": (samples, STEPS, WIDTH) if batch_first else (STEPS, samples, WIDTH)}
    shapes |= dict.fromkeys("hc", (2, samples, INNER))
    return {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def expected(path: Path, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return dict(zip(NAMES[3:], session.run(list(NAMES[3:]), inputs), strict=True))


def agree(outputs: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> bool:
    return all(
        outputs[name].shape == array.shape and np.allclose(outputs[name], array, atol=1e-5)
        for name, array in right.items()
    )


def test_requests_of_any_size_are_those_of_onnxruntime(exported: tuple[Path, bool], bundle: Path) -> None:
    """Two stages of two processes; requests share microbatches of four."""
    path, batch_first = exported
    requests = [inputs_of(samples, batch_first, seed) for seed, samples in enumerate((1, 3, 4, 6, 2))]
    with ps.open(bundle) as job:
        answers = list(job.stream(requests))
    for inputs, outputs in zip(requests, answers, strict=True):
        assert agree(outputs, expected(path, inputs))


def test_states_go_back_in(exported: tuple[Path, bool], bundle: Path) -> None:
    """The states of one request are those that the next one begins with, as in a stream of sound."""
    path, batch_first = exported
    model_inputs, right = inputs_of(3, batch_first), {}
    with ps.open(bundle) as job:
        ours = dict(model_inputs)
        for step in range(2):
            x = inputs_of(3, batch_first, step)["x"]
            answer = job.infer(ours | {"x": x})
            right = expected(path, model_inputs | {"x": x})
            assert agree(answer, right)
            ours, model_inputs = ({"h": y["hn"], "c": y["cn"]} for y in (answer, right))


def test_control_rows_along_first_dimensions(exported: tuple[Path, bool], bundle: Path) -> None:
    """Without the dimensions that the module names, a request is cut across layers, or not understood."""
    module = open_bundle(bundle).module
    layout, wrong = SampleLayout(module, {}), SampleLayout(module.but(batch={}), {})
    inputs = inputs_of(3, exported[1])
    assert layout.request(inputs, "test").samples == 3
    with pytest.raises(UsageError, match="does not fit the model"):
        wrong.request(inputs, "test")
    # A whole microbatch of requests that share it would have had rows of other layers.
    assert (layout.samples, wrong.samples) == (4, 2 if exported[1] else 1)


def test_unequal_numbers_of_samples_are_one_error(exported: tuple[Path, bool], bundle: Path) -> None:
    layout = SampleLayout(open_bundle(bundle).module, {})
    inputs = inputs_of(3, exported[1]) | {"h": inputs_of(2, exported[1])["h"]}
    with pytest.raises(UsageError, match=r"x has 3, h has 2, c has 3.*one sample has.*h 1 along dimension 1"):
        layout.request(inputs, "test")


@pytest.fixture
def saved(exported: tuple[Path, bool], tmp_path: Path) -> tuple[dict[str, np.ndarray], Path]:
    arrays = inputs_of(10, exported[1])
    np.savez(tmp_path / "data.npz", **arrays)  # type: ignore[arg-type]
    return arrays, tmp_path / "data.npz"


def test_samples_of_files_lie_along_the_same_dimensions(
    exported: tuple[Path, bool], bundle: Path, saved: tuple[dict[str, np.ndarray], Path]
) -> None:
    module, (arrays, path) = open_bundle(bundle).module, saved
    samples = FileSamples(module, data_spec(path, True, 3), list(arrays))
    assert samples.count == 10
    order = np.random.default_rng([3, 0]).permutation(10)
    for name, array in arrays.items():
        for mb in range(2):
            rows = np.take(array, order[mb * BATCH : (mb + 1) * BATCH], axis_of(name, exported[1]))
            np.testing.assert_array_equal(samples.microbatch(mb, name), rows)


def test_microbatches_of_a_batch_lie_along_the_same_dimensions(exported: tuple[Path, bool], bundle: Path) -> None:
    cuts, arrays = BatchCuts(open_bundle(bundle).module), inputs_of(3 * BATCH, exported[1])
    for name, array in arrays.items():
        parts = np.split(array, 3, axis_of(name, exported[1]))
        np.testing.assert_array_equal(cuts.part(name, array, 1), parts[1])
        two = np.concatenate([parts[0], parts[2]], axis_of(name, exported[1]))
        np.testing.assert_array_equal(cuts.share(name, array, [0, 2], 3), two)
