"""The checkers of schedules: what is done once per batch, such as the sum of a norm over stages."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.passes.memory.test_offload import planned

from penstock.ir.graph import Module
from penstock.ir.text import parse_module
from penstock.ir.verify.verifier import check, verify

from .agreed import AGREED
from .edits import edited, message, pipeline


@pytest.fixture
def agreed():
    return pipeline(parse_module(AGREED), "zb-1f1b", 2)


def test_the_text_of_batches_these_tests_edit(agreed):
    verify(agreed)
    program = " ".join(map(str, agreed.schedule.ranks[0].batch))
    assert program.endswith("0RB3<1 0B3@1 0D3 0P1 0SP1>1 0RP1<1 0N1 0SN1>1 0RN1<1 0U1@2")
    program = " ".join(map(str, agreed.schedule.ranks[1].batch))
    assert program.endswith("1W2@1 1D2 1W3@1 1D3 1P1 1SP1>0 1N1 1SN1>0 1RN1<0 1RP1<0 1U1@2")


# rank, (old, new) words, what the message must say
ONCE_PER_BATCH = [
    (
        0,
        ("0P1 0SP1>1 0RP1<1 0N1 0SN1>1", "0RP1<1 0N1 0SN1>1 0P1 0SP1>1"),
        "(0N0): comes before 0P0, whose results it may use",
    ),
    (0, ("0N1 0SN1>1 0RN1<1 0U1@2", "0U1@2 0N1 0SN1>1 0RN1<1"), "(0U0@1): comes before 0N0, whose results it may use"),
    (0, ("0N1 0SN1>1 ", ""), "rank 0: never runs @s0.N for batch 0"),
    (1, ("1W3@1 1D3 1P1", "1P1 1W3@1 1D3"), "(1P0): uses the gradients of microbatches 0, expected 0..1"),
    (
        1,
        ("1B2@1 1SB2>0 1RF3<0", "1SB2>0 1RF3<0 1W2@1 1B2@1"),
        "(1W0@0): microbatch 0 has not run backward on stage 1 yet",
    ),
    (0, ("0RP1<1 ", ""), "(0N0): runs before its inputs from stage 1 have arrived (0RP0<1)"),
    (0, ("0RN1<1 ", ""), "(0U0@1): runs before its inputs from stage 1 have arrived (0RN0<1)"),
    (1, ("1RP1<0 ", ""), "(1U0@1): runs before its inputs from stage 0 have arrived (1RP0<0)"),
    (0, ("0SN1>1 ", ""), "(0N0): its results are never sent to stage 1 (0SN0>1)"),
    (1, ("1P1 1SP1>0", "1SP1>0 1P1"), "(1SP0>0): sends what 1P0 has not computed yet"),
]


@pytest.mark.parametrize(("rank", "pair", "said"), ONCE_PER_BATCH, ids=[said for *_, said in ONCE_PER_BATCH])
def test_what_is_done_once_per_batch_has_its_place(agreed, rank, pair, said):
    assert said in message(edited(agreed, rank, pair))


def test_what_comes_too_early_is_told_once(agreed):
    text = message(edited(agreed, 1, ("1W3@1 1D3 1P1 1SP1>0 1N1 1SN1>0", "1N1 1W3@1 1D3 1P1 1SP1>0 1SN1>0")))
    assert "(1N0): uses the gradients of microbatches 0, expected 0..1" in text
    assert "comes before" not in text


def test_weight_gradients_are_not_added_to_a_sum_that_was_not_taken(agreed):
    late = edited(agreed, 1, (" 1U1@2", ""), ("1W2@1", "1W2@1 1U0@1"))
    said = "adds to @v.grad before the sum of batch 0 was taken from that buffer; 1 buffer is kept"
    assert said in message(late, "versioned")
    # The sum may be taken between a backward and the weight gradients that come after it.
    between = edited(pipeline(parse_module(AGREED), "zb-1f1b", 2, delay=1), 1, (" 1U1@2", ""), ("1B2@0", "1B2@0 1U0@1"))
    check(between, ("versioned",))
    plain = edited(agreed, 0, (" 0U1@2", ""), (" 0P1 ", " "), ("0B2@1", "0B2@1 0P0 0U0@1"))
    assert "adds to @t.grad before the sum of batch 0 was taken from that buffer; 1 buffer is kept" in message(
        plain, "versioned"
    )
    spare = {name: replace(var, versions=2) if var.role == "grad" else var for name, var in late.vars.items()}
    assert "adds to" not in message(late.but(vars=spare), "versioned")


def test_edges_of_what_is_handed_out_once_per_batch(agreed):
    for edge in agreed.edges[2:]:
        left = tuple(other for other in agreed.edges if other != edge)
        taker = {"P": {0: "N", 1: "U"}[edge.dst], "N": "U"}[edge.phase]
        (value,) = edge.values
        place = f"edge {edge.src}>{edge.dst} {edge.phase}"
        assert (
            f"{place}: there is none, but @s{edge.dst}.{taker} takes {value!r} from @s{edge.src}.{edge.phase}"
            in message(agreed.but(edges=left))
        )


def just_in_time(module: Module) -> Module:
    """Each update stands right behind the last gradient of its stage: nothing waits for other stages, and weights could
    leave at once."""
    ranks = {}
    for rank, program in module.schedule.ranks.items():
        batch = [a for a in program.batch if a.kind != "U"]
        for update in (a for a in program.batch if a.kind == "U"):
            last = max(i for i, a in enumerate(batch) if a.kind in ("B", "W") and a.stage == update.stage)
            batch.insert(last + 1, update)
        ranks[rank] = replace(program, batch=tuple(batch))
    return module.but(schedule=replace(module.schedule, ranks=ranks))


@pytest.mark.parametrize("case", ["1f1b", "interleaved", "one device"])
def test_updates_just_in_time_are_refused_where_a_norm_of_all_stages_clips_them(case: str) -> None:
    """The control: the same without clipping."""
    verify(just_in_time(planned(case, "none", "none")))
    clipped = planned(case, "none", "none", clip=True)
    verify(clipped)
    last = max(stage.index for stage in clipped.stages)
    assert f"({last}U0@1): comes before {last}N0, whose results it may use" in message(just_in_time(clipped))


def test_clipped_updates_under_2bw_stand_just_ahead_of_the_next_use() -> None:
    """A batch later: the norm of all stages is there by then, and ranks compute meanwhile. One use later is refused."""
    module = planned("2bw", "none", "none", clip=True)
    verify(module)
    for rank in list(module.schedule.ranks)[:-1]:
        actions = list(module.schedule.expand(rank, 3))
        norm = next(i for i, a in enumerate(actions) if a.kind == "N")
        update = next(i for i, a in enumerate(actions) if a.kind == "U")
        assert any(a.kind in ("F", "B") for a in actions[norm:update])
        following = next(a for a in actions[update + 1 :] if a.kind in ("F", "B"))
        assert (following.kind, following.version) == ("F", actions[update].version)
        batch = list(module.schedule.ranks[rank].batch)
        at = next(i for i, a in enumerate(batch) if a.kind == "U")
        behind = next(i for i, a in enumerate(batch) if i > at and a.kind == "F")
        batch[at], batch[behind] = batch[behind], batch[at]
        ranks = {**module.schedule.ranks, rank: replace(module.schedule.ranks[rank], batch=tuple(batch))}
        late = module.but(schedule=replace(module.schedule, ranks=ranks))
        assert "reads version 1" in message(late)
