"""A headless Chromium for tests of pages, driven over a pipe: JSON messages that end with NUL, on descriptors 3 (to it) and 4 (from it).

In: a page's file. Out: what its scripts say, what it logged, what it asked the network for, pictures. Nothing is downloaded and no port is open; every wait
is bounded. `Browser` is a context: the process and its profile go with it.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--disable-default-apps",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
SECONDS = 30.0


class PageError(Exception):
    """The page or the browser did not do what was asked."""


def installed() -> str | None:
    """The browser of this machine, if it has one."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One process, and one page at a time in it."""

    def __init__(self, program: str) -> None:
        self._profile = tempfile.mkdtemp(prefix="penstock-chromium-")
        (to_read, self._write), (self._read, to_write) = os.pipe(), os.pipe()

        def connect() -> None:
            # Numbers of its own first: 3 and 4 may be among the ends.
            ends = [os.dup(to_read), os.dup(to_write)]
            for end, number in zip(ends, (3, 4), strict=True):
                os.dup2(end, number)

        command = [program, *FLAGS, f"--user-data-dir={self._profile}", "about:blank"]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=connect,
            close_fds=False,
            start_new_session=True,
        )
        os.close(to_read)
        os.close(to_write)
        self._rest, self._number, self._session = b"", 0, ""
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._write)
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(5)
        os.close(self._read)
        shutil.rmtree(self._profile, ignore_errors=True)

    # ------------------------------------------------------------------------------ messages

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Ask for something, and wait for the answer; what happens meanwhile is put into `events`."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters} | (
            {"sessionId": self._session} if self._session else {}
        )
        os.write(self._write, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + SECONDS
        while True:
            answer = self._next(end)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise PageError(f"{method}: {answer['error']}")
                found: dict[str, Any] = answer["result"]
                return found

    def _next(self, end: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            if not select.select([self._read], [], [], max(0.0, end - time.monotonic()))[0]:
                raise PageError(f"no answer in {SECONDS:.0f} s")
            part = os.read(self._read, 1 << 20)
            if not part:
                raise PageError("the browser has gone")
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        if "method" in message:
            self.events.append(message)
        return message

    # ------------------------------------------------------------------------------ pages

    def open(self, page: Path, width: int = 1280, height: int = 860, scheme: str = "light", fragment: str = "") -> None:
        """Open a file as a new visitor would, and wait until it says that it is ready."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Page.navigate", url="about:blank")
        self.events.clear()
        self.call("Page.navigate", url=page.resolve().as_uri() + fragment)
        self.wait("document.documentElement?.dataset.ready === ''", watching=True)

    def js(self, expression: str) -> Any:
        """The value of an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise PageError(
                f"{expression}: {answer['exceptionDetails'].get('exception', {}).get('description', answer['exceptionDetails'])}"
            )
        return answer["result"].get("value")

    def wait(self, condition: str, watching: bool = False) -> None:
        """Until something holds; with `watching` a script that failed is the end of it."""
        end = time.monotonic() + SECONDS
        while not self.js(condition):
            if time.monotonic() > end or (watching and self._failed()):
                raise PageError(f"is not true: {condition}; {self.complaints()}")
            time.sleep(0.02)

    def key(self, name: str, text: str = "") -> None:
        """Press and release a key; `text` is what it types."""
        code = {
            "Tab": 9,
            "Enter": 13,
            "Escape": 27,
            "ArrowLeft": 37,
            "ArrowUp": 38,
            "ArrowRight": 39,
            "ArrowDown": 40,
            "Home": 36,
            "End": 35,
        }.get(name, 0)
        text = text or ("\r" if name == "Enter" else name if len(name) == 1 else "")
        self.call(
            "Input.dispatchKeyEvent",
            type="keyDown",
            key=name,
            windowsVirtualKeyCode=code,
            **({"text": text} if text else {}),
        )
        self.call("Input.dispatchKeyEvent", type="keyUp", key=name, windowsVirtualKeyCode=code)

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def point(self, x: float, y: float, *, click: bool = False) -> None:
        """Move the pointer there, and perhaps press."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        for kind in ("mousePressed", "mouseReleased") if click else ():
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def middle(self, selector: str) -> tuple[float, float]:
        """The middle of the first element that a selector finds."""
        found = self.js(
            f"(() => {{ const b = document.querySelector({json.dumps(selector)}).getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2] }})()"
        )
        return found[0], found[1]

    def picture(self) -> bytes:
        """What the window shows, as a PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])

    def _failed(self) -> bool:
        return any(event["method"] == "Runtime.exceptionThrown" for event in self.events)

    def complaints(self) -> list[str]:
        """Errors and warnings of scripts, policies and the browser since the page was opened."""
        found = []
        for event in self.events:
            details = event["params"]
            if event["method"] == "Runtime.exceptionThrown":
                thrown = details["exceptionDetails"]
                found.append(thrown.get("exception", {}).get("description") or thrown["text"])
            elif event["method"] == "Log.entryAdded" and details["entry"]["level"] in ("error", "warning"):
                found.append(details["entry"]["text"])
            elif event["method"] == "Runtime.consoleAPICalled" and details["type"] in ("error", "warning", "assert"):
                found.append(json.dumps(details["args"]))
        return found

    def requests(self) -> list[str]:
        """Addresses that were asked for since the page was opened."""
        return [
            event["params"]["request"]["url"] for event in self.events if event["method"] == "Network.requestWillBeSent"
        ]
