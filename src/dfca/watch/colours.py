"""The colours of the page: those of the reports, so that an algorithm looks the same in both."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from dfca.report.drawing import palette
from dfca.watch.trials import MOST_CLUSTERS


def colours_of(algorithms: Iterable[str]) -> dict[str, Any]:
    """Return the colour and the dashes of every algorithm, and the colours of the clusters.

    The registry knows whom an algorithm talks to, but loads torch: until `load_registry` was called, lines are solid.
    """
    known = "dfca.report.rows" in sys.modules
    return {
        "algorithms": {
            name: {"colour": colour, "dash": _dash(name) if known else ""}
            for name, colour in palette.algorithm_colours(algorithms).items()
        },
        "clusters": [palette.cluster_colour(cluster) for cluster in range(MOST_CLUSTERS)],
        "complete": known,
    }


def load_registry() -> None:
    """Load what lines and graphs need; it takes seconds on a busy machine."""
    import dfca.report.rows
    import dfca.topology  # noqa: F401


def _dash(name: str) -> str:
    """Return the dashes of a line as SVG writes them, by the rule of `report.drawing.plots.styles`."""
    from dfca.report.rows import kind_of

    kind = kind_of(name)
    if kind.informed:
        return "7 3 2 3"
    return {"nobody": "2 3", "server": "6 4"}.get(kind.via, "")
