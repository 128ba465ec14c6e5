"""Layouts as users write them: one plan in several forms, and what cannot be read."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.ir.graph import PARAM, Value
from penstock.ir.text import print_module
from penstock.ir.types import TensorType
from penstock.passes.sharding.given import chosen_layouts, parse_given, parse_mesh
from penstock.passes.sharding.written import layouts_of
from penstock.support.errors import UsageError

TEXTS = ("a.fc1.weight=[/tp,_]", "a.fc2.weight=[_,/tp]")


class ColwiseParallel:
    """A style that is known by the name of its class."""


def test_one_plan_in_several_forms_is_one_list_of_layouts(tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    lines = [f'"{pattern}" = "{layout}"' for pattern, layout in (text.split("=") for text in TEXTS)]
    file.write_text("[layouts]\n" + "\n".join(lines))
    like_jax = {"a.fc1.weight": ("tp", None), "a.fc2.weight": (None, "tp")}
    forms = [TEXTS, list(TEXTS), str(file), like_jax]
    assert {layouts_of(form) for form in forms} == {TEXTS}
    styles = ({"a.fc1": ColwiseParallel(), "a.fc2": "Rowwise"}, ["a.fc1=Colwise", "a.fc2=Rowwise"])
    assert {layouts_of(form) for form in styles} == {("a.fc1=Colwise/tp", "a.fc2=Rowwise/tp")}
    file.write_text('[layouts]\n"a.fc1" = "Colwise"\n"a.fc2" = "Rowwise"\n"a.ln" = "out:[_,/tp,...]"\n')
    assert layouts_of(file) == ("a.fc1=Colwise/tp", "a.fc2=Rowwise/tp", "a.ln=out:[_,/tp,...]")
    assert layouts_of(styles[0], axis="x") == ("a.fc1=Colwise/x", "a.fc2=Rowwise/x")


def test_names_may_have_colons_and_signs() -> None:
    """Of values that are called like presets and widths, and of values that are called like parameters."""
    texts = ("preset:x=[_,/tp]", "widths:1.5=[/tp]", "dense/MatMul:0=[/tp]")
    assert layouts_of(texts) == texts
    model = ps.from_torch(nn.Linear(4, 4), (torch.zeros(4, 4),))
    for text in texts:
        with pytest.raises(UsageError, match="fits no name"):
            ps.plan(model, ps.Cluster.local(2), mesh="tp=2", shard=[text])
    types = {"@w": (4, 4), "%w": (4,), "%v": (8,)}
    shapes = {node: TensorType("f32", dims) for node, dims in types.items()}
    module = SimpleNamespace(
        vars={"w": SimpleNamespace(type=shapes["@w"], role=PARAM)}, data_inputs=[Value("v", shapes["%v"])]
    )

    def chosen(*given: str) -> list[str]:
        return [*chosen_layouts(module, {"w": shapes["%w"]}, parse_given(given), {"tp": 2})]

    assert chosen("w=[/tp,_]") == ["@w"]
    assert chosen("%w=[/tp]", "@w=[_,/tp]", "%v=[/tp]") == ["%w", "@w", "%v"]
    with pytest.raises(UsageError, match="fits no name"):
        chosen("@v=[/tp]")


@pytest.mark.parametrize("form", ["w{}=[_,tp]", "w{}=[_,/tp]", "w{}=Colwise/tp"])
def test_an_error_lists_twenty_layouts_and_counts_the_rest(form: str) -> None:
    model = ps.from_torch(nn.Linear(4, 4), (torch.zeros(4, 4),))

    def lines(count: int) -> list[str]:
        with pytest.raises(UsageError) as error:
            ps.plan(model, ps.Cluster.local(2), mesh="tp=2", shard=[form.format(i) for i in range(count)])
        return [line for line in str(error.value).splitlines() if line.startswith("  - ")]

    assert lines(50) == [*lines(20), "  - and 30 more"]
    assert len(lines(20)) == 20


def test_presets_and_several_axes_are_read(tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    file.write_text('presets = ["megatron"]\n[layouts]\n"x" = "[?,_]"\n')
    assert layouts_of([str(file), "w=[3*/a/b]"]) == ("x=[?,_]", "preset:megatron", "w=[3*/a/b]")
    assert layouts_of({"w": (("a", "b"), "?", "3*/tp")}) == ("w=[/a/b,?,3*/tp]",)
    assert layouts_of(None) == ()
    (given,) = parse_given(["w=[3*/a/b,?,_]"])
    assert given.layout == ((("a", "b"), 3), None, ((), 1))
    assert parse_mesh("dp=2, tp=4") == {"dp": 2, "tp": 4}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("layout = 3", "has layout"),
        ("presets = 'megatron'", "has another form"),
        ("[layouts]\nw = 3", "the layout of 'w' is 3"),
        ("[layouts", "is no TOML file"),
        (None, "cannot read layouts"),
    ],
)
def test_files_that_say_something_else_are_refused(content: str | None, words: str, tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    if content is not None:
        file.write_text(content)
    with pytest.raises(UsageError, match=words):
        layouts_of(str(file))


@pytest.mark.parametrize("wrong", ["w", "w=tp", "FILE.yaml"])
def test_other_words_are_no_layouts(wrong: str) -> None:
    with pytest.raises(UsageError, match="is no layout"):
        layouts_of([wrong])


def test_control_an_unknown_style_is_refused() -> None:
    with pytest.raises(UsageError, match="'a' has the style DiagonalParallel"):
        layouts_of({"a": "DiagonalParallel"})


@pytest.mark.parametrize("bias", [True, False])
def test_a_bias_lies_as_the_result_of_its_module(bias: bool) -> None:
    net = nn.Sequential(nn.Linear(4, 6, bias=bias), nn.ReLU(), nn.Linear(6, 2, bias=bias))
    model = ps.from_torch(net, (torch.zeros(3, 4),))
    listed = {"0.weight": ("tp", None), "0.bias": ("tp",), "2.weight": (None, "tp"), "2.bias": (None,)}
    asked = [{"0": "Colwise", "2": "Rowwise"}, {n: layout for n, layout in listed.items() if bias or "bias" not in n}]
    styled, laid = (ps.plan(model, ps.Cluster.local(2), mesh="tp=2", shard=form).module for form in asked)
    assert print_module(styled) == print_module(laid)
    assert str(styled.vars["0.weight"].type) == "f32[6/tp,4]"
    # The control: with the styles exchanged it is another program.
    other = ps.plan(model, ps.Cluster.local(2), mesh="tp=2", shard={"0": "Rowwise", "2": "Colwise"}).module
    assert print_module(other) != print_module(laid)
