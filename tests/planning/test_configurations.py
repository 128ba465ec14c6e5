"""Tests of device configurations of ONNX models that say how tensors are split: followed where meshes can say it, and
refused or left out with all reasons at once where they cannot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import onnx
import pytest
from onnx import helper

import penstock as ps
from penstock.commands.parser import main
from penstock.ir.text import print_module
from penstock.models import write_mlp
from penstock.support.errors import UsageError

Holders = Sequence[int | tuple[int, ...]]
# Of a dimension: its number, then its factors, each with its size and its number of shards.
Dimension = tuple[int, *tuple[tuple[int | str | None, int], ...]]


def spec(name: str, devices: Holders, *dims: Dimension) -> onnx.ShardingSpecProto:
    """Write a specification by hand. A tuple is a group of devices."""
    made = onnx.ShardingSpecProto(tensor_name=name)
    for number, holder in enumerate(devices):
        made.device.append(holder if isinstance(holder, int) else 100 + number)
        if isinstance(holder, tuple):
            made.index_to_device_group_map.append(onnx.IntIntListEntryProto(key=100 + number, value=holder))
    for dim, *factors in dims:
        parts = [onnx.SimpleShardedDimProto(num_shards=count, **size_of(size)) for size, count in factors]
        made.sharded_dim.append(onnx.ShardedDimProto(axis=dim, simple_sharding=parts))
    return made


def size_of(size: int | str | None) -> dict[str, int | str]:
    return {} if size is None else {"dim_param" if isinstance(size, str) else "dim_value": size}


def annotate(path: Path, out: Path, configurations: Mapping[str, tuple[int, Sequence[onnx.ShardingSpecProto]]]) -> Path:
    """Write a model whose nodes say how their tensors lie: the first node that has a tensor does."""
    model = onnx.load(path)
    model.ir_version = max(11, model.ir_version)
    for name, (devices, specs) in configurations.items():
        model.configuration.append(onnx.DeviceConfigurationProto(name=name, num_devices=devices))
        for each in specs:
            node = next((n for n in model.graph.node if each.tensor_name in (*n.output, *n.input)), model.graph.node[0])
            node.device_configurations.append(
                onnx.NodeDeviceConfigurationProto(configuration_id=name, sharding_spec=[each])
            )
    onnx.checker.check_model(model)
    onnx.save(model, out)
    return out


@pytest.fixture(scope="module")
def mlp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mlp(tmp_path_factory.mktemp("models") / "mlp.onnx", [8, 12, 6, 4], 4)


def planned(path: Path, devices: int, **options: object) -> ps.Plan:
    training = ps.Training(loss="cross_entropy", optimizer=ps.SGD(lr=0.1), microbatches=2)
    return ps.plan(ps.from_onnx(path), ps.Cluster.local(devices), training, **options)


def notes(plan: ps.Plan) -> list[str]:
    return [note.text for note in plan.module.notes if note.origin == "placement"]


PAIR = [spec("fc1.weight", [0, 1], (-1, (None, 2))), spec("fc2.weight", [0, 1], (0, ("columns", 2)))]


@pytest.mark.parametrize(
    ("specs", "devices", "mesh", "given"),
    [
        (PAIR, 2, "tp=2", ["fc1.weight=[_,/tp]", "fc2.weight=[/tp,_]"]),
        (
            [
                spec("fc1.weight", [(0, 1), (2, 3)], (0, (8, 2))),
                spec("fc2.weight", [(0, 2), (1, 3)], (1, (6, 2))),
                spec("y.weight", [(3, 2, 1, 0)]),
            ],
            4,
            "a=2,tp=2",
            ["fc1.weight=[/a,_]", "fc2.weight=[_,/tp]", "y.weight=[_,_]"],
        ),
        ([spec("fc1.weight", [0, 2, 1, 3], (1, (12, 4)))], 4, "a=2,tp=2", ["fc1.weight=[_,/tp/a]"]),
        ([spec("fc1.weight", [0, 1], (1, (3, 1), (4, 2)))], 2, "tp=2", ["fc1.weight=[_,3*/tp]"]),
        ([spec("fc1.weight", [0, 1, 2, 3], (1, (2, 2), (6, 2)))], 4, "tp=4", ["fc1.weight=[_,/tp]"]),
        ([spec("fc1.weight", [0, 1], (1, (4, 2), (3, 1)))], 2, "tp=2", ["fc1.weight=[_,/tp]"]),
        # Five elements on two devices; and inputs and values by name.
        ([spec("x", [0, 1], (0, (None, 2))), spec("fc1.product", [0, 1], (0, (None, 2)))], 2, "tp=2",
         ["x=[/tp,_]", "fc1.product=[/tp,_]"]),
    ],
)  # fmt: skip
def test_shards_of_devices_are_layouts_on_a_mesh(mlp, tmp_path, specs, devices, mesh, given):
    path = annotate(mlp, tmp_path / mlp.name, {"mine": (devices, specs)})
    plan = planned(path, devices)
    assert (plan.as_dict()["mesh"], plan.as_dict()["shard"]) == (mesh, given)
    by_hand = planned(mlp, devices, mesh=mesh, shard=given)
    assert print_module(plan.module) == print_module(by_hand.module)
    # The control: without the hints nothing is split.
    assert all(var.type.is_plain for var in planned(path, devices, hints=False, stages=1).module.vars.values())


def test_layouts_of_the_user_go_before_those_of_the_model(mlp, tmp_path):
    path = annotate(mlp, tmp_path / mlp.name, {"mine": (2, PAIR)})
    plan = planned(path, 2, mesh="tp=2", shard="fc2.weight=[_,/tp]")
    assert plan.as_dict()["shard"] == ["fc2.weight=[_,/tp]"]
    # Teams of two, dealt microbatches along dp.
    plan = planned(path, 4, mesh="dp=2,tp=2")
    assert (plan.as_dict()["mesh"], str(plan.module.vars["fc1.weight"].type)) == ("dp=2,tp=2", "f32[8,12/tp]")


def test_the_first_configuration_that_fits_is_followed(mlp, tmp_path):
    four = [spec("fc1.weight", [0, 1, 2, 3], (1, (12, 4)))]
    path = annotate(mlp, tmp_path / mlp.name, {"four": (4, four), "two": (2, PAIR)})
    assert (notes(plan := planned(path, 4)), plan.as_dict()["mesh"]) == ([], "tp=4")
    assert notes(planned(path, 2)) == [
        "the layouts of configuration 'four' of the model are not followed: it is for 4 devices of a stage, the "
        "cluster has 2",
    ]
    # None fits: the plan is as without hints, and says so.
    assert len(notes(planned(path, 1))) == 2


WRONG = [
    (spec("fc1.weight", [0, 1, 0], (1, (12, 2))), "is in 2 shards, but 3 holders of shards are listed"),
    (spec("fc1.weight", [0, 1, 0, 1], (1, (6, 2), (2, 2))), "in shards that are no parts of it in order"),
    (spec("fc1.weight", [0, 1], (1, (5, 1), (2, 2))), "has 12 elements in dimension 1, its shards are of 5x2"),
    (spec("fc1.weight", [0, 1], (1, (4, 1), (3, 2))), "has dimension 1 in 2 uneven shards of 3 each"),
    (spec("fc1.weight", [0, 1], (2, (12, 2))), "has no dimension 2, it has 2"),
    (spec("fc1.weight", [0, 7], (1, (12, 2))), "lies on device 7, of 2"),
    (spec("fc1.weight", [0, 1], (1, (12, 0))), "does not say into how many shards dimension 1 is split"),
    (spec("fc1.weight", [0, 1], (1, (12, 2)), (-1, (12, 1))), "two lists of shards for one dimension"),
    (spec("fc1.weight", list(range(2)) * 7, (1, (12, 14))), "has dimension 1 of 12 elements in 14 shards"),
    (spec("fc9.weight", [0, 1], (1, (12, 2))), "fc9.weight of fc1.product is no operand or result of it"),
    (spec("fc1.weight", [1, 0], (1, (12, 2))), "in 2 shards of dimension 1 on devices 1, 0, which are not along axes"),
    (spec("fc1.weight", [0, 0], (1, (12, 2))), "on devices 0, 0, and a stage has 2 devices"),
]


@pytest.mark.parametrize(("wrong", "words"), WRONG, ids=range(len(WRONG)))
def test_what_no_mesh_can_say_is_named(mlp, tmp_path, capsys, wrong, words):
    right = [spec("fc2.weight", [0, 1], (1, (6, 2)))]
    path = annotate(mlp, tmp_path / mlp.name, {"mine": (2, [wrong, *right])})
    (note,) = notes(planned(path, 2, stages=1))
    assert "configuration 'mine' of the model are not followed" in note
    if "not along axes" not in words:
        assert words in note
    assert main(["plan", str(path), "--devices", "2", "--mesh", "tp=2"]) == 2
    assert words in capsys.readouterr().err.replace("\n    ", " ")
    assert main(["plan", str(path), "--devices", "2", "--mesh", "tp=2", "--hints", "ignore"]) == 0


def test_one_error_names_all_that_does_not_fit(mlp, tmp_path):
    wrong = [each for each, words in WRONG if "not along" not in words]
    path = annotate(
        mlp, tmp_path / mlp.name, {"mine": (2, wrong), "four": (4, [spec("fc1.weight", [0, 1, 2, 3], (1, (12, 4)))])}
    )
    with pytest.raises(UsageError) as refused:
        planned(path, 2, mesh="tp=2")
    told = refused.value.what
    assert all(words in told for _, words in WRONG if "along" not in words and "a stage has" not in words)
    assert "it is for 4 devices of a stage, the mesh tp=2 has 2" in told
    assert "--hints ignore" in refused.value.hint


def test_two_layouts_of_one_tensor(mlp, tmp_path):
    """A parameter has one; a value lies as the node that makes it says, whatever its readers say."""
    rows, columns = (spec("fc1.weight", [0, 1], (dim, (None, 2))) for dim in (0, 1))
    path = annotate(mlp, tmp_path / "a.onnx", {"mine": (2, [rows, columns])})
    with pytest.raises(
        UsageError, match=r"fc1.weight at fc1.product is in 2 shards of dimension 1 .* otherwise elsewhere"
    ):
        planned(path, 2, mesh="tp=2")
    model = onnx.load(annotate(mlp, tmp_path / "b.onnx", {"mine": (2, [spec("fc1", [0, 1], (1, (12, 2)))])}))
    reader = next(node for node in model.graph.node if "fc1" in node.input)
    reader.device_configurations.append(
        onnx.NodeDeviceConfigurationProto(configuration_id="mine", sharding_spec=[spec("fc1", [0, 1], (0, (4, 2)))])
    )
    onnx.save(model, tmp_path / "b.onnx")
    plan = planned(tmp_path / "b.onnx", 2)
    assert plan.as_dict()["shard"] == ["fc1=[_,/tp]"]
    assert "how a node reads a tensor is left to the compiler: fc1 at relu1" in notes(plan)[0]


def test_tensors_that_the_program_does_not_have_are_named(tmp_path):
    text = "(float[4,8] x) => (float[4,8] y) { a = Identity(w) b = MatMul(x, a) c = Neg(b) d = Neg(c) y = Relu(d) }"
    model = onnx.parser.parse_model(f'<ir_version: 11, opset_import: ["" : 20]> net {text}')
    model.graph.initializer.append(helper.make_tensor("w", onnx.TensorProto.FLOAT, [8, 8], [0.5] * 64))
    onnx.save(model, tmp_path / "net.onnx")
    specs = [spec("a", [0, 1], (1, (8, 2))), spec("c", [0, 1], (1, (8, 2))), spec("d", [0, 1], (1, (8, 2)))]
    plan = ps.plan(
        ps.from_onnx(annotate(tmp_path / "net.onnx", tmp_path / "laid.onnx", {"mine": (2, specs)}), trained="w"),
        ps.Cluster.local(2),
    )
    assert plan.as_dict()["shard"] == ["w=[_,/tp]"]
    assert notes(plan) == [
        "layouts of configuration 'mine' of the model that are of no tensor of the program are not followed: c, d"
    ]
