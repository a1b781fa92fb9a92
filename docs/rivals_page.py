"""The measured table of docs/rivals.md, from the results of the preset `rivals`; `make docs` calls it."""

from __future__ import annotations

from trials import Runs, load, of
from writing import Place, Trials, differences, spread, table

WORLDS = ("48 clients, a quarter turned", "two namings, mixed", "two rotations, 40 clients", "Dirichlet(0.1)")
"""The points of the preset, in its order."""
FRESH = "two namings, mixed, fresh seeds"
"""The second point again, on seeds that nothing was chosen on."""
CONTROL = "dfedavgm"


def measured() -> str:
    """Write the accuracies of every world, and the differences to one model for all."""
    points: dict[str, Runs] = {}
    for run in load("rivals"):
        points.setdefault(repr(run["point"]), []).append(run)
    if not points:
        return "Not measured yet: `dfca run rivals`, then `dfca report runs/rivals --save results/rivals.json`."
    worlds = dict(zip(WORLDS, points.values(), strict=True))
    if fresh := load("rivals-namings"):
        worlds[FRESH] = fresh
    rows: list[list[str]] = []
    asked: dict[Place, tuple[Trials, Trials, str]] = {}
    for world, runs in worlds.items():
        for name in dict.fromkeys(run["algorithm"] for run in runs):
            mine = of(runs, algorithm=name)
            if name != CONTROL:
                asked[f"`{name}`", world] = mine, of(runs, algorithm=CONTROL), "accuracy"
            rows.append([world, f"`{name}`", str(len(mine)), spread([run["accuracy"] for run in mine])])
    cells, line = differences(asked)
    head = ["world", "algorithm", "seeds", "accuracy %", f"minus `{CONTROL}`"]
    lines = [[*row, cells.get((row[1], row[0]), "–")] for row in rows]
    return f"`dfca run rivals`:\n\n{table(head, lines)}\n\n{line}"
