"""How many threads a run uses: asked for, else as it began, else by the cores that are free and the size of the work.

Another number of threads rounds in another way, so the choice is made once, when a run begins, and is recorded in its
environment.json: a run that is continued uses what is recorded there, as a replay does.
"""

from __future__ import annotations

import math
import os

import torch

from dfca.data.registry import SOURCES
from dfca.experiment.config import Config
from dfca.experiment.load import Experiment
from dfca.runs.store.folder import RunFolder
from dfca.sim.local.cores import free_cores, usable_cores

ASKED_FOR = "OMP_NUM_THREADS"  # set by people, by torchrun, and by --threads
SMALL_WORK = 5e7  # multiplications of a local step of all clients: below, threads cost more than they give


def ask_for_threads(threads: int) -> None:
    """Ask for a number of threads, for this process and for those that it starts."""
    os.environ[ASKED_FOR] = str(threads)
    torch.set_num_threads(threads)


def choose_threads(folder: RunFolder, experiment: Experiment, processes: int) -> int:
    """Return how many threads each of the processes of a run uses."""
    if ASKED_FOR in os.environ:
        return max(1, torch.get_num_threads() // processes)
    if recorded := folder.recorded_threads():
        return min(recorded, usable_cores())
    if experiment.config.device == "cpu" and all(is_small(point.config) for point in experiment.points):
        return 1
    return max(1, free_cores() // processes)


def is_small(config: Config) -> bool:
    """Return whether a local step of all clients is too little work for several threads; unknown models are not."""
    source, model = SOURCES.get(config.data.name), config.model
    own = config.data.factory is not None or model.factory is not None
    if source is None or own or model.name != "mlp":
        return False
    samples = config.data.samples_per_client
    if samples is None:
        whole = int(source.samples.split("/")[0].replace(",", "")) if "/" in source.samples else None
        samples = None if whole is None else math.ceil(whole * config.distributions / config.clients)
    if samples is None:
        return False
    if isinstance(config.local.batch_size, int):
        samples = min(samples, config.local.batch_size)
    weights = model.hidden * (math.prod(source.shape) + source.classes)
    return config.clients * samples * weights < SMALL_WORK
