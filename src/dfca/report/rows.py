"""The results of a run as numbers: one row per algorithm, in a sweep per point and algorithm.

    summary.json, or a file of saved results -> rows -> tables, figures, the findings of a page

Means are over the finished runs of an algorithm (at a point, in a sweep); where none is finished, over what there is so
far, and the row is marked as partial. Deviations are sample standard deviations over seeds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from statistics import fmean, stdev
from typing import Any, Literal, NamedTuple

from dfca.algorithms import ALGORITHMS, about, base_of
from dfca.report.paper import published
from dfca.report.statistics import compare_rows_, diverged
from dfca.report.wording import DASH, span
from dfca.runs.store.metric import ShownMetric, metric_of_run

MEASURES = ("accuracy", "all_models_accuracy", "cluster_accuracy")
"""The first two stand for the task's metric, whatever it is."""

ALL_FOUND = 0.999  # a cluster accuracy from which on every client is in the right cluster
PARTNERS: dict[str, Literal["neighbours", "server", "nobody"]] = {"gossip": "neighbours", "server": "server"}


class Kind(NamedTuple):
    """What the reader of a table has to know of an algorithm."""

    via: Literal["neighbours", "server", "nobody"]
    informed: bool  # knows the true clusters: a ceiling, no method
    about: str
    models: Literal["clusters", "one"] | None = None
    elects: bool = False  # its clients elect the start, and find k where it is not given


def kind_of(algorithm: str) -> Kind:
    """Look an algorithm, or one with options, up; one that is not registered (a user's own) counts as decentralised."""
    name = base_of(algorithm)
    if name not in ALGORITHMS:
        return Kind("neighbours", False, "")
    make = ALGORITHMS[name]
    record = make()
    via = PARTNERS.get(record.exchange, "nobody")
    return Kind(via, record.informed, about(make), record.models, elects=record.start == "elected")


def summary_rows(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Make one row per algorithm, in a sweep per point and algorithm, in the order of the points and runs.

    Keys: point (what varies, with its value), label, algorithm, via, informed, runs (finished), unfinished, failed,
    partial (no run is finished), accuracy_mean, accuracy_std and so on for all_models_accuracy and cluster_accuracy,
    before_personal_mean, before_personal_std (accuracy without the personal last step, where there is one),
    found ("19 of 20" runs put every client into its cluster), found_runs, found_of, lost ("3 of 6", or a dash where one
    model cannot lose a cluster), lost_runs, k and k_right (where the clients find k), seconds, megabytes_per_client,
    start_megabytes_per_client, accuracy_per_gigabyte, published_mean, published_std (accuracies of the paper, 0..1),
    difference_points (ours minus the paper's), best (the measures in which no other algorithm that talks to neighbours
    is better), metric (whose values `accuracy` and `all_models_accuracy` then are), scores and scores_before_personal
    (by seed), one_model (for everybody), reference, compared (with the reference, paired by seed), diverged_runs,
    momentum (of the local steps). What is not known is None.
    """
    if "points" not in summary:
        rows = _rows_of_point(summary["runs"], summary, summary)
        compare_rows_(rows)
        return rows
    groups = [[run for run in summary["runs"] if run.get("digest") == point["digest"]] for point in summary["points"]]
    rows = [
        row
        for point, group in zip(summary["points"], groups, strict=True)
        for row in _rows_of_point(group, point, summary)
    ]
    compare_rows_(rows)
    return rows


def named(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row for files, of plain values: what it calls accuracy has the name of the metric, if that is another.

    paired_difference is to `reference`, over paired_seeds seeds, with half of its 95 % interval, its p-value before
    correction, and the verdict after it.
    """
    metric, compared = row["metric"], row["compared"]
    hidden = ("compared", "scores", "scores_before_personal", "one_model")
    mean, half, p, seeds = (None,) * 4 if compared is None else compared.difference
    row = {key: value for key, value in row.items() if key not in hidden} | {
        "paired_difference": mean,
        "paired_half_interval": half,
        "paired_p": p,
        "paired_seeds": seeds,
        "verdict": None if compared is None else compared.verdict,
    }
    renamed = {f"{name}_{end}": f"{key}_{end}" for name, key in _names(metric) for end in ("mean", "std")}
    return {renamed.get(key, key): value for key, value in row.items() if key != "metric"}


def _names(metric: ShownMetric) -> tuple[tuple[str, str], ...]:
    return (("accuracy", metric.key), ("all_models_accuracy", metric.all_models))


def varying(summary: Mapping[str, Any]) -> list[str]:
    """Return the keys that vary in a sweep, in the order in which the points name them; those of the grid last."""
    points = [point["point"] for point in summary.get("points", ())]
    return sorted(dict.fromkeys(key for at in points for key in at), key=lambda key: all(key in at for at in points))


def all_found(run: Mapping[str, Any]) -> bool:
    """Return whether a run put every client into its cluster."""
    return float(run["cluster_accuracy"]) >= ALL_FOUND


def models_of(run: Mapping[str, Any]) -> int:
    """Count the models that a client keeps in a run; where the run does not say, the algorithm does."""
    if run.get("models") is not None:
        return int(run["models"])
    models = kind_of(run["algorithm"]).models or ("one" if run.get("cluster_accuracy") is None else "clusters")
    return int(run.get("clusters") or 1) if models == "clusters" else 1


def mean_std(runs: Sequence[Mapping[str, Any]], key: str) -> tuple[float | None, float | None]:
    """Return the mean and the sample standard deviation over runs, None where there are none, or one."""
    values = [float(run[key]) for run in runs if run.get(key) is not None]
    if not values:
        return None, None
    return fmean(values), stdev(values) if len(values) > 1 else None


def _rows_of_point(
    runs: Sequence[Mapping[str, Any]], point: Mapping[str, Any], summary: Mapping[str, Any]
) -> list[dict[str, Any]]:
    groups: dict[str, list[Mapping[str, Any]]] = {name: [] for name in point.get("algorithms", ())}
    for run in runs:
        groups.setdefault(run["algorithm"], []).append(run)
    rows = [_row(algorithm, group, point) for algorithm, group in groups.items() if group]
    known = published.published(str(summary.get("experiment", "")), point.get("point", {}))
    for row in rows:
        theirs, ours = known.get(row["algorithm"]), row["accuracy_mean"]
        row["published_mean"], row["published_std"] = theirs or (None, None)
        row["difference_points"] = None if theirs is None or ours is None else 100 * (ours - theirs.mean)
    _mark_best(rows)
    return rows


def _row(algorithm: str, runs: Sequence[Mapping[str, Any]], point: Mapping[str, Any]) -> dict[str, Any]:
    kind = kind_of(algorithm)
    finished = [run for run in runs if run.get("finished")]
    metric = metric_of_run({"runs": runs})
    counted = finished or [run for run in runs if run.get(metric.key) is not None]
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
        "metric": metric,
    }
    for measure, key in zip(MEASURES, (metric.key, metric.all_models, "cluster_accuracy"), strict=True):
        row[f"{measure}_mean"], row[f"{measure}_std"] = mean_std(counted, key)
    row["before_personal_mean"], row["before_personal_std"] = mean_std(counted, f"{metric.key}_before_personal")
    row["scores"] = {int(run["seed"]): run.get(metric.key) for run in finished}
    before = f"{metric.key}_before_personal"
    row["scores_before_personal"] = {int(run["seed"]): run[before] for run in finished if before in run}
    row["one_model"] = kind.models == "one"
    row["diverged_runs"] = sum(diverged(run, point.get("clients")) for run in counted)
    momenta = {run.get("momentum") for run in counted}
    row["momentum"] = momenta.pop() if len(momenta) == 1 else None
    keepers = [run for run in counted if models_of(run) > 1 and run.get("live_clusters") is not None]
    lost = sum(run["live_clusters"] < run["clusters"] for run in keepers)
    row["lost_runs"] = lost if keepers else None
    row["lost"] = f"{lost} of {len(keepers)}" if keepers else DASH
    scored = [run for run in counted if run.get("cluster_accuracy") is not None]
    row["found_runs"], row["found_of"] = (sum(map(all_found, scored)), len(scored)) if scored else (None, None)
    row["found"] = f"{row['found_runs']} of {len(scored)}" if scored else DASH
    guesses = [models_of(run) for run in counted] if point.get("auto") and kind.elects else []
    right = sum(models_of(run) == run.get("clusters") for run in counted)
    row["k"] = span(guesses) if guesses else DASH
    row["k_right"] = f"{right} of {len(guesses)}" if guesses and scored else DASH
    row["seconds"] = mean_std(counted, "seconds")[0]
    clients = point.get("clients")
    for key, name in (("bytes_sent", "megabytes_per_client"), ("start_bytes", "start_megabytes_per_client")):
        sent = mean_std(counted, key)[0]
        row[name] = sent / clients / 1e6 if sent is not None and clients else None
    row["accuracy_per_gigabyte"] = mean_std(counted, "accuracy_per_gigabyte")[0]
    row["best"] = ()
    return row


def _mark_best(rows: list[dict[str, Any]]) -> None:
    """Mark the best mean of each measure, to the digit shown, among the finished algorithms that gossip.

    An algorithm that knows the true clusters or talks to nobody is a bound, not a rival.
    """
    rivals = [row for row in rows if row["via"] == "neighbours" and not row["informed"] and not row["partial"]]
    for measure in MEASURES:
        metric = ShownMetric() if measure == "cluster_accuracy" or not rows else rows[0]["metric"]
        known = {id(row): row[f"{measure}_mean"] for row in rivals if row[f"{measure}_mean"] is not None}
        shown = {place: metric.shown(mean) for place, mean in known.items() if isfinite(mean)}
        if len(shown) < 2:
            continue
        for row in rivals:
            if shown.get(id(row)) == metric.best(shown.values()):
                row["best"] = (*row["best"], measure)
