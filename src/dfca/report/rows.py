"""The results of a run as numbers: one row per algorithm, in a sweep per point and algorithm.

    run folder, or a file of results -> Run -> RunReport -> tables, figures, pages

Means are over the finished runs of an algorithm at a point; where none is finished, over what there is so far, and the
row is marked as partial. Deviations are sample standard deviations over seeds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Literal, NamedTuple, Self

from dfca.algorithms import ALGORITHMS, about, base_of
from dfca.base.paired import FIRST_CHOICE, Compared, Scores, choose_reference, compare, family_of, pairs_with
from dfca.report.paper.published import Published, published
from dfca.report.wording import paper_name, span
from dfca.runs.store.metric import ACCURACY, DASH, ShownMetric
from dfca.runs.store.reading import Run, metric_of_trials
from dfca.runs.store.rows import PointRow, TrialRow
from dfca.sim.metrics_table import JsonObject, PointValues, traffic_bytes

ALL_FOUND = 0.999  # a cluster accuracy from which on every client is in the right cluster
DIVERGED_SHARE = 0.1  # of the clients, from which on a run has diverged
HIGH_LOSS = 50.0  # cross-entropy of runs before version 0.3, whose rows do not count the clients: 10 ln(150)
Partner = Literal["neighbours", "server", "nobody"]
PARTNERS: dict[str, Partner] = {"gossip": "neighbours", "server": "server"}
Measure = Literal["score", "all_models", "cluster_accuracy"]


class Kind(NamedTuple):
    """What the reader of a table has to know of an algorithm."""

    via: Partner
    informed: bool  # knows the true clusters: a ceiling, no method
    about: str
    models: Literal["clusters", "one"] | None = None
    elects: bool = False  # its clients elect the start, and find k where it is not given


class MeanStd(NamedTuple):
    """The mean and the sample standard deviation over seeds, None where there are none, or one."""

    mean: float | None = None
    std: float | None = None

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Self:
        """Average what is known."""
        known = [float(value) for value in values if value is not None]
        return cls(fmean(known), stdev(known) if len(known) > 1 else None) if known else cls()


STORED_AS_IS = (
    *("diverged_runs", "momentum", "lost_runs", "lost", "found_runs", "found_of", "found", "k", "k_right"),
    *("seconds", "megabytes_per_client", "start_megabytes_per_client"),
)


@dataclass(frozen=True)
class AlgorithmRow:
    """One algorithm, at one point of a sweep, over its seeds. What is not known is None."""

    point: PointValues
    label: str  # of the point
    algorithm: str
    kind: Kind
    runs: int  # finished
    unfinished: int
    failed: int
    metric: ShownMetric
    score: MeanStd
    all_models: MeanStd  # score of all models on every distribution
    cluster_accuracy: MeanStd
    before_personal: MeanStd  # score without the personal last step, where there is one
    scores: Scores  # by seed
    scores_before_personal: Scores
    diverged_runs: int
    momentum: float | None  # of the local steps
    lost_runs: int | None  # that lost a cluster; None where one model cannot lose one
    lost_of: int
    found_runs: int | None  # that put every client into its cluster
    found_of: int | None
    k: str  # that the clients found
    k_right: str
    seconds: float | None
    megabytes_per_client: float | None  # sent and received
    start_megabytes_per_client: float | None
    epsilon: float | None = None  # of [privacy]
    published: Published | None = None
    best: tuple[Measure, ...] = ()  # in which no other algorithm that talks to neighbours is better
    reference: str | None = None  # the algorithm that others are compared with
    compared: Compared | None = None  # with the reference, paired by seed

    @property
    def partial(self) -> bool:
        """Whether no run is finished."""
        return self.runs == 0

    @property
    def via(self) -> Partner:
        """Whom its clients talk to."""
        return self.kind.via

    @property
    def informed(self) -> bool:
        return self.kind.informed

    @property
    def lost(self) -> str:
        """In how many runs a cluster was lost: "3 of 6"."""
        return DASH if self.lost_runs is None else f"{self.lost_runs} of {self.lost_of}"

    @property
    def found(self) -> str:
        """In how many runs every client was put into its cluster: "19 of 20"."""
        return DASH if self.found_runs is None else f"{self.found_runs} of {self.found_of}"

    @property
    def missed(self) -> int | None:
        """In how many runs not all clusters were found or, where the true ones are unknown, one was lost."""
        return self.lost_runs if self.found_runs is None or self.found_of is None else self.found_of - self.found_runs

    @property
    def missed_of(self) -> int:
        return self.lost_of if self.found_of is None else self.found_of

    @property
    def difference_points(self) -> float | None:
        """Our score minus the paper's, in points."""
        if self.published is None or self.score.mean is None:
            return None
        return 100 * (self.score.mean - self.published.mean)

    def stored(self) -> JsonObject:
        """Return the row for files, of plain values; the score has the name of the metric.

        paired_difference is to `reference`, over paired_seeds seeds, with half of its interval (adjusted for all
        comparisons of the table), its own p-value, and the verdict by the interval.
        """
        key = self.metric.key
        means = {
            key: self.score,
            self.metric.all_models: self.all_models,
            "cluster_accuracy": self.cluster_accuracy,
            "before_personal": self.before_personal,
        }
        theirs = self.published or MeanStd()
        mean, half, p, seeds = (None,) * 4 if self.compared is None else self.compared.difference
        return {
            "point": self.point,
            "algorithm": self.algorithm,
            "via": self.via,
            "informed": self.informed,
            "runs": self.runs,
            "unfinished": self.unfinished,
            "failed": self.failed,
            "partial": self.partial,
            **{f"{name}_{end}": number for name, pair in means.items() for end, number in pair._asdict().items()},
            **{name: getattr(self, name) for name in STORED_AS_IS},
            "published_mean": theirs.mean,
            "published_std": theirs.std,
            "difference_points": self.difference_points,
            "reference": self.reference,
            "paired_difference": mean,
            "paired_half_interval": half,
            "paired_p": p,
            "paired_seeds": seeds,
            "verdict": None if self.compared is None else self.compared.verdict,
        }


@dataclass(frozen=True)
class RunReport:
    """A run with its rows, made once: tables, figures and pages are made of it."""

    run: Run
    rows: tuple[AlgorithmRow, ...]  # in the order of the points and algorithms

    @classmethod
    def of(cls, run: Run) -> Self:
        """Average the trials of a run, and compare its algorithms."""
        rows = [row for point in run.points for row in _rows_of(run, point)]
        return cls(run, tuple(_compared(rows)))

    @property
    def metric(self) -> ShownMetric:
        return metric_of_rows(self.rows)

    def with_paper_names(self) -> Self:
        rows = [
            replace(row, algorithm=paper_name(row.algorithm), reference=row.reference and paper_name(row.reference))
            for row in self.rows
        ]
        return replace(self, rows=tuple(rows))


def metric_of_rows(rows: Sequence[AlgorithmRow]) -> ShownMetric:
    return rows[0].metric if rows else ACCURACY


def kind_of(algorithm: str) -> Kind:
    """Look an algorithm, or one with options, up; one that is not registered (a user's own) counts as decentralised."""
    name = base_of(algorithm)
    if name not in ALGORITHMS:
        return Kind("neighbours", False, "")
    make = ALGORITHMS[name]
    record = make()
    via = PARTNERS.get(record.exchange, "nobody")
    return Kind(via, record.informed, about(make), record.models, elects=record.start == "elected")


def all_found(trial: TrialRow) -> bool:
    return trial.cluster_accuracy is not None and trial.cluster_accuracy >= ALL_FOUND


def models_of(trial: TrialRow) -> int:
    """Count the models that a client keeps in a trial; where the row does not say, the algorithm does."""
    if trial.models is not None:
        return int(trial.models)
    models = kind_of(trial.algorithm).models or ("one" if trial.cluster_accuracy is None else "clusters")
    return int(trial.clusters or 1) if models == "clusters" else 1


def diverged(trial: TrialRow, clients: int | None) -> bool:
    """Return whether training diverged: at a tenth of its clients an update was not finite, or the training loss was
    above ten times that of guessing."""
    if trial.diverged_clients is not None:
        return trial.diverged_clients > 0 and trial.diverged_clients >= DIVERGED_SHARE * (clients or 1)
    if "accuracy" not in trial or "train_loss" not in trial or not trial.finished:
        return False
    loss = trial.train_loss  # None: it was not finite
    return loss is None or not math.isfinite(loss) or loss > HIGH_LOSS


def by_point(rows: Sequence[AlgorithmRow]) -> list[list[AlgorithmRow]]:
    """Group rows by their point, in their order."""
    groups: dict[str, list[AlgorithmRow]] = {}
    for row in rows:
        groups.setdefault(row.label, []).append(row)
    return list(groups.values())


def _rows_of(run: Run, point: PointRow) -> list[AlgorithmRow]:
    groups: dict[str, list[TrialRow]] = {name: [] for name in point.algorithms}
    for trial in run.trials_at(point):
        groups.setdefault(trial.algorithm, []).append(trial)
    theirs = published(run.experiment, point.at)
    rows = [_row(name, trials, point, theirs.get(name)) for name, trials in groups.items() if trials]
    return _with_best(rows)


def _row(algorithm: str, trials: Sequence[TrialRow], point: PointRow, theirs: Published | None) -> AlgorithmRow:
    kind, metric = kind_of(algorithm), metric_of_trials(trials)
    finished = [trial for trial in trials if trial.finished]
    counted = finished or [trial for trial in trials if trial.score is not None]
    keepers = [trial for trial in counted if models_of(trial) > 1 and trial.live_clusters is not None]
    lost = sum((trial.live_clusters or 0) < (trial.clusters or 0) for trial in keepers)
    scored = [trial for trial in counted if trial.cluster_accuracy is not None]
    guesses = [models_of(trial) for trial in counted] if point.auto and kind.elects else []
    right = sum(models_of(trial) == trial.clusters for trial in counted)
    momenta = {trial.momentum for trial in counted}

    def megabytes(bytes_: Iterable[float | None]) -> float | None:
        mean = MeanStd.of(bytes_).mean
        return mean / point.clients / 1e6 if mean is not None and point.clients else None

    return AlgorithmRow(
        point=point.at,
        label=point.label,
        algorithm=algorithm,
        kind=kind,
        runs=len(finished),
        unfinished=len(trials) - len(finished),
        failed=sum(bool(trial.error) for trial in trials),
        metric=metric,
        score=MeanStd.of(trial.score for trial in counted),
        all_models=MeanStd.of(trial.all_models_score for trial in counted),
        cluster_accuracy=MeanStd.of(trial.cluster_accuracy for trial in counted),
        before_personal=MeanStd.of(trial.score_before_personal for trial in counted),
        scores={trial.seed: trial.score for trial in finished},
        scores_before_personal={
            trial.seed: trial.score_before_personal for trial in finished if f"{metric.key}_before_personal" in trial
        },
        diverged_runs=sum(diverged(trial, point.clients) for trial in counted),
        momentum=momenta.pop() if len(momenta) == 1 else None,
        lost_runs=lost if keepers else None,
        lost_of=len(keepers),
        found_runs=sum(map(all_found, scored)) if scored else None,
        found_of=len(scored) if scored else None,
        k=span(guesses) if guesses else DASH,
        k_right=f"{right} of {len(guesses)}" if guesses and scored else DASH,
        seconds=MeanStd.of(trial.seconds for trial in counted).mean,
        megabytes_per_client=megabytes(map(traffic_bytes, counted)),
        start_megabytes_per_client=megabytes(trial.start_bytes for trial in counted),
        epsilon=max((trial.epsilon for trial in counted if trial.epsilon is not None), default=None),
        published=theirs,
    )


def _with_best(rows: Sequence[AlgorithmRow]) -> list[AlgorithmRow]:
    """Mark the best mean of each measure, to the digit shown, among the finished algorithms that gossip.

    An algorithm that knows the true clusters or talks to nobody is a bound, not a rival.
    """
    best: dict[str, tuple[Measure, ...]] = {row.algorithm: () for row in rows}
    rivals = [row for row in rows if row.via == "neighbours" and not row.informed and not row.partial]
    measures: tuple[Measure, ...] = ("score", "all_models", "cluster_accuracy")
    for measure in measures:
        metric = ACCURACY if measure == "cluster_accuracy" else metric_of_rows(rows)
        means = {row.algorithm: getattr(row, measure).mean for row in rivals}
        shown = {name: metric.shown(mean) for name, mean in means.items() if mean is not None and math.isfinite(mean)}
        if len(shown) > 1:
            top = metric.best(shown.values())
            best |= {name: (*best[name], measure) for name, mean in shown.items() if mean == top}
    return [replace(row, best=best[row.algorithm]) for row in rows]


def _compared(rows: Sequence[AlgorithmRow]) -> list[AlgorithmRow]:
    """Compare each row with the reference at its point; one reference, and one family of intervals, for all points."""
    reference, groups, made = _reference_of(rows), by_point(rows), []
    all_scores = [{row.algorithm: row.scores for row in group if row.scores} for group in groups]
    known = [reference is not None and reference in scores for scores in all_scores]
    name = reference or ""
    pairs = [pairs_with(scores, name) for scores, there in zip(all_scores, known, strict=True) if there]
    family = family_of(differences for group in pairs for differences in group.values())
    for group, scores, there in zip(groups, all_scores, known, strict=True):
        verdicts = compare(scores, name, group[0].metric.higher_is_better, family) if there else {}
        made += [replace(row, reference=reference, compared=verdicts.get(row.algorithm)) for row in group]
    return made


def _reference_of(rows: Sequence[AlgorithmRow]) -> str | None:
    """Choose the first choice, or else the best mean over the points among the algorithms that most points have."""
    if not rows:
        return None
    means: dict[str, dict[int, float | None]] = {}
    for number, row in enumerate(rows):
        if row.scores:
            means.setdefault(row.algorithm, {})[number] = row.score.mean
    most = max(map(len, means.values()), default=0)
    everywhere = {name: known for name, known in means.items() if len(known) == most or name == FIRST_CHOICE}
    bounds = {row.algorithm for row in rows if row.informed}
    return choose_reference(everywhere, metric_of_rows(rows).higher_is_better, bounds)
