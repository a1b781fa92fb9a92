"""What a user should know about a simulation, once."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator

import networkx as nx

from dfca.base.accountant import epsilon
from dfca.base.memory import format_bytes
from dfca.core.learning.task import Metric
from dfca.sim.evaluation import Evaluator
from dfca.sim.start import Start

SMALLER_STEPS = "try a smaller local.learning_rate"


DIVERGENCE = ("diverged", "high loss")  # the kinds of warnings that say that training diverged


class WarningNote(str):
    """A note of what may be wrong."""

    kind: str  # identifies it: the numbers in its text may grow from round to round
    clients: int  # how many are affected

    def __new__(cls, kind: str, text: str, clients: int = 0) -> WarningNote:
        made = super().__new__(cls, text)
        made.kind, made.clients = kind, clients
        return made

    def __getnewargs__(self) -> tuple[str, str, int]:  # type: ignore[override]
        """Return what a pickled note is made of again: a result keeps its notes."""
        return self.kind, str(self), self.clients


Alarm = WarningNote  # its name in results that version 0.2 pickled


def diverged_clients(notes: Iterable[str]) -> int:
    """Count the clients whose training diverged, or rose above ten times the loss of guessing, by a run's notes."""
    return sum(note.clients for note in notes if isinstance(note, WarningNote) and note.kind in DIVERGENCE)


def notes_of_scores(metric: Metric, score: float | None, target: float | None) -> Iterator[str]:
    """List what is wrong with a score, or with the target that it should reach."""
    if score is not None and math.isnan(score):
        yield WarningNote("nan", f"the {metric.name} is not a number: NaN in the last evaluation; look at the metric")
    if target is not None and target > 1 and metric.percent:
        yield WarningNote("target", f"{metric.name} is at most 1, so clock.target = {target:g} is never reached")


def notes_of(
    start: Start,
    evaluator: Evaluator,
    models: int,
    diverged: Collection[int],
    left: int | None = None,
    releases: int | None = None,
) -> tuple[str, ...]:
    """List the notes of a simulation, one sentence each.

    models: how many a client keeps; diverged: the clients at which an update was not finite; left: how many clusters
    merging has left, 0 before its last survey, None without merging; releases: how often a client sends at most, 0 if
    that is unknown, None: in every round.
    """
    return (
        *start.setting.split.notes,
        *_of_clusters(start, models, left),
        *_of_graph(start),
        *_of_options(start),
        *_of_divergence(start, evaluator, diverged),
        *_of_storage(start),
        *_of_privacy(start, start.setting.rounds if releases is None else releases),
    )


def _of_clusters(start: Start, models: int, left: int | None) -> Iterator[str]:
    setting, algorithm = start.setting, start.setting.algorithm
    if left is not None:
        if not left:
            return
        yield (
            f"{algorithm.name} opened {models} clusters and merged those that are not worth their data: {left} "
            f"{'is' if left == 1 else 'are'} left"
        )
    elif setting.clusters is None and algorithm.start == "elected":
        yield f"{algorithm.name} opened {models} cluster{'' if models == 1 else 's'}"
    elif setting.clusters is None and algorithm.models == "clusters":
        yield f"{algorithm.name} cannot find the number of clusters; it uses the true one: {models}"


def _of_graph(start: Start) -> Iterator[str]:
    setting = start.setting
    if setting.algorithm.exchange != "gossip":
        return
    if (peers := setting.algorithm.peers) is not None and peers.among == "any" and not peers.uses_graph:
        yield f"{setting.algorithm.name} chooses its peers among all clients; the graph does not limit it"
        return
    if peers is not None and peers.among == "neighbours":
        yield f"{setting.algorithm.name} chooses its peers among its neighbours in the graph; in its paper, among all"
    if isolated := [i for i, degree in setting.graph.degree if degree == 0]:
        yield WarningNote(
            "isolated",
            f"{len(isolated)} of {setting.clients} clients have no neighbours (first: {isolated[0]}) and learn alone",
        )
    if (parts := nx.number_connected_components(setting.graph)) > 1:
        yield WarningNote("components", f"the graph has {parts} components; models cannot pass between them")


def _of_options(start: Start) -> Iterator[str]:
    setting, algorithm = start.setting, start.setting.algorithm
    if algorithm.exchange == "gossip" and algorithm.share not in (None, setting.share) and setting.share != "trained":
        yield f'{algorithm.name} has its own rule for sharing, "{algorithm.share}"; mixing.share does not change it'


def _of_divergence(start: Start, evaluator: Evaluator, diverged: Collection[int]) -> Iterator[str]:
    clients = start.setting.clients
    if diverged:
        yield WarningNote(
            "diverged",
            f"training diverged at {len(diverged)} of {clients} clients (first: {min(diverged)}): updates that are not "
            f"finite are undone and not sent; {SMALLER_STEPS}",
            len(diverged),
        )
    if high := sorted(evaluator.high_losses - set(diverged)):
        yield WarningNote(
            "high loss",
            f"the training loss of {len(high)} of {clients} clients (first: {high[0]}) rose to "
            f"{evaluator.highest_loss:.2g}, above {evaluator.high_loss:.1f}, 10 times that of guessing; "
            f"{SMALLER_STEPS}",
            len(high),
        )


def _of_storage(start: Start) -> Iterator[str]:
    storage = start.storage
    if storage is not None and storage.on_disk:
        room = "" if storage.available is None else f"; {format_bytes(storage.available)} of memory were available"
        yield f"the models of all clients ({format_bytes(storage.bytes)}) lie on the disk{room}"


def _of_privacy(start: Start, releases: int) -> Iterator[str]:
    setting, privacy = start.setting, start.setting.privacy
    if privacy is None or not releases:
        return
    spent = epsilon(privacy.noise, releases, privacy.delta)
    chosen = ", but not which cluster it trains, which its losses choose" if setting.algorithm.models != "one" else ""
    yield (
        f"privacy: {releases} rounds cost a client epsilon = {spent:.3g} at delta = {privacy.delta:g}; it covers "
        f"the models that a client sends{chosen}"
    )
