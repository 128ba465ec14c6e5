"""Tests of sources that can be imported from torch (modules, graph modules, exported programs), and of refusals with
their words."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from oracles.torch_modules import GPT, Conv, tokens
from torch import Tensor, nn

from penstock.frontends.running_statistics import at_rest
from penstock.frontends.torch import import_torch
from penstock.ir.graph import written_vars
from penstock.support.errors import UnsupportedModel, UsageError

from .cases import compare, judge

pytestmark = pytest.mark.usefixtures("seeded")


def test_a_graph_module_is_a_source() -> None:
    model = Conv().eval()
    compare(torch.fx.symbolic_trace(model), (torch.randn(2, 3, 16, 16),))


@pytest.mark.slow
@pytest.mark.parametrize("key", ["symbol", "place"])
def test_sizes_of_an_exported_program_are_bound(key: str) -> None:
    model = GPT()
    batch, length = torch.export.Dim("batch"), torch.export.Dim("length", max=8)
    program = torch.export.export(model, (tokens(),), dynamic_shapes=({0: batch, 1: length},), strict=False)
    shape = next(node.meta["val"].shape for node in program.graph.nodes if node.name == "tokens")
    names = [str(size) for size in shape] if key == "symbol" else ["tokens.0", "tokens.1"]
    fed = tokens(3, 5)
    imported = import_torch(program, dims=dict(zip(names, (3, 5), strict=True)))
    judge(imported, fed, [model(fed)])
    with pytest.raises(UsageError, match=r"tokens\.1 .* is open"):
        import_torch(program, dims={"tokens.0": 3})
    with pytest.raises(UsageError, match="no such dimension"):
        import_torch(program, dims={"tokens.0": 3, "tokens.1": 5, "depth": 2})
    with pytest.raises(UsageError, match=r"must be in \d+\.\.8"):
        import_torch(program, dims={"tokens.0": 3, "tokens.1": 9})
    for size in ("3", 3.0, 3.5, True, None):
        with pytest.raises(UsageError, match=r"tokens\.0=.*: must be a whole number"):
            import_torch(program, dims={"tokens.0": size, "tokens.1": 5})  # type: ignore[dict-item]


def test_sources_that_make_no_sense() -> None:
    with pytest.raises(UsageError, match=r"expected a torch\.nn\.Module"):
        import_torch(lambda x: x, (torch.randn(2),))
    with pytest.raises(UsageError, match="do not fit forward: missing a required argument: 'tokens'"):
        import_torch(GPT())
    program = torch.export.export(nn.Linear(3, 2), (torch.randn(1, 3),))
    with pytest.raises(UsageError, match="has its example arguments already"):
        import_torch(program, (torch.randn(1, 3),))
    with pytest.raises(UsageError, match="no such dimension"):
        import_torch(program, dims={"batch": 2})


def test_an_exported_program_is_left_as_it_was() -> None:
    class Quiet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3))

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                y = x * 2
            return y * self.weight

    program = torch.export.export(Quiet(), (torch.randn(3),), strict=False)
    before = str(program.graph)
    import_torch(program)
    assert str(program.graph) == before


# ---------------------------------------------------------------------------------------- what is refused


class Unsupported(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        a = torch.linalg.inv(x)
        b = torch.poisson(a) + a
        return torch.fft.fft(b).real


def test_everything_unsupported_is_listed_at_once() -> None:
    with pytest.raises(UnsupportedModel) as caught:
        import_torch(Unsupported(), (torch.randn(3, 3),))
    text = str(caught.value)
    assert "places" in text
    assert "aten.linalg_inv_ex.default" in text
    assert "random numbers" in text
    assert "test_source.py:" in text
    assert "/" + "tests" not in text


def test_state_that_outputs_depend_on_is_refused_without_training() -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.count += 1
            return x * self.count

    module = import_torch(Counter(), (torch.randn(3),)).module
    assert written_vars(module.graphs["main"]) == {"count"}
    with pytest.raises(UnsupportedModel, match="outputs depend on @count, which forward changes"):
        at_rest(module)


def test_what_torch_cannot_export_is_an_error_of_ours() -> None:
    class Dependent(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 1 if x.sum() > 0 else x - 1

    with pytest.raises(UnsupportedModel, match=r"torch\.export cannot export it: ") as caught:
        import_torch(Dependent(), (torch.randn(3),))
    assert caught.value.__cause__ is not None


class Calls(nn.Module):
    """A layer, and what a function makes of its result."""

    def __init__(self, function: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(4, 4), function

    def forward(self, x: Tensor) -> object:
        return self.function(self.layer(x))


def refused(function: Callable[[Tensor], object]) -> UnsupportedModel:
    with pytest.raises(UnsupportedModel) as error:
        import_torch(Calls(function), (torch.ones(4, 4),))
    return error.value


LISTED = "docs/frontends.md lists the operations of ATen that are supported"


def test_only_the_operation_is_to_blame() -> None:
    """Torch orders operations with effects by tokens: these are no inputs of the model."""
    error = refused(lambda x: torch.linalg.inv(x) + torch.linalg.eigh(x)[0])
    assert "2 places" in str(error)
    assert "linalg_inv_ex.default" in str(error)
    assert "token" not in str(error)
    assert "with_effects" not in str(error)
    assert error.hint == LISTED


def test_results_that_a_rule_does_not_give_are_named_in_words() -> None:
    error = refused(lambda x: torch.native_group_norm(x, None, None, 4, 4, 1, 2, 1e-5)[1].squeeze(0))
    assert "statistics of a group norm are not supported" in str(error)
    assert "Absent" not in str(error)
    assert not error.hint  # there is a rule


def test_hints_are_of_the_failure_at_hand() -> None:
    depends = "code that depends on the elements of tensors cannot be exported"
    assert depends in refused(lambda x: x if x.sum() > 0 else -x).hint
    assert not refused(lambda x: x @ torch.zeros(7, 7)).hint
    assert refused(lambda x: torch.linalg.eigh(x)[0]).hint == LISTED


def test_buffers_that_are_one_tensor_and_change() -> None:
    class Twice(nn.Module):
        def __init__(self, apart: bool) -> None:
            super().__init__()
            one = torch.zeros(4)
            self.register_buffer("a", one)
            self.register_buffer("b", one.clone() if apart else one)

        def forward(self, x: Tensor) -> Tensor:
            self.a.add_(1)
            return x + self.b

    with pytest.raises(UnsupportedModel, match="buffers a, b are one tensor: ") as error:
        import_torch(Twice(False), (torch.ones(4),))
    assert "clone" in error.value.hint
    assert written_vars(import_torch(Twice(True), (torch.ones(4),)).module.graphs["main"]) == {"a"}


class Warns(nn.Module):
    """Code of a user, which warns of the same kind as torch does."""

    def forward(self, x: Tensor) -> Tensor:
        warnings.warn("mine", FutureWarning, stacklevel=1)
        return torch.relu(x)


def test_a_warning_that_torch_has_of_itself_is_not_passed_on() -> None:
    """The control is torch's own export, which warns; what the module's code warns of is heard in both."""
    said = []
    for export in (lambda *given: torch.export.export(*given, strict=False).run_decompositions(), import_torch):
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            before = list(warnings.filters)
            export(Warns(), (torch.randn(2, 3),))
            assert list(warnings.filters) == before
        said.append([str(warning.message) for warning in heard if warning.category is FutureWarning])
    control, found = said
    assert "mine" in found
    assert "mine" in control
    assert any("LeafSpec" in text for text in control)
    assert not any("LeafSpec" in text for text in found)
