"""`peers`: every client takes the same local steps and mixes with its neighbours, here and in other libraries."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

import torch

from benchmarks.baselines.environments import Library, default_cache, environment_of, libraries, script_of
from benchmarks.baselines.work import CIFAR, CPU, LEARNING_RATE, Work
from benchmarks.child import measure_rounds, run_script
from benchmarks.measurements import Row, Skip, Tick, prefixed
from benchmarks.sizes import Size
from dfca.base.errors import ConfigError

OURS = "dfca"


@dataclass(frozen=True)
class BaselinesPlan:
    """The works, the libraries, and how often each is started.

    A start runs `Work.rounds` rounds and drops the first. cache: the folder of the libraries' environments.
    """

    works: tuple[Work, ...]
    libraries: tuple[Library, ...]
    repeats: int
    cache: Path

    @property
    def count(self) -> int:
        """Count the rows."""
        return len(self.works) * len(self.libraries)


def make_plan(quick: bool, cache: Path | None, only: Sequence[str] = ()) -> BaselinesPlan:
    """Choose the sizes; only: the works whose names contain one of these.

    Raises ConfigError where there is none.
    """
    plan = _all_works(quick, cache)
    works = tuple(work for work in plan.works if not only or any(name in work.name for name in only))
    if not works:
        raise ConfigError(
            f"no work of peers has {only[0]!r} in its name; there are {[work.name for work in plan.works]}"
        )
    return replace(plan, works=works)


def _all_works(quick: bool, cache: Path | None) -> BaselinesPlan:
    threads = torch.get_num_threads()
    work = Work(clients=20, hidden=200, samples=200, batch=50, degree=10, rounds=8, threads=threads)
    if quick:
        return BaselinesPlan((replace(work, rounds=3),), libraries(), 1, cache or default_cache())
    works = tuple(replace(work, clients=n, hidden=h) for h in (200, 2048) for n in (20, 100))
    # pfl-research's benchmark for CIFAR-10: a cohort of 50 users with 50 samples each
    works += (replace(work, model="cnn", clients=50, hidden=128, samples=50, batch=10, rounds=5),)
    return BaselinesPlan(works, libraries(), 3, cache or default_cache())


def rows(plan: BaselinesPlan, tick: Tick) -> Iterator[Row]:
    """Install what is missing, then measure work by work."""
    installed: dict[Library, Path] = {}
    reasons: dict[Library, str] = {}
    for library in plan.libraries:
        tick(f"environment of {library.name}")
        if library.processes and os.environ.get(CPU):
            reasons[library] = f"{library.name} works in several processes, whose processor time is not counted"
            continue
        try:
            installed[library] = environment_of(library, plan.cache)
        except Skip as reason:
            reasons[library] = str(reason)
    for work in plan.works:
        name = work.name
        seconds, failures = _measure(work, installed, plan.repeats, prefixed(tick, name))
        skipped = {**reasons, **failures}
        about = (
            f"{work.samples} samples per client, {work.steps} steps of {work.batch}, degree {work.degree}; per round"
        )
        for library in plan.libraries:
            title, details = f"{name}, {library.name}", {"differs": library.differs, "work": asdict(work)}
            if library in skipped:
                yield Row(title, about, details=details, skipped=skipped[library])
                continue
            values = {OURS: seconds[OURS], library.name: seconds[library.name]}
            yield Row(title, about, values, of=library.name, to=OURS, least=library.least, details=details)


def _measure(
    work: Work, installed: Mapping[Library, Path], repeats: int, tick: Tick
) -> tuple[dict[str, list[float]], dict[Library, str]]:
    """Time one work: each repeat starts ours, then every library that has not failed; return seconds and failures."""
    seconds: dict[str, list[float]] = {OURS: [], **{library.name: [] for library in installed}}
    failures: dict[Library, str] = {}
    for repeat in range(repeats if installed else 0):
        tick(f"dfca, {repeat + 1} of {repeats}")
        seconds[OURS].append(ours(work))
        for library, python in installed.items():
            if library in failures:
                continue
            tick(f"{library.name}, {repeat + 1} of {repeats}")
            try:
                seconds[library.name].append(theirs(library, python, work))
            except Skip as reason:
                failures[library] = str(reason)
    return seconds, failures


def ours(work: Work) -> float:
    """Time our round: one model per client (k = 1), uniform weights over all neighbours."""
    image = Size(model="cnn-pfl", colours=CIFAR[0], inputs=CIFAR[1] * CIFAR[2])
    size = replace(
        Size() if work.model == "mlp" else image,
        hidden=work.hidden,
        clients=work.clients,
        samples=work.samples,
        batch_size=work.batch,
        steps=work.steps,
        degree=work.degree,
        learning_rate=LEARNING_RATE,
    )
    return float(median(measure_rounds(size, work.rounds - 1, work.threads)["seconds"]))


def theirs(library: Library, python: Path, work: Work) -> float:
    """Time the round of another library, scaled to all clients where fewer trained."""
    settings = {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": ""}
    answer = run_script([str(python), str(script_of(library)), json.dumps(asdict(work))], settings, longest_s=1200)
    expected = work.clients * len(answer["seconds"])
    if not answer["trained"]:
        raise Skip(f"{library.name} trained no client")
    return float(median(answer["seconds"]) * expected / answer["trained"])
