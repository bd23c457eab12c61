"""A headless Chromium, asked by the DevTools protocol: it opens pages, clicks on texts, and takes pictures."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from websockets.sync.client import ClientConnection, connect

from tests.e2e.deployment import eventually

SIZE = (1280, 800)


class Browser:
    """One page of a browser.

    Args:
        connection: The page's DevTools connection.
    """

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self._number = 0

    @classmethod
    @contextmanager
    def started(cls, folder: Path) -> Iterator[Browser]:
        """Start Chromium with a profile in a folder, and end it afterwards."""
        program = shutil.which("chromium") or shutil.which("google-chrome")
        assert program, "Chromium is needed: apt-get install chromium"
        width, height = SIZE
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        window = f"--window-size={width},{height}"
        profile = f"--user-data-dir={folder}"
        process = subprocess.Popen(
            [program, *flags, window, profile, "--remote-debugging-port=0", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            port_file = folder / "DevToolsActivePort"
            eventually(port_file.exists, seconds=60, what="the browser")
            port = port_file.read_text().split()[0]
            pages = httpx.get(f"http://127.0.0.1:{port}/json").json()
            page = next(one for one in pages if one["type"] == "page")
            with connect(page["webSocketDebuggerUrl"], max_size=None) as connection:
                made = cls(connection)
                made.ask(
                    "Emulation.setDeviceMetricsOverride",
                    width=width,
                    height=height,
                    deviceScaleFactor=1,
                    mobile=False,
                )
                yield made
        finally:
            process.terminate()
            process.wait(30)

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command, and return its result."""
        self._number += 1
        self._connection.send(
            json.dumps({"id": self._number, "method": method, "params": parameters})
        )
        while True:
            answer = json.loads(self._connection.recv(timeout=60))
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return dict(answer["result"])

    def evaluate(self, script: str) -> Any:
        """Return the value of an expression in the page."""
        found = self.ask("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def open(self, url: str, *texts: str) -> None:
        """Open a page, and wait until it shows these texts."""
        self.ask("Page.navigate", url=url)
        self.shows(*texts)

    def shows(self, *texts: str) -> None:
        """Wait until the page shows these texts, and nothing is being loaded."""
        for text in texts:
            eventually(
                lambda text=text: text in self.text,  # type: ignore[misc]
                seconds=60,
                what=f"{text!r} in {self.evaluate('location.href')}",
            )
        eventually(lambda: "Loading" not in self.text, seconds=60, what="the end of loading")
        time.sleep(1.5)  # what is drawn is animated

    @property
    def text(self) -> str:
        """What the page shows, as text."""
        return str(self.evaluate("document.body ? document.body.innerText : ''") or "")

    def click(self, text: str) -> None:
        """Click on the first element with exactly this text."""
        script = """(() => {
            const found = [...document.querySelectorAll('a, button, div, span')]
                .filter((one) => one.innerText && one.innerText.trim() === TEXT);
            if (!found.length) return false;
            found[found.length - 1].click();
            return true;
        })()"""
        eventually(
            lambda: self.evaluate(script.replace("TEXT", json.dumps(text))),
            seconds=60,
            what=f"{text!r} to click on",
        )

    def picture(self, file: Path) -> None:
        """Write what the page shows into a PNG file."""
        found = self.ask("Page.captureScreenshot", format="png")
        file.write_bytes(base64.b64decode(found["data"]))
