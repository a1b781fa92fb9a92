"""How large figures are: the width in print, and the size of its letters.

Figures are laid out in letters of FONT points. One for a column of 3.4 inches in letters of 8 points is laid out
3.4 · FONT / 8 = 4.7 inches wide, and then scaled as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import numpy as np
from matplotlib.collections import Collection, PathCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.text import Text

from dfca.base.errors import ConfigError

FONT = 11.0  # points, of the labels in a layout
WIDTH = 6.4  # inches of a layout
NARROWEST = 3.0  # inches of a layout: below, names leave no room for lines
_layout: ContextVar[float | None] = ContextVar("layout", default=None)


class FigureSize(NamedTuple):
    """The width of a figure in inches and the size of its labels in points, in print."""

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
