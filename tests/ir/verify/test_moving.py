"""Variables that forward changes: who may touch them, where, and in which order microbatches run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.ir.graph import Graph, Module, Op, Value, Var
from penstock.ir.ops import make
from penstock.ir.types import parse_type
from penstock.ir.verify.verifier import check, verify
from penstock.passes.communicate.communicate import communicate
from penstock.passes.memory.lifetimes import lifetimes
from penstock.passes.schedules.schedule import ScheduleOptions, schedule
from penstock.passes.schedules.weight_versions import weight_versions
from penstock.support.errors import VerifyError

VECTOR = parse_type("f32[4]")
OLD, NEW = Value("s", VECTOR), Value("s.new", VECTOR)


def read(name="s", value=OLD):
    return Op("read", (), (value,), {"var": name})


def moving(module: Module, stage: int = 0, role: str = "buffer") -> Module:
    """With @s on one stage: s = s + what the stage makes."""
    graph = module.graphs[f"s{stage}.F"]
    ops = (read(), make("add", (OLD, graph.outs[0]), ("s.new",)), Op("write", (NEW,), (), {"var": "s"}))
    module = module.with_graph(replace(graph, ops=graph.ops + ops))
    return module.but(vars={**module.vars, "s": Var("s", VECTOR, role, stage)})


def with_ops(module: Module, graph: str, *ops: Op, at: int | None = None) -> Module:
    old = module.graphs[graph]
    at = len(old.ops) if at is None else at
    return module.with_graph(replace(old, ops=old.ops[:at] + ops + old.ops[at:]))


def message(module: Module, *facts: str) -> str:
    with pytest.raises(VerifyError) as caught:
        check(module, facts) if facts else verify(module)
    return str(caught.value)


def scheduled(module: Module, kind: str = "1f1b", m: int = 3) -> Module:
    module = lifetimes(communicate(weight_versions(schedule(module, ScheduleOptions(kind, m)))))
    return module.but(facts=(*module.facts, "scheduled", "versioned", "wired", "freed"))


@pytest.mark.parametrize("kind", ["1f1b", "gpipe", "2bw", "eager-2bw"])
@pytest.mark.parametrize("stage", [0, 1])
def test_every_schedule_is_legal(toy, kind, stage):
    verify(scheduled(moving(toy(2), stage), kind))


def test_forward_alone_touches_it(toy):
    module = moving(toy(2))
    verify(module)
    assert "reads @s, which forward changes with every microbatch" in message(with_ops(module, "s0.B", read(), at=0))
    assert "reads @s, which forward changes with every microbatch" in message(with_ops(module, "s0.U", read(), at=0))
    again = read(value=Value("s.again", VECTOR))
    assert "@s was already changed by write above" in message(with_ops(module, "s0.F", again))
    assert "@s was already changed by write above" in message(
        with_ops(module, "s0.F", Op("write", (NEW,), (), {"var": "s"}))
    )
    assert "write is not allowed here, only read, accum" in message(
        with_ops(module, "s0.B", Op("write", (Value("x", VECTOR),), (), {"var": "s"}))
    )


def test_only_buffers_move_forward(toy):
    for role in ("state", "setting"):
        assert f"@s is a {role}, expected buffer" in message(moving(toy(2), role=role))
    parameter = with_ops(toy(2), "s0.F", Op("write", (toy(2).graphs["s0.F"].outs[0],), (), {"var": "w0"}))
    assert "@w0 is a param, expected buffer" in message(parameter)


def test_it_is_on_one_stage(toy):
    module = moving(toy(2))
    other = with_ops(module, "s1.F", read())
    assert "@s: is on stage 0, but used by stage 0 and stage 1" in message(other)
    nowhere = other.but(vars={**other.vars, "s": Var("s", VECTOR, "buffer")})
    assert "@s: is changed by the forward of stage 0, but used by stage 0 and stage 1; expected one stage" in message(
        nowhere
    )
    constant = nowhere.with_graph(toy(2).graphs["s0.F"])
    verify(constant.with_graph(_reading(constant.graphs["s0.F"])))  # what nobody changes may be on both


def _reading(graph: Graph) -> Graph:
    return replace(graph, ops=(*graph.ops, read()))


def test_microbatches_run_forward_in_order(toy):
    """Out of order the results of a module without such a variable are the same, and of one with it are not."""
    for module, legal in ((toy(1), True), (moving(toy(1)), False)):
        done = scheduled(module, m=2)
        assert done.schedule is not None
        program = done.schedule.ranks[0]
        text = " ".join(map(str, program.batch))
        assert text == "0F2@1 0B2@1 0D2 0F3@1 0B3@1 0D3 0U1@2"
        first, second, update = program.batch[:3], program.batch[3:6], program.batch[6:]
        swapped = replace(program, batch=(*second, *first, *update))
        done = done.but(schedule=replace(done.schedule, ranks={0: swapped}))
        if legal:
            verify(done)
        else:
            assert "(0F0@0): comes after microbatch 1; @s, which every forward changes, needs them in order" in message(
                done
            )
            other = with_ops(done, "s0.F", Op("write", (NEW,), (), {"var": "a"}))
            assert "@a, which every" in message(other.but(vars={**other.vars, "a": Var("a", VECTOR, "buffer", 0)}))
