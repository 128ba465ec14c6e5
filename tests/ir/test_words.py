"""Words of messages: one of a kind is no plural."""

from __future__ import annotations

from penstock.ir.words import counted


def test_one_is_no_plural() -> None:
    assert [counted(n, "stage") for n in (0, 1, 2)] == ["0 stages", "1 stage", "2 stages"]
    assert [counted(n, "microbatch") for n in (1, 2)] == ["1 microbatch", "2 microbatches"]
