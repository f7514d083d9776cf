"""The report's page in a real browser: light and dark, wide and narrow."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from functools import partial
from html import unescape
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest

from tests.integration.browser import View, browse
from tests.unit.report.page.test_document import page
from tests.unit.report.run_of_everything import everything

LOOK = """
const texts = [...document.querySelectorAll("svg text")].filter((t) => t.getClientRects().length);
const box = (t) => t.getBoundingClientRect();
const overlaps = [];
for (const svg of document.querySelectorAll("svg")) {
  const own = texts.filter((t) => svg.contains(t));
  own.forEach((a, i) => own.slice(i + 1).forEach((b) => {
    const [p, q] = [box(a), box(b)];
    const beside = p.right < q.left + 1 || q.right < p.left + 1;
    if (!beside && p.top < q.bottom - 3 && q.top < p.bottom - 3)
      overlaps.push([a.textContent, b.textContent]);
  }));
}
const page = document.documentElement;
const chart = [...document.querySelectorAll("svg[data-seconds]")].find((s) => box(s).width > 0);
const at = { clientX: box(chart).left + box(chart).width / 2, clientY: box(chart).top + 60 };
chart.dispatchEvent(new PointerEvent("pointermove", at));
parent.document.body.dataset.seen = JSON.stringify({
  dark: matchMedia("(prefers-color-scheme: dark)").matches,
  width: innerWidth,
  overflow: page.scrollWidth - page.clientWidth,
  cut: texts.filter((t) => {
    const [own, whole] = [box(t), box(t.closest("svg"))];
    return own.left < whole.left - 1 || own.right > whole.right + 1;
  }).map((t) => t.textContent),
  scrolled: [...document.querySelectorAll(".scroll")].filter(
    (b) => b.querySelector("svg") && b.scrollWidth > b.clientWidth).length,
  small: Math.min(...texts.map((t) => box(t).height)),
  shown: [...document.querySelectorAll("svg")].filter((s) => box(s).width > 0).length,
  loaded: performance.getEntriesByType("resource").map((e) => e.name),
  hover: document.getElementById("hover").textContent,
  overlaps,
});
"""

VIEWS = [
    View(width, 900, dark) for width in (1200, 400) for dark in (False, True)
]  # fmt: skip


# A browser's window is no narrower than 500 pixels, a frame in it may be.
FRAME = """<!doctype html><meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,"><body>
<iframe src="page.html" width="{}" height="900" frameborder="0"></iframe>
"""


class Site:
    """A web server with one page, and all that it was asked for."""

    def __init__(self, directory: Path) -> None:
        self.asked: list[str] = []
        site = self

        class Handler(SimpleHTTPRequestHandler):
            def log_message(self, format: str, *args: Any) -> None:
                site.asked.append(self.path)

        self.server = ThreadingHTTPServer(
            ("127.0.0.1", 0), partial(Handler, directory=str(directory))
        )
        self.address = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path)
    thread = threading.Thread(target=site.server.serve_forever, daemon=True)
    thread.start()
    yield site
    site.server.shutdown()
    site.server.server_close()
    thread.join()


@pytest.mark.slow
@pytest.mark.parametrize("view", VIEWS, ids=str)
def test_the_page_in_a_browser(browser: str, site: Site, tmp_path: Path, view: View) -> None:
    text = page(everything()).replace("</body>", f"<script>{LOOK}</script></body>")
    (tmp_path / "page.html").write_text(text)
    (tmp_path / "frame.html").write_text(FRAME.format(view.width))
    window = View(1300, 1000, view.dark)
    dom, said = browse(browser, f"{site.address}/frame.html", window, "--dump-dom")
    assert [line for line in said.splitlines() if "CONSOLE" in line] == []
    assert site.asked == ["/frame.html", "/page.html"]
    (found,) = re.findall(r'data-seen="([^"]*)"', dom)
    seen = json.loads(unescape(found))
    assert (seen["dark"], seen["width"]) == (view.dark, view.width)
    assert seen["loaded"] == []
    assert seen["overflow"] <= 0
    assert seen["overlaps"] == []
    assert seen["cut"] == []
    assert seen["small"] > 10  # pixels, of a line of text
    assert seen["shown"] == 6
    assert seen["scrolled"] == (0 if view.width > 1000 else 6)  # in boxes of their own
    assert re.fullmatch(r"step \d+, generation \d: loss [\d.]+, \d+ tokens/s", seen["hover"])


@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True])
def test_the_page_is_light_or_dark(browser: str, site: Site, tmp_path: Path, dark: bool) -> None:
    (tmp_path / "page.html").write_text(page(everything()))
    picture = tmp_path / "page.png"
    window = View(1200, 900, dark)
    browse(browser, f"{site.address}/page.html", window, f"--screenshot={picture}")
    pixels = matplotlib.image.imread(picture)[:, :, :3]
    assert pixels.shape[:2] == (900, 1200)
    corner = pixels[5, 5].mean()
    assert corner < 0.2 if dark else corner > 0.9
    # Blue for the loss, orange for PREPARE: more than a page of text.
    blue = (pixels[:, :, 2] - pixels[:, :, 0]) > 0.35
    orange = (pixels[:, :, 0] - pixels[:, :, 2]) > 0.12
    assert blue.sum() > 300
    assert orange.sum() > 3000
