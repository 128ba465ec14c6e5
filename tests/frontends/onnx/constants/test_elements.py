"""Elements that show a constant, made by NumPy, SciPy and torch as programs make them; and parameters as training begins, which must show nothing."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from penstock.frontends.onnx.constants import elements

TESTS: dict[str, Callable[[np.ndarray], bool]] = {
    "sinusoids": elements.is_sinusoids,
    "window": elements.is_window,
    "bands": elements.is_bands,
    "steps": elements.is_steps,
    "mask": elements.is_mask,
}
N = 64


def fourier(window: np.ndarray | None = None) -> np.ndarray:
    """Real parts above imaginary ones, by NumPy's transform of the identity."""
    whole = np.fft.fft(np.eye(N))[: N // 2 + 1] * (1 if window is None else window)
    return np.concatenate([whole.real, whole.imag])


def mel(rows: int = 12, bins: int = 129) -> np.ndarray:
    """Triangles of equal width in mel, by the definition of the scale."""
    edges = 700 * (10 ** (np.linspace(0, 2595 * np.log10(1 + 8000 / 700), rows + 2) / 2595) - 1)
    hertz = np.linspace(0, 8000, bins)
    up = (hertz - edges[:-2, None]) / np.diff(edges)[:-1, None]
    down = (edges[2:, None] - hertz) / np.diff(edges)[1:, None]
    return np.maximum(0, np.minimum(up, down))


def positions(width: int = 32, count: int = 100) -> np.ndarray:
    """The table of sines and cosines that transformers add."""
    angles = np.arange(count)[:, None] / 10000 ** (np.arange(0, width, 2) / width)
    return np.stack([np.sin(angles), np.cos(angles)], -1).reshape(count, width)


def rotations(width: int = 32, count: int = 50) -> np.ndarray:
    angles = np.outer(np.arange(count), 1e6 ** -(np.arange(0, width, 2) / width))
    return np.cos(np.concatenate([angles, angles], -1))[None, None]


def grid() -> np.ndarray:
    return np.stack(np.meshgrid(np.arange(20) - 0.5, np.arange(12) - 0.5), -1)[None]


HANN = torch.hann_window(N).numpy()
SHOWN = {
    "fourier": ("sinusoids", fourier()),
    "fourier of STFT": ("sinusoids", fourier(HANN)[:, None]),
    "real part": ("sinusoids", fourier(HANN)[: N // 2 + 1, None]),
    "imaginary part": ("sinusoids", fourier(HANN)[N // 2 + 1 :, None]),
    "parts by turns": ("sinusoids", fourier(HANN).reshape(2, -1, N).swapaxes(0, 1).reshape(-1, N)),
    "columns": ("sinusoids", fourier(HANN).T),
    "cosine transform": ("sinusoids", np.cos(np.pi / 40 * np.outer(np.arange(13), np.arange(40) + 0.5))),
    "positions": ("sinusoids", positions()),
    "positions in f16": ("sinusoids", positions().astype(np.float16)),
    "positions in bf16": ("sinusoids", positions().astype(ml_dtypes.bfloat16)),
    "long positions": ("sinusoids", torch.sin(torch.arange(5000.0)[:, None] * torch.rand(24) * 0.9).numpy()),
    "rotations": ("sinusoids", rotations()),
    **{
        f"{name}, periodic {periodic}": ("window", getattr(torch, f"{name}_window")(40, periodic=periodic).numpy())
        for name in ("hann", "hamming", "blackman", "bartlett")
        for periodic in (True, False)
    },
    "root of Hann": ("window", torch.hann_window(40).sqrt().numpy()[None, :, None] * 0.25),
    "mel": ("bands", mel()),
    "mel, turned": ("bands", mel().T[None]),
    "mel by area": ("bands", mel() / (mel().sum(1, keepdims=True) + 1e-9)),
    "arange": ("steps", np.arange(40.0)[None, :, None]),
    "linspace": ("steps", np.linspace(-1, 1, 33)),
    "grid": ("steps", grid()),
    "inverse frequencies": ("steps", 1 / 10000 ** (np.arange(0, 32, 2) / 32)),
    "slopes": ("steps", 2.0 ** -np.arange(1, 9)[:, None, None]),
    "causal": ("mask", np.triu(np.full((9, 9), -np.inf), 1)),
    "padding": ("mask", np.array([0.0, 0.0, -65504.0])),
}


@pytest.mark.parametrize("what", SHOWN)
def test_elements_show_what_they_are_and_nothing_else(what: str) -> None:
    kind, array = SHOWN[what]
    array = array if array.dtype.itemsize == 2 else array.astype(np.float32)
    assert [name for name, test in TESTS.items() if test(array)] == [kind]


@pytest.mark.parametrize(
    "what", [what for what, (kind, _) in SHOWN.items() if kind in ("sinusoids", "window", "bands")]
)
def test_a_training_step_leaves_none_of_it(what: str) -> None:
    """The control: the same elements with one percent of noise, as learning makes it, are a weight."""
    kind, array = SHOWN[what]
    noise = np.random.default_rng(3).standard_normal(array.shape)
    spoilt = array.astype(np.float32) + 0.05 * np.abs(array.astype(np.float32)).max() * noise
    assert not TESTS[kind](spoilt.astype(np.float32))


INITIAL = {
    "ones": nn.init.ones_,
    "zeros": nn.init.zeros_,
    "constant": lambda w: nn.init.constant_(w, 0.1),
    "eye": nn.init.eye_,
    "orthogonal": nn.init.orthogonal_,
    "sparse": lambda w: nn.init.sparse_(w, 0.6),
    "uniform": lambda w: nn.init.uniform_(w, 0, 1),
    "kaiming": nn.init.kaiming_uniform_,
}


@pytest.mark.parametrize("first", INITIAL)
@settings(max_examples=20, deadline=None)
@given(rows=st.integers(1, 80), columns=st.integers(1, 80), seed=st.integers(0, 99))
def test_parameters_as_training_begins_show_nothing(first: str, rows: int, columns: int, seed: int) -> None:
    torch.manual_seed(seed)
    weight = INITIAL[first](torch.empty(rows, columns)).detach().numpy()
    for array in (weight, weight[0], weight[None, ..., None]):
        assert [name for name, test in TESTS.items() if test(array)] == []


@pytest.mark.parametrize("make", [nn.GRU, nn.LSTM])
def test_weights_of_fresh_modules_show_nothing(make: type[nn.Module]) -> None:
    modules = [make(16, 16), nn.Conv2d(8, 8, 3), nn.ConvTranspose1d(8, 8, 4), nn.Embedding(30, 16, padding_idx=0)]
    for module in modules:
        for parameter in module.parameters():
            assert [name for name, test in TESTS.items() if test(parameter.detach().numpy())] == []


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0), (1, 1), (9,), (9, 9), (3, 0, 9), (0, 9), (9, 3)])
@pytest.mark.parametrize("value", [np.nan, np.inf, 0.0, 2.0])
def test_any_elements_get_an_answer(shape: tuple[int, ...], value: float) -> None:
    with np.errstate(all="ignore"):
        array = np.full(shape, value, np.float32)
        assert not any(test(array) for test in TESTS.values())
    assert elements.is_one_number(np.full((2, 3), 2.0))
    assert not elements.is_one_number(np.array([2.0, 3.0]))
    assert elements.is_choice(np.array([0.0, 1.0]))
    assert not elements.is_choice(np.ones(3))
