"""The colours of every page and figure: of algorithms, of clusters, of the light and the dark scheme.

One colour serves both schemes: its contrast against the dark page is 3 or more, against the light one 2.1 or more.
Lines also differ by dashes and by their names. It imports nothing but the standard library.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

GREY = "#8a8a8a"

# Okabe and Ito's palette without black and yellow, then a violet, two of Tol's muted colours and a brown.
CLUSTERS = (
    "#0072b2",
    "#e69f00",
    "#009e73",
    "#cc79a7",
    "#d55e00",
    "#56b4e9",
    "#9c3cf0",
    "#999933",
    "#44aa99",
    "#8c6432",
)

ALGORITHMS: Mapping[str, str] = {
    "dfca-auto": "#9c3cf0",
    "dfca-gi": "#0072b2",
    "dfca-li": "#e69f00",
    "dfca-fi": "#8c6432",
    "ifca": "#d55e00",
    "dfedavgm": "#009e73",
    "fedspd": "#cc79a7",
    "fedavg": "#56b4e9",
    "facade": "#2098b8",
    "fedem": "#ff4fa0",
    "deprl": "#6b8e23",
    "dfedpgp": "#d111bb",
    "dpfl": "#3d7367",
    "psfl": "#007a15",
    "pens": "#b8860b",
    "dac": "#6a78d8",
    "local": GREY,
    "oracle": GREY,
}
OTHERS = ("#d8003c", "#00a818", "#3060ff", "#ff50ff", "#9a4a8c", "#b795fa")  # for variants, and algorithms of users

LIGHT: Mapping[str, str] = {
    "text": "#1c1f23",
    "soft": "#5b626b",
    "page": "#ffffff",
    "panel": "#f6f7f8",
    "line": "#dfe2e6",
    "accent": "#0072b2",
    "warning": "#fff3cd",
    "on-warning": "#5c4400",
}
DARK: Mapping[str, str] = {
    "text": "#e6e8ea",
    "soft": "#a3aab3",
    "page": "#16181b",
    "panel": "#1f2226",
    "line": "#3a3f45",
    "accent": "#56b4e9",
    "warning": "#3a2f10",
    "on-warning": "#ffe08a",
}


def cluster_colour(cluster: int) -> str:
    """Return the colour of a cluster; they come round again after ten, and -1 (unknown, unmatched) is grey."""
    return GREY if cluster < 0 else CLUSTERS[cluster % len(CLUSTERS)]


def algorithm_colour(name: str) -> str:
    """Return the colour of an algorithm: its own, or for one that is not known here one that follows from its name."""
    if name in ALGORITHMS:
        return ALGORITHMS[name]
    return OTHERS[hashlib.sha256(name.encode()).digest()[0] % len(OTHERS)]


def algorithm_colours(names: Iterable[str]) -> dict[str, str]:
    """Return the colours of the algorithms of one page: `algorithm_colour`, but unknown ones differ."""
    given: dict[str, str] = {}
    for name in names:
        colour = algorithm_colour(name)
        if name not in ALGORITHMS and colour in given.values():
            colour = next((other for other in OTHERS if other not in given.values()), colour)
        given[name] = colour
    return given


def css_variables() -> str:
    """Return the two colour schemes as custom properties of CSS (`--text`, `--page`, ...); the browser chooses."""

    def listed(scheme: Mapping[str, str]) -> str:
        return " ".join(f"--{name}: {colour};" for name, colour in scheme.items())

    return (
        f":root {{ {listed(LIGHT)} color-scheme: light dark; }}\n"
        f"@media (prefers-color-scheme: dark) {{ :root {{ {listed(DARK)} }} }}\n"
    )
