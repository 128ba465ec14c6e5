"""Which GPU a device of the plan is, and the checks before a run, with a torch.cuda of paper."""

from __future__ import annotations

import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from penstock import api
from penstock.backends.registry import backend_of
from penstock.backends.tvm.cuda import devices
from penstock.frontends.training import Training
from penstock.ir.cluster.cluster import Cluster
from penstock.ir.graph import Module
from penstock.ir.memory.predict import measure_memory
from penstock.ir.training.optimizers import SGD
from penstock.models import write_mlp
from penstock.support.errors import UsageError

UUIDS = ("5a1c0000-1111", "77fe0000-2222", "77ab0000-3333")


@pytest.fixture
def paper(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """Three GPUs, of which the last is older. What they say can be changed."""
    facts = types.SimpleNamespace(count=3, free=[70 << 30] * 3, arch=[(9, 0), (9, 0), (8, 0)], total=80 << 30)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    answers = {
        "is_available": lambda: facts.count > 0,
        "device_count": lambda: facts.count,
        "get_device_capability": lambda i: facts.arch[i],
        "get_device_name": lambda i: f"paper {i}",
        "get_device_properties": lambda i: types.SimpleNamespace(uuid=UUIDS[i]),
        "mem_get_info": lambda device: (facts.free[device.index], facts.total),
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    return facts


@pytest.mark.usefixtures("paper")
@pytest.mark.parametrize(("gpu", "number"), [("0", 0), ("1", 1), ("GPU-77fe", 1), ("GPU-5A1C0000-1111", 0)])
def test_a_gpu_is_found_by_number_and_by_uuid(gpu: str, number: int) -> None:
    assert devices.find_device("sm_90", gpu, 0) == torch.device("cuda", number)


@pytest.mark.usefixtures("paper")
def test_what_is_not_there_is_told() -> None:
    for gpu in ("3", "GPU-99", "GPU-77"):  # the last is the beginning of two
        with pytest.raises(UsageError, match=f"device {gpu} of its host; this host has 3: 0 is GPU-5a1c0000-1111, 1"):
            devices.find_device("sm_90", gpu, 4)
    with pytest.raises(UsageError, match="device 2 of this host is paper 2, sm_80"):
        devices.find_device("sm_90", "2", 4)
    assert devices.find_device("sm_80", "2", 4).index == 2


def test_the_driver_has_its_say(paper: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    def init() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040).\nPlease update")

    paper.count = 0
    monkeypatch.setattr(torch.cuda, "init", init)
    with pytest.raises(UsageError, match="this host has none") as caught:
        devices.find_device("sm_90", "0", 0)
    assert caught.value.hint == (
        "torch finds no CUDA device: The NVIDIA driver on your system is too old (found version 11040)."
    )


def planned(folder: Path, cluster: str) -> Module:
    """A training in two stages, with the devices of a cluster file."""
    (folder / "cluster.toml").write_text(cluster)
    model = api.from_onnx(write_mlp(folder / "mlp.onnx", [64, 64, 64, 10], batch=8))
    training = Training(loss="cross_entropy", optimizer=SGD(lr=0.1))
    return api.plan(model, Cluster.load(folder / "cluster.toml"), training, split_at=["relu1"]).module


def device(name: str, gpu: str = "") -> str:
    text = f'[[device]]\nname = "{name}"\nkind = "gpu"\narch = "sm_90"\nmemory = "1 GiB"\n'
    return text + (f"gpu = {gpu}\n" if gpu else "")


@pytest.mark.usefixtures("paper")
@pytest.mark.parametrize(
    ("cluster", "expected"),
    [
        (device("cuda:0") + device("cuda:1"), [0, 1]),
        # The control of a position in the file: the order has no meaning.
        (device("cuda:1") + device("cuda:0"), [1, 0]),
        (device("a", '"GPU-77fe"') + device("b", "0"), [1, 0]),
        (device("a", "1") + device("b", "1"), [1, 1]),
    ],
)
def test_stages_open_the_gpus_that_the_file_names(cluster: str, expected: list[int], tmp_path: Path) -> None:
    module = planned(tmp_path, cluster)
    assert [gpu_of_stage(module, stage) for stage in (0, 1)] == expected
    for stage in (0, 1):
        backend_of("tvm").check_host(module, stage, module.rank_devices()[stage])
    # The file is written as it was read.
    assert module.cluster is not None
    (tmp_path / "again.toml").write_text(module.cluster.to_toml())
    assert Cluster.load(tmp_path / "again.toml") == module.cluster


def gpu_of_stage(module: Module, stage: int) -> int | None:
    assert module.cluster is not None
    place = module.cluster.device(module.devices_of(stage)[0])
    return devices.find_device(place.target, place.gpu_on_host, stage).index


def test_memory_that_is_missing_is_told_before_a_run(paper: types.SimpleNamespace, tmp_path: Path) -> None:
    module = planned(tmp_path, device("cuda:0", "1") + device("cuda:1", "1"))
    peaks = [row.peak for row in measure_memory(module).values()]
    least = sum(peaks) + 2 * (devices.CONTEXT + devices.WORKSPACES)
    paper.total = least
    backend_of("tvm").check_host(module, 0)
    paper.total = least - 1
    with pytest.raises(UsageError, match=r"2 ranks on cuda:1 need .*, it has"):
        backend_of("tvm").check_host(module, 0)
    paper.free[1] = peaks[1] + devices.WORKSPACES - 1
    with pytest.raises(UsageError, match=r"stage 1: needs .* on cuda:1, of which .* are free"):
        backend_of("tvm").check_host(module, 1)
    # On a GPU of its own each has what it needs.
    assert module.cluster is not None
    apart = replace(module.cluster, devices=tuple(replace(d, gpu="") for d in module.cluster.devices))
    backend_of("tvm").check_host(module.but(cluster=apart), 0)


def test_names_that_mean_one_gpu_by_chance_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(device("left") + device("right"))
    with pytest.raises(UsageError, match="left, right are all GPU 0 of localhost by their names: each needs gpu"):
        Cluster.load(file)
    for wrong in ("-1", '"first"', "true", "1.5"):
        file.write_text(device("left", wrong))
        with pytest.raises(UsageError, match="gpu must be a number from 0 on or a UUID"):
            Cluster.load(file)
    file.write_text('[[device]]\nname = "cpu:0"\ngpu = 0\n')
    with pytest.raises(UsageError, match="gpu is for cuda devices"):
        Cluster.load(file)
