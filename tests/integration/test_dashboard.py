"""The live page in a real browser, beside a run that trains and changes its shape."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from liver_hpc.run.directory import RunDirectory
from tests.integration.browser import View
from tests.integration.runs import ENDLESS, run_config, start, stop_and_read, wait_until
from tests.integration.tab import Tab, new_tab

LOOK = """(() => {
  const box = (element) => element.getBoundingClientRect();
  const texts = [...document.querySelectorAll("svg text")];
  return {
    overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth,
    cut: texts.filter((text) => {
      const [own, whole] = [box(text), box(text.closest("svg"))];
      return own.left < whole.left - 1 || own.right > whole.right + 1;
    }).map((text) => text.textContent),
    lanes: [...document.querySelectorAll("#lanes text.ink")].map((text) => text.textContent),
    bars: document.querySelectorAll("#lanes rect").length,
    badges: [...document.querySelectorAll("#curve .badge-text")].map((text) => text.textContent),
    facts: Object.fromEntries([...document.querySelectorAll("#facts div")].map(
      (pair) => [...pair.children].map((each) => each.textContent))),
    loaded: performance.getEntriesByType("resource").map((each) => new URL(each.name).origin),
  };
})()"""

SEEN = f"""
window.seen = [];
window.told_so = false;
new MutationObserver(() => {{
  const [title, state] = ["handoff-title", "state"].map(
    (id) => document.getElementById(id).textContent);
  window.told_so ||= title === "Handoff in progress" && state === "handing over";
  const now = document.querySelector("#handoff-phases li.now");
  const phase = now && now.textContent.split(" ")[0];
  if (!phase || seen.at(-1) === phase) return;
  seen.push(phase);
  if (phase === "PREPARE") window.during = {LOOK};
}}).observe(document.getElementById("handoff-phases"), {{ childList: true }});
"""
"""Whether a handoff was told of, the phases as they come, and what the page is like at PREPARE:
after all of it was drawn."""


@contextmanager
def dashboard(run: RunDirectory) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The command as a user gives it, and the address that it prints."""
    command = [sys.executable, "-m", "liver_hpc", "dashboard", str(run.path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip(), process
    finally:
        process.kill()
        process.communicate()


def wait_for(tab: Tab, expression: str, timeout_s: float = 60.0) -> None:
    wait_until(lambda: bool(tab.evaluate(expression)), timeout_s, expression)


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.usefixtures("unhurried_steps")
def test_a_handoff_is_seen_to_appear_and_to_complete(browser: str, tmp_path: Path) -> None:
    run = start(run_config(tmp_path, ENDLESS, initial=1))
    state = 'document.getElementById("state").textContent'
    title = 'document.getElementById("handoff-title").textContent'
    with dashboard(run) as (address, process), new_tab(browser, View(1120, 900, False)) as tab:
        assert address.startswith("http://127.0.0.1:")
        tab.open(address)
        wait_for(tab, f'{state} === "training" && told.points.length >= 3')
        assert tab.evaluate('document.getElementById("handoff").hidden') is True
        tab.evaluate(SEEN)
        resize = [sys.executable, "-m", "liver_hpc", "resize", str(run.path), "--workers", "2"]
        subprocess.run(resize, check=True, timeout=60, stdout=subprocess.DEVNULL)
        wait_for(tab, "told_so")
        wait_for(tab, 'seen.includes("PREPARE")')
        during: dict[str, Any] = tab.evaluate("during")
        wait_for(tab, f'{title} === "The last handoff" && {state} === "training"')
        before = tab.evaluate("told.points.length")
        wait_for(tab, f"told.points.length > {before}")
        after: dict[str, Any] = tab.evaluate(LOOK)

        assert tab.evaluate("seen")[:2] == ["BOOT", "PREPARE"]
        joins = ["worker 0", "worker 1 joins"]
        assert during["lanes"] == after["lanes"] == joins
        assert during["bars"] > 4
        assert (during["facts"]["layout"], during["badges"]) == ("dp1", [])
        assert (after["facts"]["layout"], after["badges"]) == ("dp2", ["1"])
        assert after["facts"]["workers"] == "0-1"
        assert "completed" in tab.evaluate('document.getElementById("handoff-line").textContent')
        for seen in (during, after):
            assert (seen["overflow"], seen["cut"], seen["loaded"]) == (0, [], [])

        stop_and_read(run)
        wait_for(tab, f'{state} === "stopped"')
        assert tab.said == []
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
        wait_for(tab, f'{state} === "the dashboard does not answer"')
