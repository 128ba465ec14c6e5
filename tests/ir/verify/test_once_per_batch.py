"""The checkers of schedules: what is done once per batch, such as the sum of a norm over stages."""

from __future__ import annotations

from dataclasses import replace

import pytest

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
