"""An exported model is the file it came from with other weights: onnxruntime computes with it what the interpreter does with the trained ones."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys

import numpy as np
import onnx
import pytest
from onnx import TensorProto
from oracles.export_cases import TIMEOUT, TRAINED, batches, bits, bones, compiled, outputs, tensors_of, write_rich

import penstock as ps
from penstock.commands import parser as cli
from penstock.frontends.onnx import import_onnx, structure
from penstock.ir.interpreter.graphs import run_graph
from penstock.ir.interpreter.store import DictStore
from penstock.models import write_cnn, write_gpt, write_mlp
from penstock.support.errors import UsageError, VerifyError

# ------------------------------------------------------------------------------------------------ what was not trained


WRITERS = {
    "rich": write_rich,
    "mlp": lambda path: write_mlp(path, [8, 16, 4], 4),
    "cnn": lambda path: write_cnn(path, 2, size=8),
    "gpt": lambda path: write_gpt(path, layers=1, width=16, heads=2, vocab=32, positions=8, batch=2),
}


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("trains", [False, True], ids=["inference", "training"])
def test_a_bundle_as_compiled_gives_back_its_model(tmp_path, kind, trains):
    path = WRITERS[kind](tmp_path / "model.onnx")
    model = ps.from_onnx(
        path, dims={"rows": 4} if kind == "rich" else None, frozen="frozen|corner" if kind == "rich" else None
    )
    training = (
        ps.Training(loss="cross_entropy", microbatches=2)
        if trains and kind != "rich"
        else ps.Training(loss="mse")
        if trains
        else None
    )
    ps.compile(ps.plan(model, ps.Cluster.local(2), training), tmp_path / "bundle", backend="numpy")
    path_before = path.rename(tmp_path / "moved.onnx")  # the bundle needs nothing but itself
    done = ps.export(tmp_path / "bundle", onnx=tmp_path / "out.onnx")
    assert done.files == (tmp_path / "out.onnx",)
    assert done.tensors > 0
    assert done.step is None
    onnx.checker.check_model(tmp_path / "out.onnx", full_check=True)
    assert bones(tmp_path / "out.onnx") == bones(path_before)
    before, after = tensors_of(path_before), tensors_of(tmp_path / "out.onnx")
    assert {name: bits(array) for name, array in before.items()} == {name: bits(array) for name, array in after.items()}
    if kind != "rich":  # which has typed fields: raw data takes their place
        assert (tmp_path / "out.onnx").read_bytes() == path_before.read_bytes()


def test_the_comparison_sees_one_bit_and_one_name(tmp_path):
    """The control of the comparisons above."""
    path = write_rich(tmp_path / "model.onnx")
    model = onnx.load(path)
    model.graph.node[4].name = "other"
    model.graph.initializer[2].raw_data = (
        bytes([model.graph.initializer[2].raw_data[0] ^ 1]) + model.graph.initializer[2].raw_data[1:]
    )
    onnx.save_model(model, tmp_path / "changed.onnx")
    assert bones(tmp_path / "changed.onnx") != bones(path)
    before, after = tensors_of(path), tensors_of(tmp_path / "changed.onnx")
    assert [name for name in before if bits(before[name]) != bits(after[name])] == ["brain"]


def test_external_data_is_external_again(tmp_path):
    (tmp_path / "in").mkdir()
    path = write_rich(tmp_path / "in" / "model.onnx", external=True)
    before = tensors_of(path)
    bundle = compiled(path, tmp_path / "bundle")
    shutil.move(tmp_path / "in", tmp_path / "away")
    done = ps.export(bundle, onnx=tmp_path / "new" / "out.onnx")
    assert done.files == (tmp_path / "new" / "out.onnx", tmp_path / "new" / "out.onnx.data")
    assert sorted(p.name for p in (tmp_path / "new").iterdir()) == ["out.onnx", "out.onnx.data"]
    assert bones(tmp_path / "new" / "out.onnx") == bones(tmp_path / "away" / "model.onnx")
    assert {name: bits(array) for name, array in tensors_of(tmp_path / "new" / "out.onnx").items()} == {
        name: bits(array) for name, array in before.items()
    }
    # A second export takes the place of the first.
    ps.export(bundle, onnx=tmp_path / "new" / "out.onnx")
    again = import_onnx(tmp_path / "new" / "out.onnx", dims={"rows": 4}).weights
    assert {name: bits(array) for name, array in again.items()} == {
        name: bits(array)
        for name, array in import_onnx(tmp_path / "away" / "model.onnx", dims={"rows": 4}).weights.items()
    }


def test_what_one_message_cannot_hold_goes_beside_it(tmp_path, monkeypatch):
    path = write_mlp(tmp_path / "model.onnx", [8, 64, 64, 4], 4)
    ps.compile(ps.plan(ps.from_onnx(path), ps.Cluster.local(2)), tmp_path / "bundle", backend="numpy")
    monkeypatch.setattr(structure, "LARGEST_MESSAGE", 8000)
    done = ps.export(tmp_path / "bundle", onnx=tmp_path / "out.onnx")
    assert [p.name for p in done.files] == ["out.onnx", "out.onnx.data"]
    assert done.files[0].stat().st_size < 8000
    where = {t.name: t.data_location for t in onnx.load(done.files[0], load_external_data=False).graph.initializer}
    assert [name for name, place in where.items() if place == TensorProto.EXTERNAL] == [
        "fc1.weight",
        "fc2.weight",
        "y.weight",
    ]
    assert {name: bits(a) for name, a in tensors_of(done.files[0]).items()} == {
        name: bits(a) for name, a in tensors_of(path).items()
    }


# ------------------------------------------------------------------------------------------------ what was trained


@pytest.fixture(scope="module", params=["1f1b", "2bw"])
def trained(request, tmp_path_factory):
    """A folder with model, bundle, checkpoints after 2 and 5 steps in `ckpt`, and the parameters after each of them."""
    folder = tmp_path_factory.mktemp(request.param)
    path = write_rich(folder / "model.onnx")
    bundle = compiled(path, folder / "bundle", request.param)
    parameters = {}
    with ps.open(bundle, timeout=TIMEOUT) as job:
        done = 0
        for steps in (2, 5):
            list(job.run(batches(5)[done:steps]))
            done = steps
            job.save(folder / "ckpt")
            parameters[steps] = job.parameters()
    return folder, parameters


@pytest.mark.parametrize("steps", [2, 5])
def test_a_trained_model_computes_what_the_interpreter_does_with_its_weights(trained, tmp_path, steps):
    folder, parameters = trained
    place = folder / "ckpt" if steps == 5 else folder / "ckpt" / "step-000002"
    done = ps.export(folder / "bundle", checkpoint=place, onnx=tmp_path / "out.onnx")
    assert done.step == steps
    assert bones(tmp_path / "out.onnx") == bones(folder / "model.onnx")
    before, after = tensors_of(folder / "model.onnx"), tensors_of(tmp_path / "out.onnx")
    assert {name for name in before if bits(before[name]) != bits(after[name])} == TRAINED
    for name in TRAINED:
        assert after[name].dtype == before[name].dtype
        np.testing.assert_array_equal(after[name], parameters[steps][name.replace(" ", "_")].astype(before[name].dtype))

    imported = import_onnx(folder / "model.onnx", dims={"rows": 4}, frozen="frozen|corner")
    x = batches(1)[0]["x"][:4]
    expected = run_graph(imported.module.graphs["main"], {"x": x}, DictStore(imported.weights | parameters[steps]))
    for found, want in zip(outputs(tmp_path / "out.onnx", x), expected, strict=True):
        np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-6)
    # The control: neither the untrained weights nor those of another step pass.
    other = run_graph(imported.module.graphs["main"], {"x": x}, DictStore(imported.weights | parameters[7 - steps]))
    for wrong in (outputs(folder / "model.onnx", x)[0], other[0]):
        assert np.abs(wrong - expected[0]).max() > 1e-3


def test_a_trained_model_is_what_the_formula_says(trained, tmp_path):
    """Against torch, which trains the same function from the same file: W(t+1) = W(t) - lr grad(W(t - delay))."""
    import torch

    folder, _ = trained
    delay = 1 if folder.name.startswith("2bw") else 0
    before = tensors_of(folder / "model.onnx")
    history = [{name: torch.tensor(before[name].astype(np.float32)) for name in TRAINED}]
    kept = {name: torch.tensor(before[name]) for name in ("frozen", "scale")}
    for step, batch in enumerate(batches(5)):
        weights = {name: w.clone().requires_grad_() for name, w in history[max(0, step - delay)].items()}
        h = torch.tensor(batch["x"]) @ weights["first layer/weight"]
        h = torch.tanh((h + h) @ weights["half"]) @ weights["brain"] * kept["scale"]
        y = torch.tanh(h @ weights["tied"]) @ weights["tied"] @ kept["frozen"]
        torch.nn.functional.mse_loss(y, torch.tensor(batch["labels"])).backward()
        history.append({name: w - 0.05 * weights[name].grad for name, w in history[-1].items()})
    ps.export(folder / "bundle", checkpoint=folder / "ckpt", onnx=tmp_path / "out.onnx")
    after = tensors_of(tmp_path / "out.onnx")
    for name in TRAINED:
        # 16-bit weights are trained in 16 bits here, so every update is rounded
        allowed = {"half": 1e-2, "brain": 1e-2}.get(name, 6e-4)
        np.testing.assert_allclose(after[name].astype(np.float32), history[-1][name].numpy(), rtol=0, atol=allowed)
        if name not in ("half", "brain"):
            assert np.abs(history[-1][name].numpy() - history[-2][name].numpy()).max() > 5 * allowed


def test_a_checkpoint_knows_its_bundle(trained, tmp_path):
    folder, parameters = trained
    for source in (folder / "ckpt", folder / "ckpt" / "step-000005"):
        done = ps.export(source, safetensors=tmp_path / "out.safetensors")
        assert (done.step, done.tensors) == (5, 5)
    import torch
    from safetensors.torch import load_file as load_torch

    found = load_torch(tmp_path / "out.safetensors")
    assert found.keys() == TRAINED | {"frozen"}  # the others are not needed for the loss
    assert (found["half"].dtype, found["brain"].dtype, found["tied"].dtype) == (
        torch.bfloat16,
        torch.bfloat16,
        torch.float32,
    )
    np.testing.assert_array_equal(found["tied"].numpy(), parameters[5]["tied"])
    ps.export(folder / "bundle", checkpoint=folder / "ckpt", onnx=tmp_path / "out.onnx")
    expected = tensors_of(tmp_path / "out.onnx")
    for name, tensor in found.items():
        np.testing.assert_array_equal(tensor.to(torch.float32).numpy(), expected[name].astype(np.float32))


def test_training_in_bf16_gives_back_f32(tmp_path):
    path = write_mlp(tmp_path / "model.onnx", [8, 16, 8], 4)
    training = ps.Training(loss="mse", optimizer=ps.SGD(lr=0.05), microbatches=2)
    bundle = ps.compile(
        ps.plan(ps.from_onnx(path), ps.Cluster.local(2), training, precision="bf16"),
        tmp_path / "bundle",
        backend="numpy",
    )
    with ps.open(bundle, timeout=TIMEOUT) as job:
        list(job.run(batches(3)))
        job.save(tmp_path / "ckpt")
        parameters = job.parameters()
    ps.export(bundle, checkpoint=tmp_path / "ckpt", onnx=tmp_path / "out.onnx")
    after = tensors_of(tmp_path / "out.onnx")
    assert {name: bits(array) for name, array in after.items()} == {
        name: bits(array) for name, array in parameters.items()
    }
    assert bits(after["y.weight"]) != bits(tensors_of(path)["y.weight"])


# A program that cannot import onnx, as where it is not installed.
WITHOUT_ONNX = """import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "onnx":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
from penstock.commands.parser import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("trained", ["1f1b"], indirect=True)
def test_weights_alone_need_no_onnx(trained, tmp_path):
    """The control: a model of ONNX needs it, and says so."""
    folder, _ = trained
    ps.export(folder / "ckpt", safetensors=tmp_path / "here.safetensors")

    def run(*args):
        command = [sys.executable, "-c", WITHOUT_ONNX, "export", str(folder / "ckpt"), *map(str, args)]
        return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)

    done = run("--safetensors", tmp_path / "there.safetensors")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "there.safetensors").read_bytes() == (tmp_path / "here.safetensors").read_bytes()
    refused = run("--onnx", tmp_path / "out.onnx")
    assert (refused.returncode, list(tmp_path.glob("out*"))) == (2, [])
    assert "an ONNX file is written with onnx, which is not installed" in refused.stderr
    (tmp_path / "model").write_bytes(b"perhaps the model")
    refused = run("--safetensors", tmp_path / "model")
    assert refused.returncode == 2
    assert "is there already" in refused.stderr
    assert (tmp_path / "model").read_bytes() == b"perhaps the model"


# ------------------------------------------------------------------------------------------------ what is refused


once = pytest.mark.parametrize("trained", ["2bw"], indirect=True)


@once
def test_checkpoints_of_other_bundles_are_refused(trained, tmp_path):
    folder, _ = trained
    other = compiled(write_rich(tmp_path / "model.onnx", seed=1), tmp_path / "other")
    with pytest.raises(VerifyError, match="the checkpoint is of another model: of model with hash"):
        ps.export(other, checkpoint=folder / "ckpt", onnx=tmp_path / "out.onnx")
    # The same model, other variables: nothing may be left as it was in silence.
    unfrozen = compiled(folder / "model.onnx", tmp_path / "unfrozen", frozen=None)
    training = ps.Training(loss="mse", optimizer=ps.AdamW(lr=0.05), microbatches=2)
    model = ps.from_onnx(folder / "model.onnx", dims={"rows": 4}, frozen="frozen|corner")
    adam = ps.compile(ps.plan(model, ps.Cluster.local(2), training), tmp_path / "adam", backend="numpy")
    with ps.open(adam, timeout=TIMEOUT) as job:
        job.save(tmp_path / "adam ckpt")
    with pytest.raises(
        VerifyError, match=r"does not fit the bundle:(.|\n)*updates: the bundle has no such variable"
    ) as told:
        ps.export(unfrozen, checkpoint=tmp_path / "adam ckpt", onnx=tmp_path / "out.onnx")
    assert "first_layer/weight.adam_m" in str(told.value)
    assert not (tmp_path / "out.onnx").exists()
    # Another number of stages of the same model is no other model.
    whole = ps.compile(ps.plan(model, ps.Cluster.local(1), training), tmp_path / "whole", backend="numpy")
    assert ps.export(whole, checkpoint=tmp_path / "adam ckpt", onnx=tmp_path / "out.onnx").step == 0


@once
def test_a_checkpoint_without_its_bundle(trained, tmp_path):
    folder, _ = trained
    for copied in ("ckpt", "bundle"):
        shutil.copytree(folder / copied, tmp_path / copied)
    place = tmp_path / "ckpt" / "step-000005"
    index = json.loads((place / "index.json").read_text())
    assert index["bundle"] == str(folder / "bundle")

    def rewrite(**changed: object) -> None:
        text = json.dumps(index | changed).encode()
        (place / "index.json").write_bytes(text)
        (place / "index.sha256").write_text(f"{hashlib.sha256(text).hexdigest()}  index.json\n")

    rewrite(bundle=str(tmp_path / "gone"))
    with pytest.raises(UsageError, match=f"its bundle is no longer at {tmp_path}/gone"):
        ps.export(tmp_path / "ckpt", onnx=tmp_path / "out.onnx")
    assert ps.export(tmp_path / "bundle", checkpoint=tmp_path / "ckpt", onnx=tmp_path / "out.onnx").step == 5
    del index["bundle"], index["source_hash"]  # as versions before this one wrote it
    rewrite()
    with pytest.raises(UsageError, match="does not say which bundle it is of"):
        ps.export(tmp_path / "ckpt", onnx=tmp_path / "out.onnx")
    assert ps.export(tmp_path / "bundle", checkpoint=tmp_path / "ckpt", onnx=tmp_path / "out.onnx").step == 5


@once
def test_altered_bundles_and_checkpoints_are_refused(trained, tmp_path):
    folder, _ = trained
    for damaged in ("source/model.onnx", "source/names.json", "weights/s0.safetensors"):
        bundle = tmp_path / damaged.replace("/", ".")
        shutil.copytree(folder / "bundle", bundle)
        data = bytearray((bundle / damaged).read_bytes())
        data[len(data) // 2] ^= 1
        (bundle / damaged).write_bytes(data)
        with pytest.raises(VerifyError, match=f"the bundle is damaged:\n  - {damaged}: SHA-256"):
            ps.export(bundle, onnx=tmp_path / "out.onnx")
    shutil.copytree(folder / "ckpt", tmp_path / "ckpt")
    data = bytearray((tmp_path / "ckpt" / "step-000005" / "rank0.safetensors").read_bytes())
    data[-1] ^= 1
    (tmp_path / "ckpt" / "step-000005" / "rank0.safetensors").write_bytes(data)
    with pytest.raises(VerifyError, match=r"the checkpoint is damaged: rank0.safetensors"):
        ps.export(folder / "bundle", checkpoint=tmp_path / "ckpt", onnx=tmp_path / "out.onnx")
    assert (
        ps.export(folder / "bundle", checkpoint=tmp_path / "ckpt" / "step-000002", onnx=tmp_path / "out.onnx").step == 2
    )


def test_a_structure_does_not_reach_out_of_its_bundle(tmp_path):
    """Hashes find damage, not malice: what a structure calls external data is looked for in one place only."""
    (tmp_path / "secret").write_bytes(b"x" * 512)
    kept = write_rich(tmp_path / "model.onnx")
    for location, length in (("secret", 256), ("../secret", 256), ("model.onnx.data", 257), ("model.onnx.data", "-1")):
        model = onnx.load(kept)
        tensor = model.graph.initializer[2]
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in {"location": location, "offset": "0", "length": str(length)}.items():
            tensor.external_data.append(onnx.StringStringEntryProto(key=key, value=value))
        (tmp_path / "sub").mkdir(exist_ok=True)
        (tmp_path / "sub" / "model.onnx").write_bytes(model.SerializeToString())
        (tmp_path / "sub" / "model.onnx.data").write_bytes(b"y" * 256)
        with pytest.raises(VerifyError, match="tensor brain has no elements where they should be"):
            structure.write_model(tmp_path / "sub" / "model.onnx", {}, tmp_path / "out.onnx")


@once
def test_places_are_checked_before_the_work(trained, tmp_path):
    folder, _ = trained
    (tmp_path / "file").write_text("")
    (tmp_path / "data.onnx.data").mkdir()
    for given, told in (
        ({}, "nothing to write"),
        ({"onnx": tmp_path}, "is a directory"),
        ({"onnx": tmp_path / "file" / "out.onnx"}, "is not a directory|Not a directory"),
        ({"onnx": tmp_path / "data.onnx"}, r"data\.onnx\.data: is a directory"),
        ({"onnx": folder / "bundle" / "out.onnx"}, "is inside the bundle"),
        ({"onnx": tmp_path / "one", "safetensors": tmp_path / "one"}, "name the same file"),
    ):
        with pytest.raises(UsageError, match=told):
            ps.export(folder / "bundle", **given)
    with pytest.raises(UsageError, match="is not a bundle directory"):
        ps.export(tmp_path / "none", onnx=tmp_path / "out.onnx")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.onnx.data", "file"]


@once
def test_a_failed_export_leaves_the_old_file(trained, tmp_path, monkeypatch):
    folder, _ = trained
    out = tmp_path / "out.onnx"
    ps.export(folder / "bundle", checkpoint=folder / "ckpt" / "step-000002", onnx=out)
    before = out.read_bytes()

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(structure.os, "fsync", fail)
    with pytest.raises(OSError, match="No space"):
        ps.export(folder / "bundle", checkpoint=folder / "ckpt", onnx=out)
    assert out.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["out.onnx"]


@once
def test_the_model_itself_is_not_replaced(trained, tmp_path):
    """Under none of its names, nor by what is no model; as it was compiled it may take the place of its like."""
    folder, _ = trained
    model = shutil.copy(folder / "model.onnx", tmp_path / "model.onnx")
    (tmp_path / "link.onnx").symlink_to("model.onnx")
    (tmp_path / "hard.onnx").hardlink_to(model)
    before = model.read_bytes()
    for name in ("model.onnx", "x/../model.onnx", "link.onnx", "hard.onnx"):
        with pytest.raises(UsageError, match="is the model that the bundle was compiled from"):
            ps.export(folder / "bundle", checkpoint=folder / "ckpt", onnx=tmp_path / name)
        with pytest.raises(UsageError, match="is the model that the bundle was compiled from"):
            ps.export(folder / "bundle", safetensors=tmp_path / name)
    with pytest.raises(UsageError, match="is the model that the bundle was compiled from"):
        ps.export(folder / "bundle", onnx=model, annotate=lambda found: None)
    assert model.read_bytes() == before
    ps.export(folder / "bundle", onnx=model)
    # The control: other weights are another file, and what is no model is none either.
    (tmp_path / "none.onnx").write_text("")
    for name in ("trained.onnx", "trained.onnx", "none.onnx"):
        ps.export(folder / "bundle", checkpoint=folder / "ckpt", onnx=tmp_path / name)


@once
def test_the_command(trained, tmp_path, capsys):
    folder, _ = trained
    out = tmp_path / "out.onnx"
    assert cli.main(["export", str(folder / "bundle"), "--checkpoint", str(folder / "ckpt"), "--onnx", str(out)]) == 0
    assert capsys.readouterr().err == f"wrote {out}: 5 tensors after 5 steps\n"
    assert cli.main(["export", str(folder / "ckpt"), "--safetensors", str(tmp_path / "out.safetensors")]) == 0
    assert capsys.readouterr().err == f"wrote {tmp_path / 'out.safetensors'}: 5 tensors after 5 steps\n"
    assert cli.main(["export", str(folder / "bundle"), "--onnx", str(out)]) == 0
    assert capsys.readouterr().err == f"wrote {out}: 5 tensors as compiled\n"
    assert cli.main(["export", str(folder / "bundle")]) == 2
    assert "give --onnx FILE" in capsys.readouterr().err
    assert cli.main(["export", str(folder / "ckpt"), "--checkpoint", str(folder / "ckpt"), "--onnx", str(out)]) == 2
    assert f"penstock export BUNDLE --checkpoint {folder / 'ckpt'}" in capsys.readouterr().err
