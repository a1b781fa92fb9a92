"""`floor`: a round of the simulator against the same forward and backward passes in bare torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from statistics import median

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from benchmarks.child import measure_rounds, need_memory
from benchmarks.measurements import Row, Skip, Tick, divided, in_turn, prefixed
from benchmarks.plain_torch import PlainTorch
from benchmarks.sizes import AUGMENT, Size, make_setting
from dfca.base.memory import keep_freed_memory
from dfca.core.learning.images import augmented
from dfca.core.learning.local import draw_steps
from dfca.core.rng import seeded
from dfca.sim.rounds.simulation import Simulation
from dfca.sim.setting import Setting

PHASES = ("assign", "train", "mix")
MIXING_CLIENTS = 240
"""The size at which mixing should take at most a tenth of a round."""


@dataclass(frozen=True)
class FloorPlan:
    """What is measured."""

    workloads: tuple[tuple[str, Size, float], ...]  # name, size, bound of round / floor
    augmented: tuple[tuple[str, Size], ...]
    cnn_step: Size
    mixing: Size
    repeats: int
    tries: int = 2

    @property
    def count(self) -> int:
        """Count the rows."""
        return len(self.workloads) + len(self.augmented) + 2


def make_plan(quick: bool) -> FloorPlan:
    """Choose the sizes. Few clients suffice: local work is the same for each."""
    large, small = (4, 40) if quick else (8, 120)
    mlp = Size(clusters=4, clients=small, degree=10)
    cnn = Size(model="cnn", classes=47, samples=500, clusters=2, clients=large, degree=3)
    batches = replace(cnn, clusters=1, clients=large // 2, algorithm="local", steps=10, batch_size=50)
    crops = replace(batches, inputs=24 * 24, colours=3, classes=10)
    tutorial = replace(crops, model="cnn-tutorial", hidden=384)
    return FloorPlan(
        workloads=(
            ("MLP 2048, 1,000 samples", replace(mlp, hidden=2048, samples=1000, clients=large, degree=3), 1.15),
            ("CNN, 500 samples", cnn, 1.15),
            ("MLP 200, 20 samples", replace(mlp, samples=20), 0.6),
            ("MLP 200, 50 samples", replace(mlp, samples=50), 0.6),
            ("CNN, batches of 50 (EMNIST)", replace(batches, classes=62), 1.15),
            ("tutorial CNN, batches of 50 (CIFAR-10)", tutorial, 1.15),
        ),
        augmented=(
            ("augmentation, tutorial CNN", replace(tutorial, inputs=32 * 32, augmented=True)),
            ("augmentation, CNN", replace(crops, inputs=32 * 32, augmented=True)),
        ),
        cnn_step=replace(cnn, clusters=1, clients=large // 2, algorithm="local", steps=5),
        mixing=replace(mlp, hidden=2048, samples=1000, clients=24 if quick else MIXING_CLIENTS, degree=24),
        repeats=2 if quick else 5,
        tries=1 if quick else 2,
    )


def rows(plan: FloorPlan, tick: Tick) -> Iterator[Row]:
    """Measure row by row, in a process that keeps freed memory, as `dfca run` does: otherwise up to 10,000 page faults
    per round make rounds of small clients differ by some percent from process to process."""
    keep_freed_memory()
    for name, size, bound in plan.workloads:
        yield round_row(name, size, bound, plan, tick)
    for name, size in plan.augmented:
        yield augmentation_row(name, size, plan.repeats, tick)
    yield step_row(plan.cnn_step, plan.repeats, tick)
    yield mixing_row(plan.mixing, max(1, plan.repeats // 2), tick)


def round_row(name: str, size: Size, bound: float, plan: FloorPlan, tick: Tick) -> Row:
    """Compare a whole round (assign, train, mix; no evaluation) with the fastest schedule of the plain passes."""
    about = f"{_describe(size)}, k = {size.clusters}; per client and round"
    try:
        need_memory(replace(size, clusters=2 * size.clusters))  # the plain models are a second bank
    except Skip as reason:
        return Row(name, about, skipped=str(reason))
    setting = make_setting(size)
    simulation, plain = Simulation(setting), PlainTorch(setting)
    tried = in_turn(plain.schedules, plan.tries, prefixed(tick, name))
    best = min(tried, key=lambda schedule: min(tried[schedule]))
    phases: list[dict[str, float]] = []

    def step() -> None:
        before = dict(simulation.seconds)
        simulation.step()
        phases.append({phase: simulation.seconds[phase] - before[phase] for phase in PHASES})

    seconds = in_turn({"dfca": step, "floor": plain.schedules[best]}, plan.repeats, prefixed(tick, name))
    plain.close()
    return Row(
        name,
        about,
        divided(seconds, by=size.clients),
        of="dfca",
        to="floor",
        most=bound,
        details={
            "floor": best,
            "schedules": {schedule: min(values) / size.clients for schedule, values in tried.items()},
            "phases": {
                phase: median(times[phase] for times in phases[-plan.repeats :]) / size.clients for phase in PHASES
            },
            "engine": simulation.engine.how,
            "world": asdict(size),
        },
    )


def augmentation_row(name: str, size: Size, repeats: int, tick: Tick) -> Row:
    """Measure the share of local steps that augmentation takes, its random numbers included."""
    setting = make_setting(size)
    simulation, local = Simulation(setting), setting.local

    def augment() -> None:
        for client in range(size.clients):
            x, y = setting.split.train.of(client)
            batches, changes = draw_steps(len(y), local, setting.seed, client, 0)
            assert batches is not None
            assert changes is not None
            for batch, numbers in zip(batches, changes, strict=True):
                augmented(x[batch], numbers, AUGMENT)

    seconds = in_turn({"augment": augment, "steps": simulation.step}, repeats, prefixed(tick, name))
    return Row(
        name,
        f"{_describe(size)} on 24 x 24 crops; per client and step",
        divided(seconds, by=size.clients * size.steps),
        of="augment",
        to="steps",
        most=0.1,
        details={"world": asdict(size)},
    )


def step_row(size: Size, repeats: int, tick: Tick) -> Row:
    """Compare our local steps of the CNN with an eager loop of its layers as the paper writes them."""
    name, about = "CNN, local step", f"{_describe(size)}; per client and step"
    tick(f"{name}: differences")
    differences = {str(n): _differences(replace(size, clients=2, steps=n)) for n in (1, size.steps)}
    setting = make_setting(size)
    simulation = Simulation(setting)
    by_layers, _ = _plain_layers(setting)
    simulation.step()
    by_layers()
    subjects = {"plain layers": by_layers, "dfca": simulation.step}
    seconds = in_turn(subjects, repeats, prefixed(tick, name))
    return Row(
        name,
        about,
        divided(seconds, by=size.clients * size.steps),
        of="plain layers",
        to="dfca",
        least=1.8,
        details={"differences": differences, "difference_bound": 1e-5, "world": asdict(size)},
    )


def _plain_layers(setting: Setting) -> tuple[Callable[[], None], list[nn.Module]]:
    """Make the steps of `local` as a first script would have them: the module, the loss, the optimiser."""
    modules: list[nn.Module] = []
    for _ in range(setting.clients):
        with seeded(setting.seed, "init", 0):
            modules.append(setting.make_model().to(setting.dtype).train())
    optimisers = [torch.optim.SGD(module.parameters(), lr=setting.local.learning_rate) for module in modules]

    def by_layers() -> None:
        for client, (module, optimiser) in enumerate(zip(modules, optimisers, strict=True)):
            x, y = setting.split.train.of(client)
            for _ in range(setting.local.steps):
                optimiser.zero_grad()
                torch.autograd.backward(cross_entropy(module(x.to(setting.dtype)), y))
                optimiser.step()

    return by_layers, modules


def _differences(size: Size) -> dict[str, float]:
    """Compute by how much parameters differ after local steps: ours from the plain layers', and both from those in
    double precision, which is the effect of rounding alone."""
    setting = make_setting(size)
    simulation = Simulation(setting)
    simulation.step()
    ours = [simulation.model(client, 0) for client in range(size.clients)]
    plain = []
    for precision in (setting, replace(setting, dtype=torch.float64)):
        by_layers, modules = _plain_layers(precision)
        by_layers()
        plain.append(modules)
    pairs = {"ours": (ours, plain[0]), "ours from double": (ours, plain[1]), "plain from double": (plain[0], plain[1])}
    return {what: max(_difference(*pair) for pair in zip(*two, strict=True)) for what, two in pairs.items()}


def mixing_row(size: Size, repeats: int, tick: Tick) -> Row:
    """Measure the share of a round that mixing takes, at the paper's size."""
    name = "mixing's share of a round"
    about = f"N = {size.clients}, {_describe(size)}, k = {size.clusters}, degree {size.degree}"
    tick(f"{name}: {about}")
    try:
        measured = measure_rounds(size, repeats, torch.get_num_threads())
    except Skip as reason:
        return Row(name, about, skipped=str(reason))
    values = {"mix": [phases["mix"] for phases in measured["phases"]], "round": measured["seconds"]}
    bound = 0.1 if size.clients >= MIXING_CLIENTS else None
    details = {"memory_bytes": measured["memory"], "phases": measured["phases"], "world": asdict(size)}
    return Row(name, about, values, of="mix", to="round", most=bound, details=details)


def _describe(size: Size) -> str:
    kind = {"mlp": "MLP", "cnn": "CNN", "cnn-tutorial": "tutorial CNN"}[size.model]
    batches = "" if size.batch_size is None else f" on batches of {size.batch_size}"
    return f"{kind} with P = {size.parameters:,}, {size.samples:,} samples, {size.steps} steps{batches}"


def _difference(ours: nn.Module, theirs: nn.Module) -> float:
    pairs = zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs if a.is_floating_point())
