"""The measured tables of docs/rivals.md, from the results of the presets `rivals`, `rivals-2025` and `profed`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import beyond_page
from trials import Runs, load, of
from writing import Place, Trials, differences, spread, table

from dfca.experiment.load import load_experiment

WORLDS = ("48 clients, a quarter turned", "two namings, mixed", "two rotations, 40 clients", "Dirichlet(0.1)")
"""The points of the preset `rivals`, in its order."""
FRESH = "two namings, mixed, fresh seeds"
"""The second point again, on seeds that nothing was chosen on."""
NEW_WORLDS = {
    "Dirichlet(0.1), links one way": {"topology__name": "directed"},
    "three regions on a torus": {"topology__name": "torus"},
    "two rotations, 40 clients": {"clients": 40},
    "48 clients, a quarter turned": {"clients": 48},
    "two namings, 30 samples": {"clients": 20},
}
"""The points of the preset `rivals-2025`."""
PUBLISHED = {"hard": "81 ± 1", "dirichlet": "90 ± 4", "iid": "95 ± 0.1"}
"""FedAvg in table 2 of ProFed (doi 10.5334/jors.624), in percent."""


def blocks() -> dict[str, Callable[[], str]]:
    """List the blocks of the page, by name."""
    return {"rivals": measured, "rivals-2025": measured_later, "beside-auto": beside_auto, "profed": profed}


def measured() -> str:
    """Write the accuracies of every world, and the differences to one model for all."""
    points: dict[str, Runs] = {}
    for run in load("rivals"):
        points.setdefault(repr(run["point"]), []).append(run)
    if not points:
        return _missing("rivals")
    worlds = dict(zip(WORLDS, points.values(), strict=True))
    if fresh := load("rivals-namings"):
        worlds[FRESH] = fresh
    return _compared("rivals", worlds, "dfedavgm")


def measured_later() -> str:
    """Write the accuracies of the later rivals, and the differences to training alone."""
    runs = load("rivals-2025")
    worlds = {world: of(runs, **point) for world, point in NEW_WORLDS.items()}
    return _compared("rivals-2025", worlds, "local") if runs else _missing("rivals-2025")


def beside_auto() -> str:
    """Write the accuracies of the later rivals beside those of dfca-auto, in the worlds of never-worse."""
    if not (runs := load("rivals-never-worse")):
        return _missing("never-worse --algorithms dfca-auto,dpfl,psfl,dfedpgp --seeds 2")
    names, rows = ("dfca-auto", "dpfl", "psfl", "dfedpgp"), []
    for world, point in zip(beyond_page.WORLDS, load_experiment("never-worse").points, strict=True):
        here = [run for run in runs if run["digest"] == point.digest]
        scores = (spread([run["accuracy"] for run in of(here, algorithm=name)]) for name in names)
        rows.append([world, *scores])
    head = table(["world", *(f"`{name}` %" for name in names)], rows)
    return f"`dfca run never-worse --algorithms {','.join(names)} --seeds 2`:\n\n{head}"


def profed() -> str:
    """Write the accuracies on ProFed's split beside its published ones."""
    if not (runs := load("profed")):
        return _missing("profed")
    names = list(dict.fromkeys(run["algorithm"] for run in runs))
    rows = []
    for deal, published in PUBLISHED.items():
        point = {} if deal == "hard" else {"data__factory": f"dfca.data.profed:{deal}"}
        mine = [run for run in of(runs, **point) if deal != "hard" or not run["point"]]
        scores = (spread([run["accuracy"] for run in of(mine, algorithm=name)]) for name in names)
        rows.append([deal, published, *scores])
    head = ["deal", "FedAvg there %", *(f"`{name}` %" for name in names)]
    return f"`dfca run profed`:\n\n{table(head, rows)}"


def _missing(name: str) -> str:
    return f"Not measured yet: `dfca run {name}`, then `dfca report runs/{name} --save results/{name}.json`."


def _compared(preset: str, worlds: Mapping[str, Runs], control: str) -> str:
    rows: list[list[str]] = []
    asked: dict[Place, tuple[Trials, Trials, str]] = {}
    for world, runs in worlds.items():
        for name in dict.fromkeys(run["algorithm"] for run in runs):
            mine = of(runs, algorithm=name)
            if name != control:
                asked[f"`{name}`", world] = mine, of(runs, algorithm=control), "accuracy"
            rows.append([world, f"`{name}`", str(len(mine)), spread([run["accuracy"] for run in mine])])
    cells, line = differences(asked)
    head = ["world", "algorithm", "seeds", "accuracy %", f"minus `{control}`"]
    lines = [[*row, cells.get((row[1], row[0]), "–")] for row in rows]
    return f"`dfca run {preset}`:\n\n{table(head, lines)}\n\n{line}"
