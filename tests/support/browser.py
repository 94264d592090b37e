"""Open a page in a real browser (Qt WebEngine, Chromium's engine) and report what it looks like.

    python tests/support/browser.py PAGE.html WIDTH SCREENSHOT.png [--dark] [--steps JSON]

Steps are made before the page is looked at, in their order: {"key": "Tab"} presses a key, {"js":
"..."} runs a script, whose value is in the report's "steps". Prints one JSON object. A program of
its own: a browser engine does not share pytest's process.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

os.environ["QT_QPA_PLATFORM"] = "offscreen"
os.environ["QTWEBENGINE_DISABLE_SANDBOX"] = "1"  # it does not start as root, and the page is ours
SCHEME = "--blink-settings=preferredColorScheme=" + ("0" if "--dark" in sys.argv else "1")
os.environ["QTWEBENGINE_CHROMIUM_FLAGS"] = f"--disable-gpu --disable-background-networking {SCHEME}"

from PySide6.QtCore import Qt, QTimer, QUrl  # noqa: E402
from PySide6.QtTest import QTest  # noqa: E402
from PySide6.QtWebEngineCore import (  # noqa: E402
    QWebEnginePage,
    QWebEngineProfile,
    QWebEngineUrlRequestInterceptor,
)
from PySide6.QtWebEngineWidgets import QWebEngineView  # noqa: E402
from PySide6.QtWidgets import QApplication  # noqa: E402

LIMIT_MS, SETTLE_MS, STEP_MS, MAX_HEIGHT = 60_000, 1_500, 100, 16_000

# Text is cut where it leaves its plot, or a box that hides or scrolls what does not fit - apart
# from the boxes that are meant to scroll.
LOOK = """(() => {
  const shown = box => box.width > 0 && box.height > 0;
  const out = [], cut = [];
  for (const element of document.querySelectorAll('body *')) {
    const box = element.getBoundingClientRect();
    if (!shown(box)) continue;
    const plot = element.closest('.js-plotly-plot');
    if (element.tagName === 'text' && plot) {
      const frame = plot.getBoundingClientRect();
      if (box.left < frame.left - 1 || box.right > frame.right + 1 ||
          box.top < frame.top - 1 || box.bottom > frame.bottom + 1)
        cut.push(element.textContent);
    }
    if (plot || element.closest('.wide table, #js-plotly-tester')) continue;
    if (box.right > innerWidth + 1 || box.left < -1) out.push(element.outerHTML.slice(0, 120));
    const style = getComputedStyle(element);
    if (!element.matches('.wide') && style.overflowX !== 'visible' &&
        element.scrollWidth > element.clientWidth + 1)
      cut.push(element.outerHTML.slice(0, 120));
  }
  const plots = [...document.querySelectorAll('.js-plotly-plot')];
  return JSON.stringify({
    inner_width: innerWidth,
    page_width: document.documentElement.scrollWidth,
    page_height: document.documentElement.scrollHeight,
    outside: out, cut,
    marks_per_plot: plots.map(p => p.querySelectorAll('.point path, path.point').length),
    text: document.body.innerText,
  });
})()"""


class Requests(QWebEngineUrlRequestInterceptor):
    """Notes everything the page asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.urls: list[str] = []

    def interceptRequest(self, info) -> None:  # noqa: N802 - Qt's name
        self.urls.append(info.requestUrl().toString()[:200])


class Page(QWebEnginePage):
    """Notes everything the page writes to the console."""

    def __init__(self, profile: QWebEngineProfile) -> None:
        super().__init__(profile)
        self.console: list[str] = []

    def javaScriptConsoleMessage(self, level, message, line, source) -> None:  # noqa: N802, ARG002
        self.console.append(f"{level.name}: {message}")


def look_at(page_file: Path, width: int, screenshot: Path, steps: list[dict]) -> dict:
    """Returns the report on the page, ``width`` pixels wide, after these steps."""
    app = QApplication(["browser"])
    profile, requests = QWebEngineProfile(), Requests()
    profile.setUrlRequestInterceptor(requests)
    page, view, found = Page(profile), QWebEngineView(), {"steps": []}
    view.setPage(page)
    view.resize(width, 900)
    view.show()

    def step(number: int) -> None:
        if number == len(steps):
            page.runJavaScript(LOOK, 0, grow)
            return

        def done(value: object) -> None:
            found["steps"].append(value)
            QTimer.singleShot(STEP_MS, lambda: step(number + 1))

        if "js" in steps[number]:
            page.runJavaScript(steps[number]["js"], 0, done)
        else:
            QTest.keyClick(view.focusProxy(), getattr(Qt.Key, f"Key_{steps[number]['key']}"))
            done(None)

    def grow(text: str) -> None:
        found.update(json.loads(text))
        view.resize(width, min(found["page_height"], MAX_HEIGHT))
        QTimer.singleShot(SETTLE_MS, photograph)

    def photograph() -> None:
        view.grab().save(str(screenshot))
        app.quit()

    def loaded(is_loaded: bool) -> None:
        found["loaded"] = is_loaded
        QTimer.singleShot(SETTLE_MS, lambda: step(0))

    page.loadFinished.connect(loaded)
    page.load(QUrl.fromLocalFile(str(page_file.resolve())))
    QTimer.singleShot(LIMIT_MS, app.quit)
    app.exec()
    return found | {"console": page.console, "requests": requests.urls}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("page", type=Path)
    parser.add_argument("width", type=int)
    parser.add_argument("screenshot", type=Path)
    parser.add_argument("--steps", type=json.loads, default=[])
    parser.add_argument("--dark", action="store_true")  # read above, before the engine starts
    given = parser.parse_args()
    found = look_at(given.page, given.width, given.screenshot, given.steps)
    print(json.dumps(found))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
    os._exit(0)  # the engine's own threads are not waited for
