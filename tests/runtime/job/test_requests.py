"""Tests of the division of samples into microbatches: for all sizes, every request gets its own rows back, in order,
and no request waits for ever."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.classifier import classifier

from penstock.ir.text import parse_module
from penstock.runtime.job.requests import Packer, RequestPart, SampleLayout, Ticket
from penstock.runtime.messages.control import End, RequestBatch
from penstock.runtime.messages.status import Status
from penstock.runtime.worker.actions import ActionStream
from penstock.runtime.worker.feeds import InputCuts
from penstock.runtime.worker.message_feeds import RequestFeed
from penstock.support.errors import UsageError

# Two samples per microbatch; %pair has two rows for each of them, %total none: it belongs to the microbatch.
TEXT = """module @toy facts(staged) {
  device cpu:0
  stage 0 on cpu:0
  input %x : f32[2,3]
  input %ids : i64[4]
  input %scale : f32[]
  output %y
  output %pair
EXTRA  var @table : f32[9,1] stage 0 param
  graph @s0.F(%x : f32[2,3], %ids : i64[4], %scale : f32[]) {
    %y : f32[2,3] = mul(%x, %scale)
    %t : f32[9,1] = read(@table)
    %pair : f32[4,1] = gather(%t, %ids, axis=0)
    %total : f32[3] = reduce_sum(%y, axes=[0], keep=false)
    return %y, %pair, %total
  }
  schedule forward microbatches 1 {
    rank 0 start:
    rank 0 batch: 0F1
  }
}
"""


def layout_of(whole_output: bool = False) -> SampleLayout:
    return SampleLayout(parse_module(TEXT.replace("EXTRA", "  output %total\n" if whole_output else ""), "toy.ir"), {})


def inputs_of(random: np.random.Generator, samples: int, scale: float) -> dict[str, np.ndarray]:
    x = random.standard_normal((samples, 3)).astype(np.float32)
    return {"x": x, "ids": random.integers(-9, 9, 2 * samples), "scale": np.float32(scale)}


def run(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    y = inputs["x"] * inputs["scale"]
    return {"y": y, "pair": inputs["ids"].astype(np.float32)[:, None], "total": y.sum(0)}


@settings(deadline=None, max_examples=150)
@given(
    st.lists(st.tuples(st.integers(1, 7), st.sampled_from([1.0, 2.0])), min_size=1, max_size=9),
    st.booleans(),
    st.randoms(),
)
def test_every_request_gets_its_own_rows(sizes, shares, order):
    layout, random = layout_of(), np.random.default_rng(0)
    given_ = [inputs_of(random, samples, scale) for samples, scale in sizes]
    tickets = [Ticket(layout.request(one, "request")) for one in given_]
    packer = Packer(shares=shares)
    packer.waiting.extend(tickets)
    made: list[tuple[list[RequestPart], dict[str, np.ndarray]]] = []
    while packer.waiting:
        parts = packer.take()
        assert len({float(p.ticket.request.inputs["scale"]) for p in parts}) == 1
        assert shares or len({id(p.ticket) for p in parts}) == 1
        arrays = layout.microbatch(parts)
        assert {name: a.shape for name, a in arrays.items()} == {"x": (2, 3), "ids": (4,), "scale": ()}
        made.append((parts, run(arrays)))
    # First come, first served, and no microbatch that could have taken more.
    served = [tickets.index(p.ticket) for parts, _ in made for p in parts]
    assert served == sorted(served)
    if shares and len({scale for _, scale in sizes}) == 1:
        assert len(made) == -(-sum(samples for samples, _ in sizes) // 2)
    order.shuffle(made)
    done = []
    for parts, outputs in made:
        for name in ("y", "pair"):
            done += [p.ticket for p in parts if p.ticket.take(p, {name: outputs[name]})]
    assert sorted(map(id, done)) == sorted(map(id, tickets))
    for ticket, one in zip(tickets, given_, strict=True):
        found, expected = ticket.results(), run(one)
        assert found.keys() == {"y", "pair"}
        for name, array in found.items():
            np.testing.assert_array_equal(array, expected[name])


def test_an_output_of_whole_microbatches_keeps_requests_apart():
    layout = layout_of(whole_output=True)
    assert not layout.packs
    ticket = Ticket(layout.request(inputs_of(np.random.default_rng(1), 3, 1.0), "request"))
    packer = Packer(shares=True)
    packer.waiting.append(ticket)
    assert packer.full()
    # Results in the other order.
    pieces = [(parts, run(layout.microbatch(parts))) for parts in (packer.take(), packer.take())]
    assert [part[0].ticket.take(part[0], outputs) for part, outputs in reversed(pieces)] == [False, True]
    assert ticket.results()["total"].shape == (6,)
    x = ticket.request.inputs["x"]
    np.testing.assert_allclose(ticket.results()["total"], np.concatenate([x[:2].sum(0), 2 * x[2]]), rtol=1e-6)


def test_whether_a_microbatch_is_full():
    layout, random = layout_of(), np.random.default_rng(2)
    one, other = (layout.request(inputs_of(random, 1, scale), "request") for scale in (1.0, 2.0))
    packer = Packer(shares=True)
    packer.waiting.append(Ticket(one))
    assert not packer.full()
    packer.waiting.append(Ticket(other))
    assert packer.full()  # nobody who comes later may join before the one that does not fit
    packer.waiting[1] = Ticket(one)
    assert packer.full()
    packer.waiting[0].future.cancel()
    packer.purge()
    assert len(packer.waiting) == 1
    packer.waiting[0].future.cancel()
    assert packer.take() == []
    assert not packer.waiting


def test_requests_that_do_not_fit_name_everything():
    layout, good = layout_of(), inputs_of(np.random.default_rng(3), 2, 1.0)
    for bad, said in (
        (
            good | {"ids": good["ids"][:2]},
            r"numbers of samples differ: x has 2, ids has 1 \(first dimension of one sample: x 1, ids 2\)",
        ),
        (good | {"ids": good["ids"][:3]}, "ids: 3 rows, expected a multiple of 2 and at least one"),
        (good | {"x": good["x"][:0]}, "x: 0 rows"),
        (good | {"x": good["x"].astype(np.float64)}, "x: element type is f64, expected f32"),
        (good | {"x": good["x"][:, :2]}, r"x: shape is \[2, 2\], expected \[2, 3\]"),
        (good | {"ids": np.array([0, 0, 9, 0])}, "ids: sample 1 has the value 9, the model takes -9 to 8"),
        ({"x": good["x"]}, r"ids: missing(.|\n)*scale: missing"),
        (good | {"z": good["x"]}, "z: the model has no such input"),
    ):
        with pytest.raises(UsageError, match=said) as caught:
            layout.request(bad, "request 7")
        assert caught.value.where == "request 7"


def test_a_request_is_copied_where_its_arrays_may_change():
    layout, given_ = layout_of(), inputs_of(np.random.default_rng(4), 2, 1.0)
    copied, shared = layout.request(given_, "a", copy=True), layout.request(given_, "b")
    given_["x"][:] = 0
    assert copied.inputs["x"].any()
    assert not shared.inputs["x"].any()


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 2), st.integers(0, 9), st.randoms())
def test_microbatches_run_one_by_one_as_they_come(stages, m, first, count, random):
    module = classifier(stages, "forward", m)
    found = module.schedule
    messages = [(RequestBatch(first * m + i), {"x": np.array(i)}) for i in range(count)] + [(End(), {})]
    for rank in range(stages):
        left = list(messages)

        def receive(wait, left=left):
            return left.pop(0) if wait or random.random() < 0.3 else None

        feed = RequestFeed(first * m, receive, Status(None, rank), {"": InputCuts(module, rank)})
        stream, seen = ActionStream(found, rank, first, feed, 1), []
        while (upcoming := stream.pop()) is not None:
            seen.append(upcoming.action)
            stream.receives(3)
        batches = -(-count // m)
        expected = [a for a in found.expand(rank, batches, first) if a.mb < first * m + count] if batches else []
        assert seen == expected
        assert not left
