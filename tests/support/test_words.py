"""Words of messages: one of a kind is no plural."""

from __future__ import annotations

import argparse
import shlex

from penstock.support.errors import UsageError
from penstock.support.words import counted, flag_for, shown_bytes, shown_rate


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


def test_rates_for_people() -> None:
    """Three digits and a unit, as cluster files take them; never a power of ten."""
    rates = [0, 1, 999, 999.6, 1000, 1.25e8, 7e9, 2.5e10, 1.2345e12, 3e18]
    said = ["0 B/s", "1 B/s", "999 B/s", "1 kB/s", "1 kB/s", "125 MB/s", "7 GB/s", "25 GB/s", "1.23 TB/s", "3000 PB/s"]
    assert [shown_rate(rate) for rate in rates] == said
    assert shown_rate(9e10, "FLOP/s") == "90 GFLOP/s"
    assert "e+" in f"{1.25e8:.4g}", "control: what it stands in for"


def test_a_flag_comes_back_from_a_shell_as_it_was() -> None:
    for name in ("batch", "batch size", "2*n", "a;b", "it's", "$HOME", "x`id`", "é", "a=b", "-n", "--all", "*", "#1"):
        parser = argparse.ArgumentParser()
        parser.add_argument("--dim")
        assert parser.parse_args(shlex.split(flag_for("--dim", name, 4))).dim == f"{name}=4"
    assert flag_for("--dim", "batch", "INT") == "--dim batch=INT", "what needs no quotes has none"
    assert shlex.split("--dim batch size=4") != ["--dim", "batch size=4"], "control"
