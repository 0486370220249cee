"""Charts of a page on a phone: size of the text of their axes, computed from the style, or measured by a browser."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

CHROMIUM = shutil.which("chromium")
PHONE = 375
"""Width in pixels of the page on a phone."""
LEAST = 10.0
"""Smallest readable text, in pixels."""
_MEASURE = """
const page = document.querySelector("iframe").contentDocument, texts = [];
for (const text of page.querySelectorAll("svg text")) {
  const svg = text.ownerSVGElement.getBoundingClientRect(), box = text.getBoundingClientRect();
  const size = parseFloat(getComputedStyle(text).fontSize) * text.getScreenCTM().a;
  texts.push([size, box.left - svg.left, svg.right - box.right, text.textContent]);
}
const scrolls = [...page.querySelectorAll("svg")].every(svg => {
  const box = svg.parentElement;
  box.scrollLeft = 1e6;
  return svg.getBoundingClientRect().right <= box.getBoundingClientRect().right + 1;
});
document.body.textContent = JSON.stringify({texts, scrolls, width: page.documentElement.scrollWidth});
"""


def check_style(page: str) -> None:
    """The style alone keeps the text of each chart readable, and lets the box of the chart scroll."""
    style = page.partition("<style>")[2].partition("</style>")[0]
    rules = dict(re.findall(r"^([^@{}\n]+)\{([^}]*)\}", style, re.MULTILINE))
    least, font = (float(re.findall(r"([\d.]+)px", rules[name])[0]) for name in ("svg", ".axis"))
    assert f"min-width:{least:g}px" in rules["svg"]
    captioned = r'<(figure|div class="card")>(?:<figcaption>[^<]*</figcaption>\s*)?'
    charts = re.findall(captioned + r'<svg viewBox="0 0 (\d+) ', page)
    assert len(charts) == page.count("<svg") > 0
    for box, width in charts:
        assert font * least / float(width) >= LEAST
        assert "overflow-x:auto" in rules["figure" if box == "figure" else ".card"]
    # Two charts side by side are as wide as one alone
    if columns := re.search(r"minmax\(min\((\d+)px,100%\)", style):
        assert float(columns[1]) >= least + 26


def check_in_browser(page: str, folder: Path) -> None:
    """A browser as wide as a phone shows all of each chart, after scrolling it, and none of its text is too small."""
    outer = folder / "outer.html"
    frame = f'<iframe srcdoc="{html.escape(page)}" style="border:0;width:{PHONE}px;height:800px"></iframe>'
    # The frame loads before the script of `onload` runs
    outer.write_text(f"<body onload='{html.escape(_MEASURE, quote=True)}'>{frame}</body>", encoding="utf-8")
    words = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}", "--dump-dom"]
    done = subprocess.run([str(CHROMIUM), *words, outer.as_uri()], capture_output=True, timeout=300, check=True)
    found = json.loads(re.sub("<[^>]*>", "", done.stdout.decode()).strip())
    assert found["texts"]
    assert min(size for size, *_ in found["texts"]) >= LEAST
    cut_off = [text for _, left, right, text in found["texts"] if min(left, right) < -1]
    assert not cut_off
    assert found["scrolls"]
    assert found["width"] <= PHONE, "the page itself does not scroll sideways"
