"""Figures as SVG of a page, in a notebook, or as files.

`to_svg` makes an `<svg>` element that needs nothing beside it: text is text, ids are its own, and what is INK or FAINT
takes the colours of the page, so that one page reads on a light and on a dark screen. `save` writes the same figure as
PNG, SVG and PDF.
"""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.collections import Collection, PathCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.text import Text

from dfca.base.errors import ConfigError
from dfca.report.wording import paper_name

FONT = 11.0  # points, of the labels in a layout
WIDTH = 6.4  # inches of a layout
NARROWEST = 3.0  # inches of a layout: below, names leave no room for lines
_layout: ContextVar[float | None] = ContextVar("layout", default=None)


class FigureSize(NamedTuple):
    """The width of a figure in inches and the size of its labels in points, in print.

    Figures are laid out in letters of FONT points and then scaled as a whole: one for a column of 3.4 inches in letters
    of 8 points is laid out 3.4 · FONT / 8 = 4.7 inches wide.
    """

    width: float = WIDTH
    font: float = FONT

    @property
    def layout(self) -> float:
        """The width in letters of FONT points."""
        return self.width * FONT / self.font

    def check(self) -> FigureSize:
        """Return the size. Raises ConfigError if figures would have no room."""
        if not 1 <= self.width <= 40 or not 3 <= self.font <= 40:
            raise ConfigError(
                f"figures must be 1 to 40 inches wide, letters 3 to 40 points, got {self.width:g} and {self.font:g}"
            )
        if self.layout < NARROWEST:
            raise ConfigError(
                f"a figure of {self.width:g} inches has no room for letters of {self.font:g} points; use at most "
                f"{self.width * FONT / NARROWEST:.1f} points, or {NARROWEST * self.font / FONT:.1f} inches"
            )
        return self


@contextmanager
def sized(size: FigureSize | None) -> Iterator[None]:
    """Lay figures out for a size in print; None: as the page has them."""
    token = _layout.set(None if size is None else size.check().layout)
    try:
        yield
    finally:
        _layout.reset(token)


def layout_width(usual: float = WIDTH) -> float:
    """Return how wide a figure is laid out; usual: on the page."""
    width = _layout.get()
    return usual if width is None else width


def scale_(figure: Figure, width: float) -> None:
    """Scale a figure to a width in inches, with its letters, lines and marks."""
    factor = width / figure.get_figwidth()
    axes = figure.axes
    ticks = {axis: axis.get_major_ticks()[0].label1.get_fontsize() for one in axes for axis in (one.xaxis, one.yaxis)}
    figure.set_size_inches(width, figure.get_figheight() * factor)
    for text in figure.findobj(Text):
        text.set_fontsize(factor * float(text.get_fontsize()))
    for line in figure.findobj(Line2D):
        line.set_linewidth(factor * line.get_linewidth())
        line.set_markersize(factor * line.get_markersize())
    for patch in figure.findobj(Patch):
        patch.set_linewidth(factor * patch.get_linewidth())
    for marks in figure.findobj(Collection):
        marks.set_linewidth((factor * np.asarray(marks.get_linewidth())).tolist())
        if isinstance(marks, PathCollection):
            marks.set_sizes(factor**2 * marks.get_sizes())
    for axis, size in ticks.items():
        axis.set_tick_params(labelsize=factor * float(size), pad=3.5 * factor, grid_linewidth=0.7 * factor)
        axis.labelpad *= factor


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
