"""Make the blocks and pictures of docs/results.md from results/*.json; `make docs` calls it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from writing import table

from dfca.experiment.load import load_experiment
from dfca.paired import pair_up, paired
from dfca.report import formats, plots
from dfca.report.paper.figures import draw_all
from dfca.report.plots import Drawing
from dfca.report.results import stored_run
from dfca.report.rows import summary_rows
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
CONTROLLED = ("quickstart", "soft", "har", "forecast", "table2-femnist")
"""Results with the rows that take a difference apart: one model with all else that dfca has, and dfca without it."""
ONE_MODEL, PLAIN = "dfedavgm + last step", "dfca, plain"
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
    seconds = sum(row.get("seconds") or 0 for row in run.summary["runs"])
    took = f"{len(run.summary['runs'])} runs took {duration(seconds)}, one after the other, on a busy machine."
    return f"`dfca run {name}`: {_size(run.config, name)}. {took}\n\n{formats.markdown(run.summary).strip()}"


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
    parts = [size(name, run), formats.markdown(run.summary).strip()]
    parts += [f"![{drawing.caption}](results/{file})" for drawing, file in pictures(stored_as or name, run)]
    return "\n\n".join(parts)


def result(name: str) -> Run | None:
    """Read a file of results; None where it was not made yet."""
    path = ROOT / "results" / f"{name}.json"
    return stored_run(path) if path.exists() else None


def pictures(name: str, run: Run) -> Iterator[tuple[Drawing, str]]:
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
    paper = load_experiment(name, "paper").config.values()
    seconds = sum(row.get("seconds") or 0 for row in run.summary["runs"])
    finished, asked = run.trial_counts
    partly = "" if finished == asked else f" **{finished} of {asked} runs are finished.**"
    ours, theirs = _size(run.config, name), _size(paper, name)
    whose = "At paper scale" if name in ("har", "theory") else "The paper"
    number, spent = len(run.summary["runs"]), duration(seconds)
    took = f"{number} runs took {spent}, one after the other," if number > 1 else f"The run took {spent}"
    took += " on a busy machine."
    return f"`dfca run {name} --scale {run.summary['scale']}`: {ours}. {whose}: {theirs}. {took}{partly}"


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
    """Take the difference between dfca and one model apart: what is clustering, what the last step, what momentum."""
    head = ["result", "`dfca` − `dfedavgm`", "of it clustering", "of it the last step", "`dfca` − itself, plain"]
    lines = []
    for name in CONTROLLED:
        run = result(name)
        rows = [] if run is None else summary_rows(run.summary)
        for label in dict.fromkeys(row["label"] for row in rows):
            at = {row["algorithm"]: row for row in rows if row["label"] == label and row["accuracy_mean"] is not None}
            if not {"dfca", ONE_MODEL, PLAIN} <= at.keys():
                continue
            pairs = ("dfca", "dfedavgm"), ("dfca", ONE_MODEL), (ONE_MODEL, "dfedavgm"), ("dfca", PLAIN)
            unit = "" if at["dfca"]["metric"].name == "accuracy" else f" ({at['dfca']['metric'].name})"
            where = name + unit + (f", {label}" if label else "")
            lines.append([where, *(_gap(at, one, other) for one, other in pairs)])
    return table(head, lines)


def claims() -> str:
    """Put the paper's claims beside the measurements, one line per result."""
    head = ["result", "gi − ifca", "li − ifca", "gi, li − dfedavgm", "gi, li − fedspd", "right cluster: dfca, dfca-fi"]
    head += ["lost a cluster: gi, li, ifca", "local … oracle"]
    lines = []
    for name in TABLES:
        run = result(name)
        if run is None:
            continue
        rows = summary_rows(run.summary)
        for label in dict.fromkeys(row["label"] for row in rows):
            at = {row["algorithm"]: row for row in rows if row["label"] == label and row["accuracy_mean"] is not None}
            where = f"{name}" + (f", {label.replace('data.', '')}" if label else "")
            lines.append([where, *_claims(at)])
    note = f"{DIVERGED} the training of one of the two diverged: the gap says nothing about the methods."
    return table(head, lines) + f"\n\n{note}" if lines else NOT_YET.format(name="table1-mnist")


def _gap(at: Mapping[str, Mapping[str, Any]], one: str, other: str) -> str:
    """Write the difference of two rows, paired by seed."""
    pairs = pair_up(at[one]["scores"], at[other]["scores"]) if one in at and other in at else None
    if pairs is None:
        return "–"
    found, failed = paired(pairs), any(at[name]["diverged_runs"] for name in (one, other))
    return at[one]["metric"].signed(found.mean, found.half, at[one]["accuracy_mean"]) + (DIVERGED if failed else "")


def _claims(at: Mapping[str, Mapping[str, Any]]) -> list[str]:
    def both(other: str) -> str:
        return f"{_gap(at, 'dfca-gi', other)}, {_gap(at, 'dfca-li', other)}" if other in at else "–"

    def texts(names: Sequence[str], write: Callable[[Mapping[str, Any]], str]) -> str:
        return ", ".join(write(at[name]) for name in names if name in at) or "–"

    return [
        _gap(at, "dfca-gi", "ifca"),
        _gap(at, "dfca-li", "ifca"),
        both("dfedavgm"),
        both("fedspd"),
        texts(("dfca", "dfca-fi"), lambda row: percent(row["cluster_accuracy_mean"])),
        texts(("dfca-gi", "dfca-li", "ifca"), lambda row: row["lost"]),
        " … ".join(percent(at[name]["accuracy_mean"]) for name in ("local", "oracle") if name in at),
    ]


def skew() -> str:
    """Show the order of the three per point, and in how many runs a cluster was lost, or all were found."""
    run = result("table3-skew")
    if run is None:
        return NOT_YET.format(name="table3-skew")
    rows, lines = summary_rows(run.summary), []
    names = ("dfca-gi", "dfca-li", "ifca")
    for label in dict.fromkeys(row["label"] for row in rows):
        at = {row["algorithm"]: row for row in rows if row["label"] == label and row["algorithm"] in names}
        ours = sorted(at, key=lambda name: -at[name]["accuracy_mean"])
        theirs = sorted(at, key=lambda name: -at[name]["published_mean"])
        lost = ", ".join(f"{name} {at[name]['lost']}" for name in names if name in at)
        found = ", ".join(f"{name} {at[name]['found']}" for name in names if name in at)
        lines.append([label.replace("data.", ""), " > ".join(ours), " > ".join(theirs), lost, found])
    head = ["point", "order, measured", "order, published", "runs that lost a cluster", "runs that found all clusters"]
    return table(head, lines)


def beside(name: str) -> str:
    """Put the accuracy of each algorithm beside the published one."""
    run = result(name)
    if run is None:
        return NOT_YET.format(name=name)
    rows = [row for row in summary_rows(run.summary) if row["accuracy_mean"] is not None]
    paper = load_experiment(name, "paper").config.values()
    lines = []
    for what, config, key in (("measured", run.config, "accuracy"), ("published", paper, "published")):
        values = [percent(row[f"{key}_mean"], row[f"{key}_std"]) for row in rows]
        units = f"{config['model']['hidden']} units"
        lines.append([f"{what}: {config['clients']} clients, {units}", *values])
    return table(["accuracy %", *(f"`{row['algorithm']}`" for row in rows)], lines)
