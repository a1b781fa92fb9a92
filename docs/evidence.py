"""Make the blocks and pictures of docs/results.md from results/*.json; `make docs` calls it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from writing import table

from dfca.experiment.load import Experiment, load_experiment, preset_text
from dfca.report import formats
from dfca.report.drawing import plots
from dfca.report.drawing.plots import NamedFigure
from dfca.report.paper import published
from dfca.report.paper.figures import draw_all
from dfca.report.results import stored_run
from dfca.report.rows import AlgorithmRow, RunReport
from dfca.report.wording import DASH, duration, percent
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
DETAILS = ("table3-skew", "figure-connectivity", "theory", "soft", "har", "forecast", "uneven")
SHOWN = {  # which figures of a result stand on the page
    "figure-connectivity": ("accuracy-against-topology.p", "graphs-against-topology.p"),
    "theory": ("contraction", "drift"),
}
NOT_YET = "*Not measured with the present code yet: `dfca run {name}`.*"


def blocks() -> dict[str, Callable[[], str]]:
    """Return the blocks of the page by name."""
    made: dict[str, Callable[[], str]] = {"paper": paper, "hour": hour}
    for name in DETAILS:
        made[name] = lambda name=name: block(name)  # type: ignore[misc]
    return made


def paper() -> str:
    """Put every cell of the paper's tables beside what was measured."""
    head = ["table", "data", "algorithm", "published %", "measured %", "difference", "clients", "training"]
    return table(head, [cells for row in PAPER for cells in _cells(row)])


def beside() -> str:
    """Put the measured cells beside the published ones, for README."""
    head = ["table", "data", "algorithm", "published %", "measured %", "difference", "clients"]
    lines = [cells[:-1] for row in PAPER for cells in _cells(row) if cells[4] != "not yet"]
    return table(head, lines)


def _cells(row: PaperRow) -> Iterator[list[str]]:
    theirs = published.published(row.preset, row.at)
    size = paper_scale_of(row.preset).config.clients
    for name, value in theirs.items():
        head = [row.table, row.data, f"`{name}`", f"{100 * value.mean:.1f}"]
        measured = _measured(row, name)
        if measured is None:
            yield [*head, "not yet", DASH, f"{size} → –", DASH]
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
    """Show the rows of the scale `hour` with what the first table leaves out, and who ran them on which commit."""
    lines, names = [], list(dict.fromkeys(file for row in PAPER for file in row.files))
    for name in names:
        run = result(name)
        for mine in () if run is None else RunReport.of(run).rows:
            if run is None or mine.partial:
                continue
            commits = {str(trial.get("commit") or run.environment.get("commit"))[:7] for trial in run.trials}
            lines.append(
                [
                    f"`dfca run {run.experiment} --scale hour -a {mine.algorithm}`",
                    percent(*mine.score),
                    percent(*mine.all_models),
                    percent(*mine.cluster_accuracy),
                    mine.lost,
                    duration(mine.seconds),
                    ", ".join(sorted(commits)),
                ]
            )
    head = ["command", "accuracy %", "all models %", "right cluster %", "lost a cluster", "time", "commit"]
    return table(head, lines)


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
    """Write the size, the table and the pictures of one result."""
    run = result(name)
    if run is None:
        return NOT_YET.format(name=name)
    parts = [size(name, run), formats.markdown(RunReport.of(run)).strip()]
    parts += [f"![{drawing.caption}](results/{file})" for drawing, file in pictures(name, run)]
    return "\n\n".join(parts)


def result(name: str) -> Run | None:
    """Read a file of results; None where it was not made yet."""
    path = ROOT / "results" / f"{name}.json"
    return stored_run(path) if path.exists() else None


def pictures(name: str, run: Run) -> Iterator[tuple[NamedFigure, str]]:
    """Write the figures of a result that the page shows, as PNG."""
    wanted = SHOWN.get(name, ())
    PICTURES.mkdir(exist_ok=True)
    for drawing in draw_all(run) if wanted else ():
        if drawing.name in wanted:
            path = PICTURES / f"{name}-{drawing.name}.png"
            for axes in drawing.figure.axes:
                axes.tick_params(grid_color=plots.FAINT_ON_PAPER)
            drawing.figure.savefig(path, dpi=110, facecolor="white", bbox_inches="tight", pad_inches=0.05)
            yield drawing, path.name


def size(name: str, run: Run) -> str:
    """Describe how large the run was, how long it took, and on which commits."""
    seconds = sum(trial.seconds or 0 for trial in run.trials)
    scale = "" if run.head["scale"] == "default" else f" --scale {run.head['scale']}"
    number, spent = len(run.trials), duration(seconds)
    took = f"{number} runs took {spent} of one busy core." if number > 1 else f"The run took {spent}."
    return f"`dfca run {name}{scale}`: {_size(run.config, name)}. {took} {measured_on(run)}"


def measured_on(run: Run) -> str:
    """Say which rows were measured on which commits."""
    commits: dict[str, dict[str, None]] = {}
    for trial in run.trials:
        known = trial.get("commit") or run.environment.get("commit")
        commits.setdefault(trial.algorithm, {})[str(known)[:7]] = None
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, known in commits.items():
        groups.setdefault(tuple(known), []).append(name)
    if len(groups) == 1:
        return f"Commit {' and '.join(next(iter(groups)))}."
    told = [f"{' and '.join(known)} ({listed(names)})" for known, names in groups.items()]
    return f"Commits {'; '.join(told)}."


def paper_scale_of(name: str) -> Experiment:
    """Read a preset at the paper's scale."""
    recipe = "text" if "[recipe." in preset_text(name) else None
    return load_experiment(name, "paper", recipe=recipe)


def listed(algorithms: Sequence[str]) -> str:
    """List algorithms as code."""
    return ", ".join(f"`{name}`" for name in algorithms)


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
        f"p = {config['topology']['p']:g}" if name not in ("figure-connectivity", "theory") else "",
        f"{seeds} seed{'s' if seeds > 1 else ''}",
    ]
    return ", ".join(part for part in parts if part)
