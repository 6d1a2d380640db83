"""A page in headless Chromium, driven over a pipe in the DevTools protocol: what it loads, logs and looks like."""

import base64
import json
import os
import select
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.harness.waiting import Limit

NAMES = ("chromium", "chromium-browser", "google-chrome")
_SECONDS = 60


class Browser:
    """A tab. `requests` and `errors` are all that pages have asked for, and complained about, since `visit`."""

    def __init__(self, commands: int, answers: int):
        self._commands, self._answers, self._read, self._number, self._session = commands, answers, b"", 0, ""
        self.requests: list[str] = []
        self.errors: list[str] = []
        self._loaded = False
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict:
        """The result of a command."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            self._note(answer)
        assert "error" not in answer, (method, answer)
        return answer["result"]

    def visit(self, page: Path, width: int, scheme: str, media: str = "screen") -> None:
        """Load a file in a window of `width` pixels; `scheme` is light or dark, `media` screen or print."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", media=media, features=features)
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        self.requests, self.errors, self._loaded = [], [], False
        self.call("Page.navigate", url=page.resolve().as_uri())
        while not self._loaded:
            self._note(self._next())

    def value(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def photograph(self, path: Path) -> Path:
        """The whole page as PNG."""
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))
        return path

    def _note(self, event: dict) -> None:
        method, told = event.get("method"), event.get("params", {})
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Network.requestWillBeSent" and not told["request"]["url"].startswith("data:"):
            self.requests.append(told["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.errors.append(str(told["exceptionDetails"]))
        elif method == "Log.entryAdded":
            self.errors.append(str(told["entry"]))
        elif method == "Runtime.consoleAPICalled":
            self.errors.append(str(told["args"]))

    def _next(self) -> dict:
        limit = Limit(_SECONDS)
        while b"\0" not in self._read:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, limit.left()))
            found = os.read(self._answers, 2**20) if ready else b""
            assert found, "Chromium has ended, or does not answer"
            self._read += found
        message, _, self._read = self._read.partition(b"\0")
        return json.loads(message)


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """A browser with an empty profile. Skips the test if Chromium is not installed."""
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip("needs Chromium (Debian: apt-get install chromium)")
    theirs, commands = os.pipe()
    answers, ours = os.pipe()
    words = [program, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
    words += [
        "--remote-debugging-pipe",
        f"--user-data-dir={profile}",
        "--no-first-run",
        "--disable-background-networking",
    ]
    script = f'exec "$@" 3<&{theirs} 4>&{ours}'  # the descriptors that the protocol prescribes
    with (profile.parent / "chromium.log").open("wb") as log:
        process = subprocess.Popen(
            ["bash", "-c", script, "bash", *words], pass_fds=(theirs, ours), stdout=log, stderr=log
        )
    os.close(theirs)
    os.close(ours)
    try:
        tab = Browser(commands, answers)
        yield tab
        tab._session = ""
        tab.call("Browser.close")
    finally:
        os.close(commands)
        os.close(answers)
        process.terminate()
        process.wait()
