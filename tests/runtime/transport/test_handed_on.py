"""Tests of what is handed on over gloo while it comes, with works and wires of the test."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, cast

import pytest
import torch

from penstock.ir.graph import Value
from penstock.ir.schedule import Action
from penstock.ir.sharding.tile_messages import TileSlice
from penstock.ir.types import parse_type
from penstock.runtime.state.tensors import Recycled
from penstock.runtime.transport.gloo_wire import GlooWire, HandedOn, HandingLink
from penstock.runtime.transport.packing import EdgePacking
from penstock.runtime.transport.senders import Sender

WAIT = timedelta(seconds=2)
RECEIVE, LINK = Action("RF", 1, 0, None, 0), Action("HF", 1, 0, None, 2, 0)


class Arrived:
    """A work that is done."""

    def wait(self, timeout: timedelta) -> None:
        pass


class Peer:
    """Both a wire to a rank and what holds what is sent to it."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.sent = error, list[torch.Tensor]()

    def send(self, mb: int, number: int, message: torch.Tensor) -> Arrived:
        if self.error is not None:
            raise self.error
        self.sent.append(message)
        return Arrived()

    def hold(self, action: Action, works: Sequence[Any]) -> None:
        pass


def follow(relays: HandedOn, type: str, peers: Sequence[Peer]) -> Sequence[Any]:
    value = Value("h", parse_type(type))
    full = tuple(slice(0, size) for size in value.type.dims)
    pieces, packing = (TileSlice(value, "h", full, full),), EdgePacking((value,), Recycled())
    links = [HandingLink(LINK, pieces, packing, cast(GlooWire, peer), cast(Sender, peer)) for peer in peers]
    messages = packing.messages()
    return relays.follow(RECEIVE, 0, lambda: links, pieces, (packing, messages, [Arrived() for _ in messages]))


def relays() -> HandedOn:
    return HandedOn([], lambda action, message: None)


@pytest.mark.parametrize(("type", "messages"), [("f32[64]", 1), ("f32[0,4]", 0)], ids=["full", "empty"])
def test_what_comes_goes_on_and_nothing_is_kept_of_it(type: str, messages: int) -> None:
    handed, peer = relays(), Peer()
    works = follow(handed, type, [peer])
    for work in works:
        work.wait(WAIT)
    assert handed.finish(LINK, WAIT)
    assert (len(works), len(peer.sent), handed._passages) == (messages, messages, {})


def test_nothing_is_kept_of_a_receive_without_links() -> None:
    handed = relays()
    (work,) = follow(handed, "f32[64]", [])
    assert isinstance(work, Arrived)
    assert not handed.finish(LINK, WAIT)
    assert not handed._passages


def test_an_error_of_the_relay_ends_the_action() -> None:
    handed = relays()
    follow(handed, "f32[64]", [Peer(KeyError("of the wire"))])
    with pytest.raises(KeyError, match="of the wire"):
        handed.finish(LINK, WAIT)
