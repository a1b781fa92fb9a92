"""The measured table of docs/rivals.md, from the results of the preset `rivals`; `make docs` calls it."""

from __future__ import annotations

from statistics import fmean

from trials import Runs, load, of
from writing import PAIRED, Place, Trials, differences, spread, table

WORLDS = ("48 clients, a quarter turned", "two namings, mixed", "two rotations, 40 clients", "Dirichlet(0.1)")
"""The points of the preset, in its order."""
FRESH = "two namings, mixed: fresh seeds"
"""The second point again, on seeds that nothing was chosen on."""
CONTROL, COLUMN = "dfedavgm", "minus `dfedavgm`"


def measured() -> str:
    """Write the accuracies of every world, and the differences to one model for all."""
    points: dict[str, Runs] = {}
    for run in load("rivals"):
        points.setdefault(repr(run["point"]), []).append(run)
    if not points:
        return (
            "Not measured yet: `dfca run rivals --seeds 5`, then `dfca report runs/rivals --save results/rivals.json`."
        )
    worlds = dict(zip(WORLDS, points.values(), strict=True))
    if fresh := load("rivals-namings"):
        worlds[FRESH] = fresh
    rows: list[list[str]] = []
    asked: dict[Place, tuple[Trials, Trials, str]] = {}
    for world, runs in worlds.items():
        for name in dict.fromkeys(run["algorithm"] for run in runs):
            mine = of(runs, algorithm=name)
            place = f"`{name}` ({world})", COLUMN
            if name != CONTROL:
                asked[place] = mine, of(runs, algorithm=CONTROL), "accuracy"
            shares = [run["peers_of_own_cluster"] for run in mine if run.get("peers_of_own_cluster") is not None]
            peers = f"{100 * fmean(shares):.1f}" if shares else "–"
            rows.append([world, f"`{name}`", str(len(mine)), spread([run["accuracy"] for run in mine]), peers])
    cells, line = differences(asked)
    lines = [[*row, cells.get((f"{row[1]} ({row[0]})", COLUMN), "–")] for row in rows]
    head = ["world", "algorithm", "seeds", "accuracy %", "peers of the own cluster %", COLUMN]
    return f"`dfca run rivals --seeds 5`. {PAIRED}\n\n{table(head, lines)}\n\n{line}"
