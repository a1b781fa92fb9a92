"""What a user should know about a simulation, once."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import networkx as nx

from dfca.memory import format_bytes
from dfca.sim.evaluation import Evaluator
from dfca.sim.start import Start

SMALLER_STEPS = "try a smaller local.learning_rate"


def notes_of(start: Start, evaluator: Evaluator, models: int, diverged: Collection[int]) -> tuple[str, ...]:
    """List the notes of a simulation whose clients keep so many models; diverged: where an update was not finite."""
    return (
        *start.setting.split.notes,
        *_of_clusters(start, models),
        *_of_graph(start),
        *_of_divergence(start, evaluator, diverged),
        *_of_storage(start),
    )


def _of_clusters(start: Start, models: int) -> Iterator[str]:
    setting, algorithm = start.setting, start.setting.algorithm
    if setting.clusters is None and algorithm.start == "elected":
        yield f"{algorithm.name} opened {models} cluster{'' if models == 1 else 's'}"
    elif setting.clusters is None and algorithm.models == "clusters":
        yield f"{algorithm.name} cannot find the number of clusters; it uses the true one: {models}"


def _of_graph(start: Start) -> Iterator[str]:
    setting = start.setting
    if setting.algorithm.exchange != "gossip":
        return
    if isolated := [i for i, degree in setting.graph.degree if degree == 0]:
        yield (
            f"{len(isolated)} of {setting.clients} clients have no neighbours (first: {isolated[0]}) and learn alone"
        )
    if (parts := nx.number_connected_components(setting.graph)) > 1:
        yield f"the graph has {parts} components; models cannot pass between them"


def _of_divergence(start: Start, evaluator: Evaluator, diverged: Collection[int]) -> Iterator[str]:
    clients = start.setting.clients
    if diverged:
        yield (
            f"training diverged at {len(diverged)} of {clients} clients (first: {min(diverged)}): updates that are not "
            f"finite are undone and not sent; {SMALLER_STEPS}"
        )
    if high := sorted(evaluator.high_losses - set(diverged)):
        yield (
            f"the training loss of {len(high)} of {clients} clients (first: {high[0]}) rose to "
            f"{evaluator.highest_loss:.2g}, above {evaluator.high_loss:.1f}, 10 times that of guessing; {SMALLER_STEPS}"
        )


def _of_storage(start: Start) -> Iterator[str]:
    storage = start.storage
    if storage is not None and storage.on_disk:
        room = "" if storage.available is None else f"; {format_bytes(storage.available)} of memory were available"
        yield f"the models of all clients ({format_bytes(storage.bytes)}) lie on the disk{room}"
