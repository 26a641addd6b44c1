"""A real Chromium, driven over the pipe of its DevTools protocol: no library stands between a test and the page."""

import base64
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_OPTIONS = """--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --hide-scrollbars --no-first-run
    --disable-background-networking --disable-component-update --disable-sync --disable-extensions
    --remote-debugging-pipe"""
# Chromium reads commands from file descriptor 3 and writes answers to 4.
_LAUNCH = """import os, sys
os.dup2(int(sys.argv[1]), 3), os.dup2(int(sys.argv[2]), 4)
os.execv(sys.argv[3], sys.argv[3:])"""


class Browser:
    """One browser with one tab; what the page complains about or asks of the network is noted."""

    def __init__(self) -> None:
        assert CHROMIUM is not None
        self.profile = Path(tempfile.mkdtemp(prefix="chromium-"))
        read_by_it, self._commands = os.pipe()
        self._answers, written_by_it = os.pipe()
        options = [*_OPTIONS.split(), f"--user-data-dir={self.profile}"]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _LAUNCH, str(read_by_it), str(written_by_it), CHROMIUM, *options, "about:blank"],
            pass_fds=(read_by_it, written_by_it),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read_by_it)
        os.close(written_by_it)
        self._buffer, self._count = b"", 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        targets = self.send("Target.getTargets")["targetInfos"]
        page = next(target["targetId"] for target in targets if target["type"] == "page")
        self._session = self.send("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and wait for its answer."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        number = self._count
        while (answer := self._next()).get("id") != number:
            pass
        assert "error" not in answer, answer["error"]
        return answer["result"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            piece = os.read(self._answers, 1 << 20)
            assert piece, "Chromium has ended"
            self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(line)
        if "method" in message:
            self.events.append(message)
        return message

    def open(self, path: Path, *, width: int = 1280, height: int = 900, phone: bool = False, **media: str) -> None:
        """Load a file in a window of this size, with media features such as ``prefers_color_scheme``."""
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone
        )  # fmt: skip
        self.media(**media)
        self.events.clear()
        self.send("Page.navigate", url=path.resolve().as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self._next()

    def media(self, medium: str = "", **features: str) -> None:
        """Show the page as on this medium (``print``) and with these features."""
        named = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
        self.send("Emulation.setEmulatedMedia", media=medium, features=named)

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression."""
        answer = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def press(self, key: str, code: int, text: str = "") -> None:
        """Press a key and let it go."""
        for kind in ("keyDown", "keyUp"):
            more = {"text": text} if text and kind == "keyDown" else {}
            self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **more)

    def complaints(self) -> list[str]:
        """Errors and warnings of the page, and all that it wrote to the console."""
        kinds = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        return [json.dumps(event["params"]) for event in self.events if event["method"] in kinds]

    def requests(self) -> list[str]:
        """The addresses that the page asked for."""
        asked = (event for event in self.events if event["method"] == "Network.requestWillBeSent")
        return [event["params"]["request"]["url"] for event in asked]

    def screenshot(self, *, whole: bool = True) -> bytes:
        """The page as PNG."""
        return base64.b64decode(self.send("Page.captureScreenshot", captureBeyondViewport=whole)["data"])

    def pdf(self) -> bytes:
        """The page as it would be printed."""
        return base64.b64decode(self.send("Page.printToPDF", printBackground=False)["data"])

    def close(self) -> None:
        """End the browser."""
        self._session = None
        self.send("Browser.close")
        self._process.wait()
        os.close(self._commands)
        os.close(self._answers)
        shutil.rmtree(self.profile, ignore_errors=True)
