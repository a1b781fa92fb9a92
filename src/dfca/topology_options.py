"""The `[topology]` table of an experiment: its names, options and bounds, without networkx and numpy."""

from __future__ import annotations

import math

from pydantic import ConfigDict, Field

from dfca.base.errors import ConfigError, unknown
from dfca.base.imports import check_name, is_import
from dfca.base.options import ExplainedModel

TOPOLOGIES: dict[str, str] = {
    "erdos-renyi": "every pair of clients is linked with probability p (the paper's graph)",
    "ring": "every client has two neighbours",
    "torus": "a grid, as square as possible, whose borders are joined: four neighbours each",
    "regular": "a random graph in which every client has `degree` neighbours",
    "small-world": "a ring of `degree` neighbours, a share `rewire` of the links rewired at random (Watts-Strogatz)",
    "scale-free": "each new client links to `attach` popular ones: few hubs, many leaves (Barabasi-Albert)",
    "random-geometric": "clients lie at random on a unit square and are linked when closer than `radius`",
    "star": "client 0 is the only neighbour of all others",
    "complete": "all clients are neighbours of each other",
    "tree": "a balanced binary tree with client 0 at the root",
    "directed": "every client sends to `degree` others, drawn at random: links carry models one way",
    "file": "your own graph: an edge list (two client numbers per line) or a .graphml file",
}

USES: dict[str, tuple[str, ...]] = {
    "erdos-renyi": ("p", "graphs"),
    "regular": ("degree", "graphs"),
    "small-world": ("degree", "rewire", "graphs"),
    "scale-free": ("attach", "graphs"),
    "random-geometric": ("radius", "graphs"),
    "directed": ("degree", "graphs"),
    "file": ("file", "directed"),
    **dict.fromkeys(("ring", "torus", "star", "complete", "tree"), ()),
}
"""The options that each topology uses."""
DRAWN = tuple(name for name, uses in USES.items() if "graphs" in uses)
"""The topologies that are drawn at random: these can change from round to round."""


class TopologyOptions(ExplainedModel):
    """Which graph: the keys of `[topology]` in an experiment file. Options that the named topology lacks are ignored.

    Example:
        >>> import dfca
        >>> dfca.TopologyOptions(name="regular", degree=6).degree
        6
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    name: str = Field(
        default="erdos-renyi",
        description="which graph: "
        + ", ".join(TOPOLOGIES)
        + '; your own: "package.module:function" with arguments (clients, seed), which returns a networkx graph or '
        "edges",
    )
    p: float = Field(default=0.1, description="erdos-renyi: probability of a link between two clients, 0 to 1")
    degree: int = Field(
        default=4, description="regular, small-world: number of neighbours of a client; directed: of its receivers"
    )
    rewire: float = Field(default=0.1, description="small-world: share of the links that is rewired at random, 0 to 1")
    attach: int = Field(default=2, description="scale-free: number of links that each new client brings")
    radius: float = Field(default=0.2, description="random-geometric: linking distance on the unit square, > 0")
    file: str | None = Field(default=None, description="file: path of an edge list or of a .graphml file")
    directed: bool = Field(default=False, description="file: models travel from the first client of an edge only")
    graphs: int = Field(
        default=1, description="how many random graphs are drawn and used in turn, round by round; 1: always the same"
    )


def check_topology(options: TopologyOptions, clients: int) -> None:
    """Refuse options that make no graph over that many clients, before any work is done.

    Raises ConfigError for an unknown name, or a value out of its bounds.
    """
    name, n = options.name, clients
    if is_import(name):
        check_name(name, "topology.name")
    elif name not in TOPOLOGIES:
        raise ConfigError(f'{unknown("topology", name, TOPOLOGIES)}; your own is "module:function"')
    if n < 1:
        raise ConfigError(f"clients must be >= 1, got {n}; a graph needs at least one client")
    if options.file is not None and name != "file":
        raise ConfigError(
            f'topology.file is "{options.file}" but topology.name is "{name}"; '
            'set topology.name = "file" to use the file, or leave topology.file out'
        )
    if name == "erdos-renyi" and not 0 <= options.p <= 1:
        raise ConfigError(f"topology.p must be in 0..1, got {options.p}; it is the probability of a link")
    if name == "small-world" and not 0 <= options.rewire <= 1:
        raise ConfigError(
            f"topology.rewire must be in 0..1, got {options.rewire}; it is the share of links that is rewired"
        )
    if name == "random-geometric" and not options.radius > 0:
        raise ConfigError(
            f"topology.radius must be > 0, got {options.radius}; "
            "from 1.42 on, every pair of clients of the unit square is linked"
        )
    if name == "file" and not options.file:
        raise ConfigError(
            'topology "file" needs topology.file, the path of an edge list (two client numbers per line) '
            "or of a .graphml file"
        )
    if options.directed and name != "file":
        raise ConfigError(
            f'topology.directed is for topology "file", got it for "{name}"; for random directed links use topology '
            '"directed"'
        )
    if options.graphs < 1 or (options.graphs > 1 and name not in DRAWN):
        raise ConfigError(
            f'topology.graphs must be 1, or more for {", ".join(DRAWN)}, got {options.graphs} for "{name}"; '
            "a function of your own may return a list of graphs"
        )
    if n > 1:
        _check_size(options, n)


def _check_size(options: TopologyOptions, n: int) -> None:
    """Check the bounds that depend on the number of clients."""
    name, degree = options.name, options.degree
    if name in ("regular", "small-world", "directed") and not 1 <= degree < n:
        raise ConfigError(
            f"topology.degree must be in 1..{n - 1} for {n} clients, got {degree}; "
            'for a link between all clients use topology "complete"'
        )
    if name == "regular" and degree * n % 2:
        raise ConfigError(
            f"topology.degree x clients must be even for a regular graph, got {degree} x {n}; "
            f"take degree {degree - 1 or degree + 1} or {n + 1} clients"
        )
    if name == "small-world" and degree % 2:
        raise ConfigError(
            f"topology.degree must be even for a small-world graph (half on each side of the ring), got {degree}; "
            f"take {degree - 1 or 2}"
        )
    if name == "scale-free" and not 1 <= options.attach < n:
        raise ConfigError(
            f"topology.attach must be in 1..{n - 1} for {n} clients, got {options.attach}; "
            'for a link between all clients use topology "complete"'
        )
    if name == "torus" and grid_rows(n) < 2:
        grids = [(m, grid_rows(m)) for m in (n - 1, n + 1) if m > 3]
        near = " or ".join(f"{m} ({rows} x {m // rows})" for m, rows in grids if rows > 1)
        raise ConfigError(
            f"a torus needs rows x columns = clients with at least 2 rows, got {n} clients, which is prime; "
            f'take {near or "4 (2 x 2)"} clients, or topology "ring"'
        )


def grid_rows(n: int) -> int:
    """Find the rows of the most square grid of n nodes."""
    return next(r for r in range(math.isqrt(n), 0, -1) if n % r == 0)
