"""Figures as SVG of a page, in a notebook, or as files.

`to_svg` makes an `<svg>` element that needs nothing beside it: text is text, ids are its own, and what is INK or FAINT
takes the colours of the page, so that one page reads on a light and on a dark screen. `save` writes the same figure as
PNG, SVG and PDF.
"""

from __future__ import annotations

import hashlib
import io
import re
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.text import Text

from dfca.report.drawing.sizes import FigureSize, scale_
from dfca.report.wording import paper_name

INK = "#010101"  # stands for the page's text colour
FAINT = "#020202"  # stands for the page's colour of thin lines
FAINT_ON_PAPER = "#d9dde2"


Look = dict[str, Any]
"""Keyword arguments of matplotlib: colours, widths, places."""


class NotebookFigure(Figure):
    """A figure that a notebook shows in the colours of its page."""

    def _repr_html_(self) -> str:
        thin = "color-mix(in srgb, currentColor 25%, transparent)"
        svg = to_svg(self).replace("var(--line, #ccc)", thin).replace(FAINT_ON_PAPER, thin)
        return f'<div style="max-width:{self.get_figwidth():g}in;color:inherit">{svg}</div>'


def to_svg(figure: Figure, salt: str = "") -> str:
    """Write a figure as an `<svg>` element to put into a page; a salt makes the ids of equal figures differ."""
    _take_literally(figure)
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "dfca", "path.simplify_threshold": 0.2}):
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True, dpi=170, metadata={"Date": None})
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->\s*", "", text, flags=re.DOTALL)
    text = re.sub(r'\s(xmlns(:\w+)?|width|height|version)="[^"]*"', "", text, count=5)
    text = text.replace("xlink:href", "href")
    text = re.sub(r"(font:[^;\"]*?px)[^;\"]*", r"\1 system-ui, sans-serif", text)
    text = text.replace(INK, "currentColor").replace(FAINT, "var(--line, #ccc)")
    own = hashlib.sha256((salt + text).encode()).hexdigest()[:8]  # two figures of one page must not share an id
    text = re.sub(r'\bid="', f'id="f{own}-', text)
    text = re.sub(r'(href="#|url\(#)', rf"\1f{own}-", text)
    return text.strip()


def for_paper_(figure: Figure, size: FigureSize | None = None, paper_names: bool = False) -> None:
    """Give a figure the colours of paper, its size in print where one is given, and the names of papers."""
    _take_literally(figure)
    for axes in figure.axes:
        axes.tick_params(grid_color=FAINT_ON_PAPER)
    if size is not None:
        scale_(figure, size.width)
    if paper_names:
        for text in figure.findobj(Text):
            assert isinstance(text, Text)
            text.set_text("\n".join(map(paper_name, text.get_text().split("\n"))))


def save(figure: Figure, stem: Path, size: FigureSize | None = None, paper_names: bool = False) -> list[Path]:
    """Write a figure beside each other as PNG, SVG and PDF; the same figure makes the same bytes.

    With a size it is exactly as wide, otherwise as its content.
    """
    for_paper_(figure, size, paper_names)
    written = []
    margins: Look = {"bbox_inches": "tight", "pad_inches": 0.05} if size is None else {}
    options: dict[str, Any] = {"png": {"dpi": 200}, "svg": {"metadata": {"Date": None}}}
    options["pdf"] = {"metadata": {"CreationDate": None}}
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "dfca", "pdf.fonttype": 42}):
        for kind, extra in options.items():
            path = stem.with_name(f"{stem.name}.{kind}")
            figure.savefig(path, format=kind, facecolor="white", **margins, **extra)
            written.append(path)
    return written


def _take_literally(figure: Figure) -> None:
    """Show a `$` in a name as it is: matplotlib would read what is between two of them as a formula."""
    for text in figure.findobj(Text):
        assert isinstance(text, Text)
        text.set_parse_math(False)
