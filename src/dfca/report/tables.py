"""The results of a run as tables: rows of numbers, and from them sheets of text for people.

    summary.json, or a file of saved results -> rows -> sheets -> formats

Means are over the finished runs of an algorithm (at a point, in a sweep); where none is finished, over what there is so
far, and the row says so. `±` is the sample standard deviation over seeds.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from statistics import fmean, stdev
from typing import Any, Literal, NamedTuple

from dfca.experiment.sweep import write
from dfca.report.paper import published

DASH = "–"
MEASURES = ("accuracy", "all_models_accuracy", "cluster_accuracy")
ALL_FOUND = 0.999  # a cluster accuracy from which on every client is in the right cluster
DISPENSABLE = ("talks to", "MB per client", "time per run", "runs")


class Kind(NamedTuple):
    """What the reader of a table has to know of an algorithm."""

    via: Literal["neighbours", "server", "nobody"]
    informed: bool  # told the true clusters: a ceiling, no method
    about: str
    models: Literal["clusters", "one"] | None = None
    elects: bool = False  # its clients elect the start, and find k where it is not given


class Column(NamedTuple):
    """A column of the tables for people."""

    title: str
    cell: Callable[[dict[str, Any]], str]
    measure: str = ""  # the best of the decentralised is set in bold
    words: bool = False  # set to the left


class Entry(NamedTuple):
    """One text of a sheet."""

    text: str
    bold: bool = False


class Sheet(NamedTuple):
    """A table of texts, the same for every format for people. Titles of columns may have two lines."""

    title: str
    columns: list[str]
    words: list[bool]  # which columns are words, set to the left
    rows: list[list[Entry]]
    faint: list[bool]  # which rows have no finished run

    @property
    def width(self) -> int:
        """Count the characters of a line, a blank on both sides of each column."""
        texts = ([*title.split("\n"), *(row[i].text for row in self.rows)] for i, title in enumerate(self.columns))
        return sum(2 + max(map(len, column)) for column in texts)


def kind_of(algorithm: str) -> Kind:
    """Look an algorithm up; one that is not registered (a user's own) counts as decentralised."""
    from dfca.algorithms import ALGORITHMS

    if algorithm not in ALGORITHMS:
        return Kind("neighbours", False, "")
    make = ALGORITHMS[algorithm]
    record = make()
    via: dict[str, Literal["neighbours", "server", "nobody"]] = {"gossip": "neighbours", "server": "server"}
    about = (inspect.getdoc(make) or "").split("\n")[0]
    return Kind(
        via.get(record.exchange, "nobody"), record.informed, about, record.models, elects=record.start == "elected"
    )


# --- numbers


def summary_rows(summary: Mapping[str, Any], clients: int | None = None) -> list[dict[str, Any]]:
    """Make one row per algorithm, in a sweep per point and algorithm, in the order of the points and runs.

    Keys: point (what varies, with its value), label, algorithm, via, informed, runs (finished), unfinished, failed,
    partial (no run is finished), accuracy_mean, accuracy_std and so on for all_models_accuracy and cluster_accuracy,
    found ("19 of 20" runs put every client into its cluster), found_runs, found_of, lost ("3 of 6", or a dash where one
    model cannot lose a cluster), lost_runs, k and k_right (where the clients find k), seconds, megabytes_per_client,
    start_megabytes_per_client, accuracy_per_gigabyte, published_mean, published_std (accuracies of the paper, 0..1),
    difference_points (ours minus the paper's), best (the measures in which no other algorithm that talks to neighbours
    is better). What is not known is None. `clients` is needed for the megabytes, unless the summary holds it.
    """
    experiment = str(summary.get("experiment", ""))
    if "points" not in summary:
        point = {**summary, "clients": clients or summary.get("clients")}
        return _rows_of_point(summary["runs"], point, experiment)
    groups = [[run for run in summary["runs"] if run.get("digest") == point["digest"]] for point in summary["points"]]
    return [
        row
        for point, group in zip(summary["points"], groups, strict=True)
        for row in _rows_of_point(group, point, experiment)
    ]


def varying(summary: Mapping[str, Any]) -> list[str]:
    """Name the keys that vary in a sweep, in the order in which the points name them; those of the grid last."""
    points = [point["point"] for point in summary.get("points", ())]
    return sorted(dict.fromkeys(key for at in points for key in at), key=lambda key: all(key in at for at in points))


def counts(summary: Mapping[str, Any]) -> tuple[int, int]:
    """Count the finished cells of a sweep and those asked for or begun."""
    finished = asked = 0
    for point in summary["points"]:
        runs = [run for run in summary["runs"] if run.get("digest") == point["digest"]]
        cells = {(name, seed) for name in point["algorithms"] for seed in point["seeds"]}
        asked += len(cells | {(run["algorithm"], run["seed"]) for run in runs})
        finished += sum(bool(run.get("finished")) for run in runs)
    return finished, asked


def _rows_of_point(
    runs: Sequence[Mapping[str, Any]], point: Mapping[str, Any], experiment: str
) -> list[dict[str, Any]]:
    groups: dict[str, list[Mapping[str, Any]]] = {name: [] for name in point.get("algorithms", ())}
    for run in runs:
        groups.setdefault(run["algorithm"], []).append(run)
    rows = [_row(algorithm, group, point) for algorithm, group in groups.items() if group]
    known = published.published(experiment, point.get("point", {}))
    for row in rows:
        theirs, ours = known.get(row["algorithm"]), row["accuracy_mean"]
        row["published_mean"], row["published_std"] = theirs or (None, None)
        row["difference_points"] = None if theirs is None or ours is None else 100 * (ours - theirs.mean)
    _mark_best(rows)
    return rows


def _row(algorithm: str, runs: Sequence[Mapping[str, Any]], point: Mapping[str, Any]) -> dict[str, Any]:
    kind = kind_of(algorithm)
    finished = [run for run in runs if run.get("finished")]
    counted = finished or [run for run in runs if run.get("accuracy") is not None]
    clients = point.get("clients")
    row: dict[str, Any] = {
        "point": point.get("point", {}),
        "label": point.get("label", ""),
        "algorithm": algorithm,
        "via": kind.via,
        "informed": kind.informed,
        "runs": len(finished),
        "unfinished": len(runs) - len(finished),
        "failed": sum(bool(run.get("error")) for run in runs),
        "partial": not finished,
    }
    for measure in MEASURES:
        row[f"{measure}_mean"], row[f"{measure}_std"] = mean_std(counted, measure)
    keepers = [run for run in counted if models_of(run) > 1 and run.get("live_clusters") is not None]
    lost = sum(run["live_clusters"] < run["clusters"] for run in keepers)
    row["lost_runs"] = lost if keepers else None
    row["lost"] = f"{lost} of {len(keepers)}" if keepers else DASH
    told = [run for run in counted if run.get("cluster_accuracy") is not None]
    row["found_runs"], row["found_of"] = (sum(map(all_found, told)), len(told)) if told else (None, None)
    row["found"] = f"{row['found_runs']} of {len(told)}" if told else DASH
    guesses = [models_of(run) for run in counted] if point.get("auto") and kind.elects else []
    right = sum(models_of(run) == run.get("clusters") for run in counted)
    row["k"] = _span(guesses) if guesses else DASH
    row["k_right"] = f"{right} of {len(guesses)}" if guesses and told else DASH
    row["seconds"] = mean_std(counted, "seconds")[0]
    for key, name in (("bytes_sent", "megabytes_per_client"), ("start_bytes", "start_megabytes_per_client")):
        sent = mean_std(counted, key)[0]
        row[name] = sent / clients / 1e6 if sent is not None and clients else None
    row["accuracy_per_gigabyte"] = mean_std(counted, "accuracy_per_gigabyte")[0]
    row["best"] = ()
    return row


def all_found(run: Mapping[str, Any]) -> bool:
    """Tell whether a run put every client into its cluster."""
    return float(run["cluster_accuracy"]) >= ALL_FOUND


def _span(values: Sequence[int]) -> str:
    return f"{min(values)}" if min(values) == max(values) else f"{min(values)}–{max(values)}"


def models_of(run: Mapping[str, Any]) -> int:
    """Count the models that a client keeps in a run; where the run does not say, the algorithm does."""
    if run.get("models") is not None:
        return int(run["models"])
    models = kind_of(run["algorithm"]).models or ("one" if run.get("cluster_accuracy") is None else "clusters")
    return int(run.get("clusters") or 1) if models == "clusters" else 1


def mean_std(runs: Sequence[Mapping[str, Any]], key: str) -> tuple[float | None, float | None]:
    """Take the mean and the sample standard deviation over runs, None where there are none, or one."""
    values = [float(run[key]) for run in runs if run.get(key) is not None]
    if not values:
        return None, None
    return fmean(values), stdev(values) if len(values) > 1 else None


def _mark_best(rows: list[dict[str, Any]]) -> None:
    """Mark the best mean of each measure, to the digit shown, among the finished algorithms that gossip.

    Who is told the truth or talks to nobody is a bound, not a rival.
    """
    rivals = [row for row in rows if row["via"] == "neighbours" and not row["informed"] and not row["partial"]]
    for measure in MEASURES:
        shown = {
            id(row): round(100 * row[f"{measure}_mean"], 1) for row in rivals if row[f"{measure}_mean"] is not None
        }
        if len(shown) < 2:
            continue
        for row in rivals:
            if shown.get(id(row)) == max(shown.values()):
                row["best"] = (*row["best"], measure)


# --- sheets


def sheets(summary: Mapping[str, Any], clients: int | None = None, width: int | None = None) -> list[Sheet]:
    """Make the tables for people, no wider than `width` characters as far as leaving columns out allows.

    Without a sweep: one row per algorithm. With one varying key: a table per measure, values down and algorithms
    across. With several keys, or where that is too wide: one row per point and algorithm; and where that is too wide
    too, a table per point.
    """
    from dfca.report.virtual_tables import virtual_sheets

    return [*_sheets(summary, clients, width), *virtual_sheets(summary, width)]


def _sheets(summary: Mapping[str, Any], clients: int | None, width: int | None) -> list[Sheet]:
    rows = summary_rows(summary, clients)
    keys = varying(summary)
    if "points" in summary and len(keys) == 1 and len({row["algorithm"] for row in rows}) > 1:
        crossed = _crossed(rows, keys[0])
        if width is None or all(sheet.width <= width for sheet in crossed):
            return crossed
    whole = _fitted(rows, keys, "points" in summary, width)
    if not keys or width is None or whole.width <= width:
        return [whole]
    labels = dict.fromkeys(row["label"] for row in rows)
    groups = {label: [row for row in rows if row["label"] == label] for label in labels}
    return [_fitted(group, (), True, width)._replace(title=label) for label, group in groups.items()]


def _fitted(rows: Sequence[dict[str, Any]], keys: Sequence[str], swept: bool, width: int | None) -> Sheet:
    """List the rows, without the columns that matter least where it would be too wide."""
    columns = _columns(rows, keys, swept)
    for dispensable in DISPENSABLE:
        if width is not None and _listed(rows, columns, keys).width > width:
            columns = [column for column in columns if one_line(column.title) != dispensable]
    return _listed(rows, columns, keys)


def _crossed(rows: Sequence[dict[str, Any]], key: str) -> list[Sheet]:
    """Make a sheet per measure: values of the key down, algorithms across."""
    names = list(dict.fromkeys(row["algorithm"] for row in rows))
    at: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        at.setdefault(write(row["point"].get(key, DASH)), {})[row["algorithm"]] = row
    measures: list[tuple[str, str, Callable[[dict[str, Any]], str]]] = [
        ("accuracy %", "accuracy", _measure("accuracy")),
        ("accuracy %, published", "", _published),
        ("difference in points", "", _difference),
        ("all models %", "all_models_accuracy", _measure("all_models_accuracy")),
        ("right cluster %", "cluster_accuracy", _measure("cluster_accuracy")),
        ("all clusters found", "", lambda row: row["found"]),
        ("k found", "", lambda row: row["k"]),
        ("runs with the right k", "", lambda row: row["k_right"]),
        ("MB per client", "", lambda row: megabytes(row["megabytes_per_client"])),
    ]
    made = []
    for title, measure, cell in measures:
        shown = [name for name in names if any(cell(r[name]) not in (DASH, "0") for r in at.values() if name in r)]
        if not shown:
            continue
        body = [
            [Entry(value)]
            + [
                Entry(cell(across[name]) + ("*" if across[name]["partial"] else ""), measure in across[name]["best"])
                if name in across
                else Entry(DASH)
                for name in shown
            ]
            for value, across in at.items()
        ]
        made.append(Sheet(title, [key, *shown], [True] + [False] * len(shown), body, [False] * len(body)))
    return made


def _listed(rows: Sequence[dict[str, Any]], columns: Sequence[Column], keys: Sequence[str]) -> Sheet:
    """Make a sheet of one line per row; what a line shares with the one above is not repeated."""
    body: list[list[Entry]] = []
    before = None
    for row in rows:
        line = [Entry(column.cell(row), column.measure in row["best"]) for column in columns]
        if keys and row["label"] == before:
            line[: len(keys)] = [Entry("")] * len(keys)
        before = row["label"]
        body.append(line)
    faint = [bool(row["partial"]) for row in rows]
    return Sheet("", [column.title for column in columns], [column.words for column in columns], body, faint)


def _columns(rows: Sequence[Mapping[str, Any]], keys: Sequence[str], swept: bool) -> list[Column]:
    def at(key: str) -> Callable[[dict[str, Any]], str]:
        return lambda row: write(row["point"][key]) if key in row["point"] else ""

    found, lost = "all clusters\nfound", "lost a\ncluster"
    columns = [
        *(Column(key.replace(".", ".\n") if len(key) > 12 else key, at(key), words=True) for key in keys),
        Column("algorithm", lambda row: row["algorithm"] + ("*" if row["partial"] else ""), words=True),
        Column("talks to", lambda row: row["via"], words=True),
        Column("accuracy\n%", _measure("accuracy"), "accuracy"),
        Column("published\n%", _published),
        Column("differ-\nence", _difference),
        Column("all models\n%", _measure("all_models_accuracy"), "all_models_accuracy"),
        Column("right\ncluster %", _measure("cluster_accuracy"), "cluster_accuracy"),
        Column(found, lambda row: row["found"]) if swept else Column(lost, lambda row: row["lost"]),
        Column("k found", lambda row: row["k"]),
        Column("k right", lambda row: row["k_right"]),
        Column("runs", _runs),
        Column("time\nper run", lambda row: duration(row["seconds"])),
        Column("MB per\nclient", lambda row: megabytes(row["megabytes_per_client"])),
    ]
    empty = {
        "talks to": swept,
        "published\n%": all(row["published_mean"] is None for row in rows),
        "differ-\nence": all(row["published_mean"] is None for row in rows),
        "all models\n%": all(row["all_models_accuracy_mean"] is None for row in rows),
        "right\ncluster %": all(row["cluster_accuracy_mean"] is None for row in rows),
        found: all(row["found_of"] is None for row in rows),
        "k found": all(row["k"] == DASH for row in rows),
        "k right": all(row["k_right"] == DASH for row in rows),
        "MB per\nclient": all(row["megabytes_per_client"] is None for row in rows),
    }
    return [column for column in columns if not empty.get(column.title, False)]


def notes(summary: Mapping[str, Any], clients: int | None = None) -> list[str]:
    """Say what the reader of the tables must know."""
    rows = summary_rows(summary, clients)
    said = []
    if any(row["runs"] > 1 for row in rows):
        said.append("mean ± standard deviation over seeds")
        if "points" in summary:
            numbers = [row["runs"] for row in rows if not row["partial"]]
            said[0] += f" ({_span(numbers)} runs)"
    experiment = str(summary.get("experiment", ""))
    if any(row["best"] for row in rows):
        said.append("bold: the best of those that talk to neighbours")
    lines = ["; ".join(said)] if said else []
    if any(row["published_mean"] is not None for row in rows):
        scale = "" if summary.get("scale") == "paper" else "; this run is smaller, so look at the order"
        lines.append(f"published: {published.where(experiment)} of the paper, five seeds, its own size{scale}")
        lines += [f"a slip of the paper: {slip}" for slip in published.slips(experiment)]
    for name in dict.fromkeys(row["algorithm"] for row in rows if row["informed"]):
        lines.append(f"{name} is told the true clusters: the ceiling, not a method")
    if any(row["partial"] for row in rows):
        lines.append("* not finished: the numbers so far")
    if any(row["unfinished"] and not row["partial"] for row in rows):
        lines.append("runs: finished + unfinished; the unfinished ones are not in the means")
    if "points" in summary:
        finished, asked = counts(summary)
        if finished < asked:
            lines.append(f"{finished} of {asked} runs are finished")
    failed = sorted((run["error"], run["algorithm"], run["seed"]) for run in summary["runs"] if run.get("error"))
    for error, group in groupby(failed, key=itemgetter(0)):  # in which order they failed is up to the workers
        (_, name, seed), *others = group
        more = f"; and {len(others)} more" if others else ""
        lines.append(f"failed: {name}, seed {seed}: {error}{more}")
    return lines


def _measure(name: str) -> Callable[[dict[str, Any]], str]:
    return lambda row: percent(row[f"{name}_mean"], row[f"{name}_std"])


def _published(row: Mapping[str, Any]) -> str:
    if row["published_mean"] is None:
        return DASH
    return f"{100 * row['published_mean']:.1f} ± {100 * row['published_std']:.2f}"


def _difference(row: Mapping[str, Any]) -> str:
    return DASH if row["difference_points"] is None else f"{row['difference_points']:+.1f}".replace("-", "−")


def _runs(row: Mapping[str, Any]) -> str:
    if row["partial"]:
        return f"0 + {row['unfinished']}"
    return f"{row['runs']}" + (f" + {row['unfinished']}" if row["unfinished"] else "")


def one_line(title: str) -> str:
    return " ".join(title.replace("-\n", "").split()).replace(". ", ".")


# --- words


def percent(mean: float | None, std: float | None = None) -> str:
    """Write an accuracy in 0..1 as percent with one decimal.

    >>> percent(0.9371, 0.0012), percent(0.9371), percent(None)
    ('93.7 ± 0.1', '93.7', '–')
    """
    if mean is None or not math.isfinite(mean):
        return DASH
    return f"{100 * mean:.1f}" + (f" ± {100 * std:.1f}" if std is not None else "")


def duration(seconds: float | None) -> str:
    """Write a duration with the two digits that matter.

    >>> duration(0.42), duration(61.2), duration(4000), duration(None)
    ('0.4 s', '61 s', '67 min', '–')
    """
    if seconds is None:
        return DASH
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def megabytes(value: float | None) -> str:
    """Write megabytes with three digits that matter.

    >>> megabytes(0.0123), megabytes(3.21), megabytes(1234.5), megabytes(0)
    ('0.012', '3.2', '1,234', '0')
    """
    if value is None:
        return DASH
    if value == 0:
        return "0"
    return f"{value:.2g}" if value < 1 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"
