"""Sizes that there is code for on the page, in a headless Chromium."""

from __future__ import annotations

from pathlib import Path

from penstock.inspection.report.facts import gather
from penstock.inspection.report.page import render

from .chromium import Browser
from .small_plan import Planned


def test_turns_are_a_table_with_what_they_do_with_caches(browser: Browser, planned: Planned, tmp_path: Path) -> None:
    """Other bounded sizes, which have no caches, are the control."""
    facts = gather(planned.material, plain=True)

    def opened(caches: list[int] | None, rungs: list[object]) -> str:
        summary = {**facts["summary"], "caches": caches, "rungs": rungs}
        (tmp_path / "index.html").write_text(render({**facts, "summary": summary}), encoding="utf-8")
        browser.open(tmp_path / "index.html")
        assert not browser.complaints()
        return " ".join(str(browser.js("document.querySelector('#view-overview').innerText")).split())

    turns = [["tokens=1", 1e-3, [1, 1, 512, 2, 16384]], ["tokens=4", 2e-3, [4, 2, 2048, 4, 32768]]]
    text = opened([4, 16, 32768, 512], turns)
    assert "tokens=1 1.00 ms up to 1 512 B up to 16.0 KiB up to 2" in text
    assert "tokens=4 2.00 ms up to 2 2.00 KiB up to 32.0 KiB up to 4" in text
    assert all(word in text.lower() for word in ("rows of a turn", "written to caches", "read of caches", "in blocks"))
    text = opened(None, [["batch=1", 1e-3, None], ["batch=2", 2e-3, None]])
    assert "batch=2 2.00 ms" in text
    assert "caches" not in text.lower()
