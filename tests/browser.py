"""A headless Chromium, driven through the DevTools protocol over a pipe: no port, no driver, no package."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# the browser reads commands from descriptor 3 and answers on 4
LAUNCH = """import fcntl, os, sys
theirs = [fcntl.fcntl(int(fd), fcntl.F_DUPFD, 10) for fd in sys.argv[1:3]]
for fd, place in zip(theirs, (3, 4)):
    os.dup2(fd, place)
os.execv(sys.argv[3], sys.argv[3:])
"""
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def chromium() -> str:
    """Its path, or "" where there is none."""
    return next((found for name in NAMES if (found := shutil.which(name))), "")


class Browser:
    """One page with the network off: `with Browser(folder) as page: page.open(file); page.js("document.title")`."""

    def __init__(self, profile: Path, size: tuple[int, int] = (1400, 900)) -> None:
        self.profile, self.size = profile, size
        self.events: list[dict[str, Any]] = []
        self._count, self._rest, self._session = 0, b"", ""

    def __enter__(self) -> Browser:
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        command = [
            *(sys.executable, "-c", LAUNCH, str(theirs_in), str(theirs_out), chromium()),
            *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
            *("--disable-background-networking", "--disable-component-update", "--host-resolver-rules=MAP * ~NOTFOUND"),
            *(f"--user-data-dir={self.profile}", "--remote-debugging-pipe"),
        ]
        self._process = subprocess.Popen(
            command, pass_fds=(theirs_in, theirs_out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(theirs_in)
        os.close(theirs_out)
        try:
            self._attach()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _attach(self) -> None:
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.ask(f"{domain}.enable")
        self.ask("Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=0, uploadThroughput=0)
        self.ask("Emulation.setFocusEmulationEnabled", enabled=True)
        width, height = self.size
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def __exit__(self, *_: object) -> None:
        os.close(self._out)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._in)

    def ask(self, method: str, **params: Any) -> Any:
        """One command of the protocol and its result."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        message |= (
            {"sessionId": self._session} if self._session and not method.startswith(("Target.", "Browser.")) else {}
        )
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            found = self._read()
            if found.get("id") == self._count:
                if "error" in found:
                    raise RuntimeError(f"{method}: {found['error']}")
                return found["result"]
            self.events.append(found)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            more = os.read(self._in, 1 << 16)
            if not more:
                raise RuntimeError("the browser went away")
            self._rest += more
        text, self._rest = self._rest.split(b"\0", 1)
        return json.loads(text)

    def open(self, path: Path, fragment: str = "") -> None:
        """Load a file and wait until it has run."""
        self.ask("Page.navigate", url="about:blank")
        self.ask("Page.navigate", url=path.resolve().as_uri() + fragment)
        self.until(lambda: self.js("document.readyState") == "complete" and self.js("location.protocol") == "file:")

    def js(self, code: str) -> Any:
        """The value of an expression on the page, awaited."""
        result = self.ask("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True, userGesture=True)
        if "exceptionDetails" in result:
            raise RuntimeError(f"{code}: {result['exceptionDetails']}")
        return result["result"].get("value")

    def click(self, selector: str) -> None:
        """A real click in the middle of the first element that fits."""
        code = f"""(() => {{ const e = document.querySelector({json.dumps(selector)});
            e.scrollIntoView({{block: "center", inline: "center"}}); const r = e.getBoundingClientRect();
            return [r.x + r.width / 2, r.y + r.height / 2]; }})()"""
        x, y = self.js(code)
        for kind in ("mousePressed", "mouseReleased"):
            self.ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def type(self, selector: str, text: str) -> None:
        """Put the cursor into a field and type over what is there."""
        self.js(f"(() => {{ const e = document.querySelector({json.dumps(selector)}); e.focus(); e.select(); }})()")
        self.ask("Input.insertText", text=text)

    def until(self, holds: Callable[[], bool], seconds: float = 30.0) -> None:
        """Wait for what the page does a moment later."""
        end = time.monotonic() + seconds
        while not holds():
            if time.monotonic() > end:
                raise RuntimeError("the page did not get there")
            time.sleep(0.01)

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.ask("Page.captureScreenshot", format="png")["data"]))

    def complaints(self) -> list[str]:
        """Errors of the page, and whatever it wanted that is not the file itself."""
        self.js("0")
        found = []
        for event in self.events:
            params = event.get("params", {})
            if event.get("method") == "Runtime.exceptionThrown":
                found.append(str(params["exceptionDetails"]))
            elif event.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
                found.append(params["entry"]["text"])
            elif event.get("method") == "Network.requestWillBeSent":
                url = params["request"]["url"]
                found += [] if url.startswith(("file:", "data:", "about:")) else [url]
        return found
