"""Make the blocks and pictures of docs/results.md from results/*.json; `make docs` calls it."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from writing import table

from dfca.experiment.load import Experiment, load_experiment, preset_text
from dfca.experiment.variants import flatten
from dfca.report import formats
from dfca.report.drawing.plots import NamedFigure
from dfca.report.drawing.svg import FAINT_ON_PAPER
from dfca.report.paper import published
from dfca.report.paper.figures import draw_all
from dfca.report.results import stored_run
from dfca.report.rows import AlgorithmRow, RunReport
from dfca.report.tables import result_tables
from dfca.report.wording import duration, one_line, percent
from dfca.runs.store.metric import DASH
from dfca.runs.store.reading import Run

ROOT = Path(__file__).parent.parent
PICTURES = ROOT / "docs" / "results"


class PaperRow(NamedTuple):
    """A row of a table of the paper, and the result files that have measured it, the first that has an algorithm."""

    table: str
    data: str
    preset: str
    at: dict[str, Any]
    files: tuple[str, ...]


PAPER = (
    PaperRow("1", "MNIST", "table1-mnist", {}, ("table1-mnist-hour",)),
    PaperRow("1", "EMNIST", "table1-emnist", {}, ("table1-emnist-hour", "table1-emnist-bridge")),
    PaperRow("1", "CIFAR-10", "table1-cifar10", {}, ("table1-cifar10-hour",)),
    PaperRow("2", "MNIST", "table2-mnist", {}, ("table2-mnist-hour", "table1-mnist-hour")),
    PaperRow("2", "EMNIST", "table2-emnist", {}, ("table2-emnist-hour",)),
    PaperRow("2", "FEMNIST, k = 4", "table2-femnist", {}, ("table2-femnist-hour",)),
    PaperRow("4", "FEMNIST, k = 3", "table4-femnist-k", {"clusters": 3}, ("table4-femnist-k-hour",)),
    PaperRow("4", "FEMNIST, k = 4", "table4-femnist-k", {"clusters": 4}, ("table2-femnist-hour",)),
)
"""The rows that have the scale `hour`; Table 3 and the figures are measured at desk scale."""
DETAILS = ("soft", "har", "forecast", "uneven")
HIDDEN = ("talks to", "all models", "k right", "runs", "time per run", "start MB")
"""Columns of a report that the page does not need."""
FIGURES = ("contraction", "drift")
"""The figures of the theory that stand on the page."""
NOT_YET = "not yet"


def blocks() -> dict[str, Callable[[], str]]:
    """Return the blocks of the page by name."""
    made: dict[str, Callable[[], str]] = {"paper": paper, "hour": hour, "table3-skew": skew, "theory": theory}
    for name in DETAILS:
        made[name] = lambda name=name: block(name)  # type: ignore[misc]
    return made


def paper() -> str:
    """Put the measured cells of the paper's tables beside the published ones, and list those that are missing."""
    head = ["table", "data", "algorithm", "published %", "measured %", "difference", "clients", "training"]
    cells = [cells for row in PAPER for cells in _cells(row)]
    missing: dict[str, list[str]] = {}
    for number, data, algorithm, *rest in cells:
        if rest[1] == NOT_YET:
            missing.setdefault(f"Table {number}, {data}", []).append(algorithm)
    listed_missing = "; ".join(f"{place}: {', '.join(names)}" for place, names in missing.items())
    lines = [line for line in cells if line[4] != NOT_YET]
    note = f"Clients: in the paper → here. Not measured yet ({len(cells) - len(lines)} cells): {listed_missing}."
    return table(head, lines) + "\n\n" + note


def beside() -> str:
    """Put the measured cells beside the published ones, for README: a row per experiment."""
    experiments: dict[tuple[str, str], dict[str, tuple[str, str]]] = {}
    for row in PAPER:
        for number, data, name, theirs, mine, _, clients, _ in _cells(row):
            if mine != NOT_YET:
                experiments.setdefault((number, data), {})[name] = (f"{mine} ({theirs})", clients)
    names = list(dict.fromkeys(name for cells in experiments.values() for name in cells))
    lines = [
        [*key, ", ".join(dict.fromkeys(clients for _, clients in cells.values()))]
        + [cells[name][0] if name in cells else DASH for name in names]
        for key, cells in experiments.items()
    ]
    return table(["table", "data", "clients", *(f"{name} %" for name in names)], lines)


def _cells(row: PaperRow) -> Iterator[list[str]]:
    theirs = published.published(row.preset, row.at)
    size = paper_scale_of(row.preset).config.clients
    for name, value in theirs.items():
        head = [row.table, row.data, f"`{name}`", f"{100 * value.mean:.1f}"]
        measured = _measured(row, name)
        if measured is None:
            yield [*head, NOT_YET, DASH, f"{size} → –", DASH]
            continue
        run, mine = measured
        gap = 100 * ((mine.score.mean or 0.0) - value.mean)
        difference = f"{gap:+.1f}".replace("-", "−")
        yield [*head, percent(*mine.score), difference, f"{size} → {run.config['clients']}", training(run.config)]


def _measured(row: PaperRow, algorithm: str) -> tuple[Run, AlgorithmRow] | None:
    """Find the row of an algorithm in the files that may have it."""
    for file in row.files:
        run = result(file)
        for mine in () if run is None else RunReport.of(run).rows:
            same = mine.point == row.at or not mine.point
            if run is not None and mine.algorithm == algorithm and not mine.partial and same:
                return run, mine
    return None


def hour() -> str:
    """Show the rows of the scale `hour` with what the first table leaves out, and their commands."""
    lines, smaller = [], {}
    for name in dict.fromkeys(file for row in PAPER for file in row.files):
        run = result(name)
        for mine in () if run is None else RunReport.of(run).rows:
            if run is None or mine.partial:
                continue
            clients = run.config["clients"]
            smaller |= {f"`{run.experiment}` with {clients} clients: `{more}`": None} if (more := _smaller(run)) else {}
            lines.append(
                [
                    f"`{run.experiment}`",
                    f"`{mine.algorithm}`",
                    str(clients),
                    percent(*mine.score),
                    percent(*mine.cluster_accuracy),
                    mine.found,
                    duration(mine.seconds),
                ]
            )
    head = ["experiment", "algorithm", "clients", "accuracy %", "right cluster %", "all clusters found", "time"]
    command = "`dfca run EXPERIMENT --scale hour --algorithms ALGORITHM`"
    return table(head, lines) + f"\n\nCommand: {command}; {'; '.join(smaller)}."


def _smaller(run: Run) -> str:
    """Write how a run was smaller than the scale `hour`, as options of `dfca run`."""
    wanted = flatten(load_experiment(run.experiment, "hour").config.values())
    measured = flatten(run.config)
    keys = ("clients", "data.samples_per_client", "data.test_samples_per_client")
    return " ".join(f"--set {key}={measured[key]}" for key in keys if measured.get(key) != wanted.get(key))


def dates() -> str:
    """Say when every file of results was written, and on which commits."""
    lines = []
    for path in sorted((ROOT / "results").glob("*.json")):
        if path.name == "bench.json":
            continue
        run = stored_run(path)
        commits = sorted({str(trial.get("commit") or run.environment.get("commit"))[:7] for trial in run.trials})
        spent = duration(sum(trial.seconds or 0 for trial in run.trials))
        said = subprocess.run(
            ["git", "log", "-1", "--format=%cs", "--", str(path)], cwd=ROOT, capture_output=True, text=True, check=True
        )
        lines.append([path.stem, str(len(run.trials)), spent, said.stdout.strip(), ", ".join(commits)])
    return table(["results/", "runs", "time of one core", "stored on", "commits"], lines)


def training(config: Mapping[str, Any]) -> str:
    """Describe how clients train, in a few words.

    >>> training({"local": {"steps": 5, "batch_size": "full"}, "data": {}, "model": {"name": "mlp"}})
    'mlp, 5 full-batch steps'
    """
    local, model = config["local"], config["model"]["name"]
    if local.get("epochs"):
        crops = ", random crops" if config["data"].get("augment") else ""
        return f"{model}, {local['epochs']} epochs of batches of {local['batch_size']}{crops}"
    kind = "full-batch steps" if local["batch_size"] == "full" else f"steps of {local['batch_size']}"
    return f"{model}, {local['steps']} {kind}"


def block(name: str) -> str:
    """Write the size and the table of one result."""
    run = result(name)
    assert run is not None, name
    (shown,) = result_tables(RunReport.of(run))
    for column in HIDDEN:
        shown = shown.without(column)
    head = [one_line(title) for title in shown.columns]
    lines = [[f"**{text}**" if bold else text for text, bold in row] for row in shown.rows]
    return f"{size(name, run)}\n\n{table(head, lines)}"


def skew() -> str:
    """Write Table 3 with a column for each kind and strength of the noise, what was published in brackets."""
    run = result("table3-skew")
    assert run is not None
    lines: dict[str, list[str]] = {}
    places: dict[str, None] = {}
    for row in RunReport.of(run).rows:
        places[f"{row.point['data.skew']}, α = {row.point['data.alpha']}"] = None
        theirs = f" ({100 * row.published.mean:.1f})" if row.published else ""
        score = f"**{percent(*row.score)}**" if "score" in row.best else percent(*row.score)
        lines.setdefault(row.algorithm, []).append(score + theirs)
    cells = [[f"`{name}`", *scores] for name, scores in lines.items()]
    return f"{size('table3-skew', run)}\n\n{table(['accuracy % (published)', *places], cells)}"


def theory() -> str:
    """Write what was measured of the paper's lemmas, with its figures."""
    run = result("theory")
    assert run is not None
    parts = [size("theory", run), formats.markdown(RunReport.of(run)).strip()]
    parts += [f"![{drawing.name}](results/{file})\n\n*{drawing.caption}*" for drawing, file in pictures("theory", run)]
    return "\n\n".join(parts)


def result(name: str) -> Run | None:
    """Read a file of results; None where it was not made yet."""
    path = ROOT / "results" / f"{name}.json"
    return stored_run(path) if path.exists() else None


def pictures(name: str, run: Run) -> Iterator[tuple[NamedFigure, str]]:
    """Write the figures of a result that the page shows, as PNG."""
    PICTURES.mkdir(exist_ok=True)
    for drawing in draw_all(run):
        if drawing.name in FIGURES:
            path = PICTURES / f"{name}-{drawing.name}.png"
            for axes in drawing.figure.axes:
                axes.tick_params(grid_color=FAINT_ON_PAPER)
            drawing.figure.savefig(path, dpi=110, facecolor="white", bbox_inches="tight", pad_inches=0.05)
            yield drawing, path.name


def size(name: str, run: Run) -> str:
    """Describe how large the run was and how long it took."""
    seconds = sum(trial.seconds or 0 for trial in run.trials)
    scale = "" if run.head["scale"] == "default" else f" --scale {run.head['scale']}"
    number, spent = len(run.trials), duration(seconds)
    took = f"{number} runs took {spent} of one core." if number > 1 else f"The run took {spent}."
    return f"`dfca run {name}{scale}`: {_size(run.config, name)}. {took}"


def paper_scale_of(name: str) -> Experiment:
    """Read a preset at the paper's scale."""
    recipe = "text" if "[recipe." in preset_text(name) else None
    return load_experiment(name, "paper", recipe=recipe)


def _size(config: Mapping[str, Any], name: str) -> str:
    data, model, local = config["data"], config["model"], config["local"]
    widths = f"{model.get('hidden')} hidden units" if model["name"] == "mlp" else f"channels {model.get('channels')}"
    samples = data.get("samples_per_client")
    seeds = config["seeds"] if isinstance(config["seeds"], int) else len(config["seeds"])
    parts = [
        f"{config['clients']} clients",
        f"{samples} samples each" if samples else "all samples",
        f"{config['rounds']} rounds, {training(config)} ({widths})",
        f"learning rate {local['learning_rate']:g}",
        f"p = {config['topology']['p']:g}" if name != "theory" else "",
        f"{seeds} seed{'s' if seeds > 1 else ''}",
    ]
    return ", ".join(part for part in parts if part)
