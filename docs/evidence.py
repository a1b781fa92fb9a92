"""Make the blocks and pictures of docs/results.md from results/*.json; `make docs` calls it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from writing import Place, table

from dfca.base.paired import BEYOND_CHANCE, beyond_chance, family_of, intervals_line, pair_up, paired
from dfca.experiment.config import flatten
from dfca.experiment.load import Experiment, load_experiment, preset_text
from dfca.report import formats
from dfca.report.drawing import plots
from dfca.report.drawing.plots import NamedFigure
from dfca.report.paper import published
from dfca.report.paper.figures import draw_all
from dfca.report.results import stored_run
from dfca.report.rows import AlgorithmRow, MeanStd, RunReport
from dfca.report.statistics import DIVERGED
from dfca.report.wording import duration, percent
from dfca.runs.store.reading import Run

ROOT = Path(__file__).parent.parent
PICTURES = ROOT / "docs" / "results"
TABLES = (
    "table1-mnist",
    "table1-emnist",
    "table1-cifar10",
    "table2-mnist",
    "table2-emnist",
    "table2-femnist",
    "table3-skew",
    "table4-femnist-k",
    "har",
)
PAPER_SCALE = "table1-mnist-paper"
BRIDGED = ("table1-emnist", "table1-cifar10", "table4-femnist-k")
CONTROLLED = (
    "quickstart", "soft", "har", "forecast", "table1-mnist", "table1-emnist", "table1-cifar10", "table2-mnist",
    "table2-emnist", "table2-femnist", "table4-femnist-k",
)  # fmt: skip
"""Results with rows that take a difference apart: one model with the rest of dfca-auto, and dfca-auto without it."""
ONE_MODEL, PLAIN = "dfedavgm + last step", "dfca-auto, plain"
SHOWN = {  # which figures of a result stand on the page
    "table1-mnist": ("accuracy-by-round", "cluster-accuracy-by-round"),
    "table2-emnist": ("accuracy-by-round", "cluster-accuracy-by-round"),
    "table3-skew": (
        "accuracy-by-round-data.skew-consistent-data.alpha-0.8",
        "cluster-accuracy-by-round-data.skew-consistent-data.alpha-0.8",
        "accuracy-by-round-data.skew-inconsistent-data.alpha-0.8",
        "cluster-accuracy-by-round-data.skew-inconsistent-data.alpha-0.8",
    ),
    "table4-femnist-k": ("accuracy-by-round-clusters-3", "accuracy-by-round-clusters-10"),
    "figure-connectivity": (
        "accuracy-against-topology.p",
        "all-models-accuracy-against-topology.p",
        "graphs-against-topology.p",
    ),
    "theory": ("contraction", "drift"),
    PAPER_SCALE: ("accuracy-by-round", "cluster-accuracy-by-round"),
}
PRESETS = (*TABLES, "figure-connectivity", "theory")
NOT_YET = (
    "*Not measured yet: `dfca run {name} --scale desk`, then `dfca report runs/{name} --save results/{name}.json`.*"
)


def blocks() -> dict[str, Callable[[], str]]:
    """Return the blocks of the page by name."""
    made: dict[str, Callable[[], str]] = {"claims": claims, "skew": skew, "paper-scale": paper_scale}
    made |= {"causes": causes, "soft": lambda: one_scale("soft"), "forecast": lambda: one_scale("forecast")}
    for name in PRESETS:
        made[name] = lambda name=name: block(name)  # type: ignore[misc]
    for name in BRIDGED:
        made[f"{name}-scales"] = lambda name=name: scales(name)  # type: ignore[misc]
    return made


def block(name: str) -> str:
    """Write the size, the table and the pictures of one result."""
    run = result(name)
    if run is None:
        return NOT_YET.format(name=name)
    return described(name, run)


def one_scale(name: str) -> str:
    """Write the size and the table of a result that has one scale."""
    run = result(name)
    if run is None:
        return NOT_YET.format(name=name).replace(" --scale desk", "")
    seconds = sum(trial.seconds or 0 for trial in run.trials)
    took = f"{len(run.trials)} runs took {duration(seconds)}, one after the other, on a busy machine."
    head = " ".join([f"`dfca run {name}`: {_size(run.config, name)}. {took}", *measured_on(run)])
    return f"{head}\n\n{formats.markdown(RunReport.of(run)).strip()}"


def paper_scale() -> str:
    """Show the runs of Table 1 on MNIST that were made at the paper's own size."""
    run = result(PAPER_SCALE)
    if run is None:
        return (
            "*Not finished yet: `dfca run table1-mnist --scale paper --algorithms dfca-gi --seeds 1`, "
            f"then `dfca report runs/table1-mnist --save results/{PAPER_SCALE}.json`.*"
        )
    return described("table1-mnist", run, PAPER_SCALE)


def described(name: str, run: Run, stored_as: str = "") -> str:
    """Write the size, the table and the pictures of runs of an experiment; stored_as: their file, if not its name."""
    parts = [size(name, run), formats.markdown(RunReport.of(run)).strip()]
    parts += [f"![{drawing.caption}](results/{file})" for drawing, file in pictures(stored_as or name, run)]
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
    """Describe how large the run was and how large the paper's is."""
    paper = paper_scale_of(name).config.values()
    seconds = sum(trial.seconds or 0 for trial in run.trials)
    finished, asked = run.trial_counts
    partly = "" if finished == asked else f" **{finished} of {asked} runs are finished.**"
    ours, theirs = _size(run.config, name), _size(paper, name)
    whose = "At paper scale" if name in ("har", "theory") else "The paper"
    number, spent = len(run.trials), duration(seconds)
    took = f"{number} runs took {spent}, one after the other," if number > 1 else f"The run took {spent}"
    took += " on a busy machine."
    parts = [f"`dfca run {name} --scale {run.head['scale']}`: {ours}.", f"{whose}: {theirs}.", f"{took}{partly}"]
    return " ".join([*parts, *measured_on(run)])


def measured_on(run: Run) -> list[str]:
    """Say which rows were measured on which commits, where they differ; older rows do not know theirs."""
    commits: dict[str, dict[str, None]] = {}
    for trial in run.trials:
        known = trial["commit"][:7] if trial.get("commit") else "earlier code"
        commits.setdefault(trial.algorithm, {})[known] = None
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, known in commits.items():
        groups.setdefault(tuple(known), []).append(name)
    if len(groups) < 2:
        return []
    told = [f"{listed(names)} on {' and '.join(known)}" for known, names in groups.items()]
    return [f"Measured: {'; '.join(told)}."]


def paper_scale_of(name: str) -> Experiment:
    """Read a preset at the paper's scale, trained as the paper's text says, which is what was measured."""
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
        f"{config['rounds']} rounds of {local['steps']} steps",
        f"learning rate {local['learning_rate']:g}",
        f"{model['name']} ({widths})",
        f"p = {config['topology']['p']:g}" if name not in ("figure-connectivity", "theory") else "",
        f"{seeds} seed{'s' if seeds > 1 else ''}",
    ]
    return ", ".join(part for part in parts if part)


def causes() -> str:
    """Split the difference between dfca-auto and one model into clustering, the last step and momentum."""
    columns = {
        "`dfca-auto` − `dfedavgm`": ("dfca-auto", "dfedavgm"),
        "of it clustering": ("dfca-auto", ONE_MODEL),
        "of it the last step": (ONE_MODEL, "dfedavgm"),
        "`dfca-auto` − itself, plain": ("dfca-auto", PLAIN),
    }
    gaps = Gaps()
    for name in CONTROLLED:
        for label, at in _scored(name).items():
            if not {"dfca-auto", ONE_MODEL} <= at.keys():
                continue
            metric = at["dfca-auto"].metric.name
            unit = "" if metric == "accuracy" else f" ({metric})"
            where = name + unit + (f", {label}" if label else "")
            for column, (one, other) in columns.items():
                gaps.add((where, column), at, one, other)
    cells, line = gaps.write()
    lines = [[row, *(cells[row, column] for column in columns)] for row in dict.fromkeys(row for row, _ in cells)]
    return table(["result", *columns], lines) + f"\n\n{line}"


def _scored(name: str) -> dict[str, dict[str, AlgorithmRow]]:
    """Return the rows of a result that have a score, by point and algorithm; none where it was not made yet."""
    run = result(name)
    by_label: dict[str, dict[str, AlgorithmRow]] = {}
    for row in () if run is None else RunReport.of(run).rows:
        if row.score.mean is not None:
            by_label.setdefault(row.label, {})[row.algorithm] = row
    return by_label


def claims() -> str:
    """Put the paper's claims beside the measurements, one line per result."""
    pairs = [(one, other) for other in ("ifca", "dfedavgm", "fedspd") for one in ("dfca-gi", "dfca-li")]
    titles = {(one, other): f"{one.removeprefix('dfca-')} − {other}" for one, other in pairs}
    gaps, ends = Gaps(), {}
    for name in TABLES:
        for label, at in _scored(name).items():
            where = f"{name}" + (f", {label.replace('data.', '')}" if label else "")
            for (one, other), title in titles.items():
                gaps.add((where, title), at, one, other)
            ends[where] = _claims(at)
    if not ends:
        return NOT_YET.format(name="table1-mnist")
    cells, line = gaps.write()
    head = [
        "result",
        *titles.values(),
        "right cluster: dfca-auto, dfca-fi",
        "lost a cluster: gi, li, ifca",
        "local … oracle",
    ]
    lines = [[where, *(cells[where, title] for title in titles.values()), *end] for where, end in ends.items()]
    notes = [line]
    if any(DIVERGED in cell for cell in cells.values()):
        notes.append(f"{DIVERGED} the training of one of the two diverged: the gap says nothing about the methods")
    return table(head, lines) + "\n\n" + "  \n".join(notes)


class Gaps:
    """Differences of pairs of rows, paired by seed: written when all are there, for their intervals hold together."""

    def __init__(self) -> None:
        self._pairs: dict[Place, tuple[list[float], AlgorithmRow, bool]] = {}
        self._places: list[Place] = []

    def add(self, place: Place, at: Mapping[str, AlgorithmRow], one: str, other: str) -> None:
        """Take the difference of two rows of a table; at: its rows by algorithm."""
        self._places.append(place)
        if one in at and other in at and (pairs := pair_up(at[one].scores, at[other].scores)) is not None:
            self._pairs[place] = pairs, at[one], any(at[name].diverged_runs for name in (one, other))

    def write(self) -> tuple[dict[Place, str], str]:
        """Return the cell of each place, and the line that says how to read them."""
        family = family_of(pairs for pairs, _, failed in self._pairs.values() if not failed)
        cells = dict.fromkeys(self._places, "–")
        for place, (pairs, row, failed) in self._pairs.items():
            difference = paired(pairs, family)
            mark = DIVERGED if failed else BEYOND_CHANCE if beyond_chance(difference, family) else ""
            cells[place] = row.metric.signed(difference.mean, difference.half, row.score.mean) + mark
        return cells, f"Differences are paired by seed, {intervals_line(family)}"


def _claims(at: Mapping[str, AlgorithmRow]) -> list[str]:
    def texts(names: Sequence[str], write: Callable[[AlgorithmRow], str]) -> str:
        return ", ".join(write(at[name]) for name in names if name in at) or "–"

    return [
        texts(("dfca-auto", "dfca-fi"), lambda row: percent(row.cluster_accuracy.mean)),
        texts(("dfca-gi", "dfca-li", "ifca"), lambda row: row.lost),
        " … ".join(percent(at[name].score.mean) for name in ("local", "oracle") if name in at),
    ]


def skew() -> str:
    """Show the order of the three per point, and in how many runs a cluster was lost, or all were found."""
    run = result("table3-skew")
    if run is None:
        return NOT_YET.format(name="table3-skew")
    lines, names = [], ("dfca-gi", "dfca-li", "ifca")
    for label, rows in _scored("table3-skew").items():
        at = {name: row for name, row in rows.items() if name in names}
        ours = sorted(at, key=lambda name: -(at[name].score.mean or 0.0))
        theirs = sorted(at, key=lambda name: -(at[name].published or MeanStd(0.0)).mean)
        lost = ", ".join(f"{name} {at[name].lost}" for name in names if name in at)
        found = ", ".join(f"{name} {at[name].found}" for name in names if name in at)
        lines.append([label.replace("data.", ""), " > ".join(ours), " > ".join(theirs), lost, found])
    head = ["point", "order, measured", "order, published", "runs that lost a cluster", "runs that found all clusters"]
    return table(head, lines)


def scales(name: str) -> str:
    """Put the accuracies of the paper, of bridge and of desk scale side by side, and name what differs between them."""
    (bridge,), paper = load_experiment(name, "bridge").points, paper_scale_of(name).points
    at = bridge.at or {}
    theirs = next(point.config for point in paper if point.config.clusters == bridge.config.clusters)
    runs, shown = {"bridge": result(f"{name}-bridge"), "desk": result(name)}, bridge.config.algorithms
    known = published.published(name, at)
    lines = [["paper", str(theirs.clients), *(percent(*known[name]) if name in known else "–" for name in shown)]]
    for scale, run in runs.items():
        rows = () if run is None else RunReport.of(run).rows
        done = {row.algorithm: row for row in rows if row.point == at and not row.partial}
        cells = [percent(*done[name].score) if name in done else "–" for name in shown]
        config = load_experiment(name, scale).config if run is None else None
        lines.append([scale, str(config.clients if config else run.config["clients"]), *cells])  # type: ignore[union-attr]
    where = f" ({', '.join(f'{key} = {value}' for key, value in at.items())})" if at else ""
    notes = [f"accuracy %{where}; –: not published, or not measured", _bridged(name, runs["bridge"], len(shown))]
    ends = {"paper": theirs.values(), "bridge": bridge.config.values()}
    ends["desk"] = next(p.config.values() for p in load_experiment(name, "desk").points if (p.at or {}) == at)
    notes += [_steps(one, other, ends) for one, other in (("paper", "bridge"), ("bridge", "desk"))]
    return table(["scale", "clients", *(f"`{name}`" for name in shown)], lines) + "\n\n" + "  \n".join(notes)


def _bridged(name: str, run: Run | None, asked: int) -> str:
    """Say how many trials of bridge scale are finished, and in which state of training they ended."""
    command = f"`dfca run {name} --scale bridge`"
    if run is None:
        return f"{command}: none of {asked} trials is finished"
    done = [trial for trial in run.trials if trial.finished]
    seeds = len({trial.seed for trial in done})
    took = duration(sum(trial.seconds or 0 for trial in done))
    losses = ", ".join(f"`{trial.algorithm}` {trial.train_loss:.2f}" for trial in done if trial.train_loss is not None)
    spread = "one seed, so there are no intervals" if seeds == 1 else f"{seeds} seeds"
    many = max(asked, run.trial_counts[1])
    counted = f"{len(done)} of {many} trials are finished, in {took} on a busy machine; {spread}"
    return f"{command}: {counted}. Training losses at the end: {losses}"


def _steps(one: str, other: str, ends: Mapping[str, Mapping[str, Any]]) -> str:
    """Name the keys in which two scales differ, without those of evaluation and of the list of algorithms."""
    ours, theirs = flatten(ends[one]), flatten(ends[other])
    hidden: tuple[str, ...] = ("algorithm", "seeds", "title", "description", "evaluation", "data.test")
    if other == "bridge":
        hidden += ("data.samples_per_client",)  # by its rule as many as in the paper; tests/test_bridge.py holds it
    keys = [key for key in theirs if ours.get(key) != theirs[key] and not key.startswith(hidden)]
    told = ", ".join(f"{key} {_value(ours.get(key))} → {_value(theirs[key])}" for key in keys)
    return f"{one} → {other}: {told or 'nothing'}"


def _value(value: Any) -> str:
    return "all" if value is None else str(value)


def beside(name: str) -> str:
    """Put the accuracy of each algorithm beside the published one."""
    run = result(name)
    if run is None:
        return NOT_YET.format(name=name)
    rows = [row for row in RunReport.of(run).rows if row.score.mean is not None]
    paper = paper_scale_of(name).config.values()
    ours, theirs = [percent(*row.score) for row in rows], [percent(*(row.published or MeanStd())) for row in rows]
    lines = []
    for what, config, values in (("measured", run.config, ours), ("published", paper, theirs)):
        units = f"{config['model']['hidden']} units"
        lines.append([f"{what}: {config['clients']} clients, {units}", *values])
    return table(["accuracy %", *(f"`{row.algorithm}`" for row in rows)], lines)
