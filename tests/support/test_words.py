"""Words of messages: one of a kind is no plural."""

from __future__ import annotations

from penstock.support.errors import UsageError
from penstock.support.words import counted, shown_bytes


def test_one_is_no_plural() -> None:
    assert [counted(n, "stage") for n in (0, 1, 2)] == ["0 stages", "1 stage", "2 stages"]
    assert [counted(n, "microbatch") for n in (1, 2)] == ["1 microbatch", "2 microbatches"]


def test_bytes_for_people() -> None:
    assert [shown_bytes(n) for n in (0, 1023, 1024, 3 * 2**20, 5 * 2**40, 2**52)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "3.0 MiB",
        "5.0 TiB",
        "4096.0 TiB",
    ]


def test_messages_of_any_length_are_cut() -> None:
    """A line of megabytes hides what is wrong, and whatever follows it."""
    name = "n" * 2_400_000
    error = UsageError(f"bad name {name}", where=name, hint="\n".join(["try another"] * 5000))
    assert len(str(error)) < 50_000
    assert str(error).endswith("... (4000 more lines)")
    assert "(2396009 more characters)" in str(error)
    assert error.what.endswith(name)
    assert str(UsageError("short", where="here", hint="there")) == "here: short\n  hint: there"
