"""A page in a browser that stays open: driven over a pair of pipes, by the DevTools protocol."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.integration.browser import LIMIT_S, View, flags

Message = dict[str, Any]


class Tab:
    """said: errors and whatever the page has logged."""

    def __init__(self, asked: int, answered: int) -> None:
        self._asked = asked
        self._answered = answered
        self._unread = b""
        self._number = 0
        self._session = ""
        self._is_loaded = False
        self.said: list[str] = []

    def open(self, address: str) -> None:
        """Returns once the page is there."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        self._is_loaded = False
        self.call("Page.navigate", url=address)
        until_s = time.monotonic() + LIMIT_S
        while not self._is_loaded:
            self._note(self._next(until_s))

    def call(self, method: str, **parameters: Any) -> Message:
        """What the browser answers."""
        self._number += 1
        question = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            question["sessionId"] = self._session
        os.write(self._asked, json.dumps(question).encode() + b"\0")
        until_s = time.monotonic() + LIMIT_S
        while True:
            message = self._next(until_s)
            if message.get("id") == self._number:
                assert "error" not in message, f"{method}: {message['error']}"
                answer: Message = message["result"]
                return answer
            self._note(message)

    def evaluate(self, expression: str) -> Any:
        """The value of an expression in the page, as JSON."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def _next(self, until_s: float) -> Message:
        while b"\0" not in self._unread:
            left_s = until_s - time.monotonic()
            assert left_s > 0, f"waited {LIMIT_S:g} s for the browser"
            if select.select([self._answered], [], [], left_s)[0]:
                data = os.read(self._answered, 2**16)
                assert data, "the browser has ended"
                self._unread += data
        line, _, self._unread = self._unread.partition(b"\0")
        message: Message = json.loads(line)
        return message

    def close(self) -> None:
        """And the browser with it."""
        self._session = ""
        self.call("Browser.close")

    def _note(self, message: Message) -> None:
        self._is_loaded = self._is_loaded or message.get("method") == "Page.loadEventFired"
        if message.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
            self.said.append(json.dumps(message["params"]))


@contextlib.contextmanager
def new_tab(browser: str, view: View) -> Iterator[Tab]:
    """Of a browser that is there for it alone, and gone afterwards."""
    questions, asked = os.pipe()
    answered, answers = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        words = [browser, *flags(Path(profile), view), "--remote-debugging-pipe"]
        # The browser reads from descriptor 3 and writes to 4.
        shell = f'exec "$@" 3<&{questions} 4>&{answers}'
        process = subprocess.Popen(
            ["bash", "-c", shell, "bash", *words],
            pass_fds=(questions, answers),
            stderr=subprocess.DEVNULL,
        )
        os.close(questions)
        os.close(answers)
        try:
            tab = Tab(asked, answered)
            yield tab
            tab.close()
            process.wait(LIMIT_S)
        finally:
            process.kill()
            process.wait()
            os.close(asked)
            os.close(answered)
