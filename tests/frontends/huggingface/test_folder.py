"""Folders that are damaged, hostile, or of models that cannot be had: one clear error each, before anything is read."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from penstock.commands.parser import main
from penstock.frontends.huggingface.families import check_family
from penstock.frontends.huggingface.folder import open_folder
from penstock.frontends.huggingface.safetensors_file import read_table
from penstock.support.errors import UnsupportedModel, UsageError

INDEX = "model.safetensors.index.json"
CONFIG = {"model_type": "llama", "vocab_size": 8}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    save_file({"w": np.arange(6, dtype=np.float32).reshape(2, 3)}, path / "model.safetensors")
    return path


def refused(path: Path, *words: str) -> None:
    with pytest.raises(UsageError) as error:
        open_folder(path)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_a_tensor_is_mapped_and_converted(folder: Path):
    tensor = open_folder(folder).tensors["w"]
    np.testing.assert_array_equal(np.asarray(tensor), np.arange(6, dtype=np.float32).reshape(2, 3))
    assert isinstance(tensor.mapped(), np.memmap)
    assert (tensor.nbytes, tensor.size, tensor.ndim, tensor.dtype) == (24, 6, 2, np.float32)


def test_bf16_becomes_f32(folder: Path):
    import torch
    from safetensors.torch import save_file as save_torch

    original = torch.randn(5, 7).to(torch.bfloat16)
    save_torch({"w": original}, folder / "model.safetensors")
    from dataclasses import replace

    tensor = replace(open_folder(folder).tensors["w"], as_dtype="f32")
    np.testing.assert_array_equal(np.asarray(tensor), original.float().numpy())


def test_no_folder_no_config_no_weights(folder: Path):
    refused(folder / "nothing", "is no folder")
    (folder / "model.safetensors").unlink()
    refused(folder, "neither model.safetensors nor")
    (folder / "pytorch_model.bin").write_bytes(b"")
    refused(folder, "pickle")
    (folder / "config.json").unlink()
    refused(folder, "config.json")


def test_a_prefix_without_a_folder_and_settings_without_a_family():
    with pytest.raises(UsageError, match="names no folder"):
        open_folder("")
    with pytest.raises(UnsupportedModel, match="names no model_type"):
        check_family("", "model")


@pytest.mark.parametrize("index", [None, {"weight_map": {"w": "gone.safetensors"}}], ids=["no weights", "no shard"])
def test_a_family_is_refused_before_weights_are_looked_for(index: object, folder: Path, tmp_path: Path, capsys):
    (folder / "model.safetensors").unlink()
    if index is not None:
        (folder / INDEX).write_text(json.dumps(index))
    words = ["compile", f"hf:{folder}", "-o", str(tmp_path / "b"), "--generate"]
    (folder / "config.json").write_text(json.dumps({**CONFIG, "model_type": "bloom"}))
    assert main(words) == 3
    said = capsys.readouterr().err
    assert said.count("penstock: error:") == 1
    assert "'bloom' cannot be imported" in said
    # Control: of a family that can be read the weights are missing.
    (folder / "config.json").write_text(json.dumps(CONFIG))
    assert main(words) == 2
    said = capsys.readouterr().err
    assert ("neither model.safetensors nor" if index is None else "gone.safetensors: missing") in said
    assert "cannot be imported" not in said


def test_settings_that_are_no_object(folder: Path):
    (folder / "config.json").write_text("[1]")
    refused(folder, "expected an object")
    (folder / "config.json").write_text("{")
    refused(folder, "not readable as JSON")


def test_code_of_a_stranger_is_not_run(folder: Path):
    (folder / "config.json").write_text(json.dumps({**CONFIG, "auto_map": {"AutoModel": "evil.Model"}}))
    with pytest.raises(UnsupportedModel, match="auto_map"):
        open_folder(folder)


@pytest.mark.parametrize("name", ["../other.safetensors", "/etc/passwd", "a/b.safetensors", "..", ""])
def test_a_shard_outside_is_refused(name: str, folder: Path):
    save_file({"w": np.zeros(2, np.float32)}, folder.parent / "other.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"w": name}}))
    refused(folder, "leads out of the folder")


def test_a_link_out_of_the_folder_is_refused(folder: Path):
    outside = folder.parent / "other.safetensors"
    (folder / "model.safetensors").rename(outside)
    (folder / "model.safetensors").symlink_to(outside)
    refused(folder, "is a link out of the folder", "cp -rL")


def test_an_index_and_its_shards(folder: Path):
    (folder / INDEX).write_text(json.dumps({"weight_map": {"w": "model.safetensors"}}))
    assert open_folder(folder).tensors.keys() == {"w"}
    (folder / INDEX).write_text(json.dumps({"weight_map": {"w": "model.safetensors", "v": "gone.safetensors"}}))
    refused(folder, "gone.safetensors: missing")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"v": "model.safetensors"}}))
    refused(folder, "v: not in model.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": [1]}))
    refused(folder, "weight_map")


def file_of(path: Path, header: object, data: bytes = b"\0" * 24) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


ENTRY = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}


@pytest.mark.parametrize(
    "header",
    [
        b"{",
        [1],
        {"w": {**ENTRY, "dtype": "F8_E4M3"}},
        {"w": {**ENTRY, "shape": [2, 4]}},
        {"w": {**ENTRY, "shape": [-2, -3]}},
        {"w": {**ENTRY, "shape": [True, 6]}},
        {"w": {**ENTRY, "data_offsets": [0, 48]}},
        {"w": {**ENTRY, "data_offsets": [8, 32]}},
        {"w": ENTRY, "v": {"dtype": "F32", "shape": [2], "data_offsets": [16, 24]}},
        {"w": {"dtype": "F32"}},
    ],
)
def test_a_header_that_lies_is_refused(header: object, tmp_path: Path):
    with pytest.raises(UsageError, match="not a readable safetensors file"):
        read_table(file_of(tmp_path / "x.safetensors", header))


def test_a_header_that_is_right_is_read(tmp_path: Path):
    """The control of the one above."""
    assert read_table(file_of(tmp_path / "x.safetensors", {"w": ENTRY}))["w"].shape == (2, 3)


def test_lengths_beyond_the_file(tmp_path: Path):
    path = tmp_path / "x.safetensors"
    for data in (b"", b"\1", (1 << 60).to_bytes(8, "little") + b"{}"):
        path.write_bytes(data)
        with pytest.raises(UsageError, match="a header of"):
            read_table(path)


@pytest.mark.parametrize("family", ["bloom", "falcon", "gpt_oss", "t5", ""])
def test_other_families_are_refused_by_name(family: str):
    with pytest.raises(UnsupportedModel, match=repr(family)) as error:
        check_family(family, "here")
    assert error.value.exit_code == 3
    assert "llama" in error.value.hint
