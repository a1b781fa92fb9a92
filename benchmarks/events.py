"""`events`: the event simulator's own speed, and what elections in virtual time cost."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

import networkx as nx

from benchmarks.measurements import Row, Tick, fit, in_turn, prefixed
from benchmarks.sizes import Size, make_setting
from dfca.core.rules.election import lot
from dfca.experiment.load import load_experiment
from dfca.experiment.sweep import TrialGroup
from dfca.peer.records.messages import Bid, Count, Decision, Open, Probe, Refuse, Stand, Votes, scalars
from dfca.runs.sink import NullSink
from dfca.runs.trials import Workload
from dfca.runs.virtual import simulation_of
from dfca.sim.events.options import EventOptions
from dfca.sim.events.simulation import EventSimulation
from dfca.sim.events.world import Compute, World
from dfca.sim.rounds.simulation import Simulation
from dfca.sim.setting import Setting
from dfca.sim.shards import Alone

MOST_RATIO = 1.3
"""A round of the event simulator against one of the synchronous simulator, where all clients finish together."""
UNEQUAL = World(Compute(1.0, "lognormal", spread=0.3))
"""Every round takes its own time, two thirds of them within 0.74 and 1.35 times the median."""
LEAST_EVENTS = 100_000
"""Events of the queue per second, without training."""
MOST_ELECTION_S = 60.0
SCALARS = ("wave", "turn", "flooding")
"""What is fitted against N: the wave once, a turn, and what flooding would send per candidate."""
MOST_EXPONENT = 1.1
"""Of a turn's scalars against N at a fixed degree: 1 is O(edges) per candidate."""
WAVE = (Probe, Count, Refuse, Open)
TURN = (Bid, Stand, Votes, Decision)


@dataclass(frozen=True)
class EventsPlan:
    """What is measured. until_s: the end of the run of `stragglers`, None for the preset's own."""

    equal: Size
    dry: Size
    dry_rounds: int
    election: Size
    clients: Sequence[int]
    until_s: float | None
    repeats: int

    @property
    def count(self) -> int:
        """Count the rows."""
        return 5 + len(self.clients)


def make_plan(quick: bool) -> EventsPlan:
    """Choose the sizes."""
    tiny = Size(inputs=16, hidden=4, samples=12, classes=4, clusters=2, degree=10)
    return EventsPlan(
        equal=Size(clients=60 if quick else 240, hidden=200, samples=200, clusters=2, degree=10),
        dry=replace(tiny, clients=200),
        dry_rounds=10 if quick else 30,
        election=replace(tiny, clients=200 if quick else 1000, algorithm="dfca-fi"),
        clients=(50, 200) if quick else (50, 200, 800, 2000),
        until_s=20.0 if quick else None,
        repeats=2 if quick else 5,
    )


def rows(plan: EventsPlan, tick: Tick) -> Iterator[Row]:
    """Measure one thing after the other."""
    yield _stragglers(plan, tick)
    setting = make_setting(plan.equal)
    equal = EventSimulation(setting)
    yield _speeds(plan, tick, "equal speeds", equal, "a round where all finish together", MOST_RATIO)
    unequal = EventSimulation(replace(setting, aggregation="sequential"), UNEQUAL)
    yield _speeds(plan, tick, "unequal speeds", unequal, "a mean round where each takes its own time")
    yield _dry(plan, tick)
    yield _election(plan, tick)
    for clients in plan.clients:
        tick(f"scalars of an election, N = {clients:,}")
        yield _scalars(replace(plan.election, clients=clients))


def _stragglers(plan: EventsPlan, tick: Tick) -> Row:
    """Run one point of the preset: a tenth of the clients 10 times slower, sequential, one seed."""
    changes = [] if plan.until_s is None else [f"clock.until_s={plan.until_s}"]
    points = load_experiment("stragglers", overrides=changes, seeds=1).points
    wanted = {"mixing.aggregation": "sequential", "world.compute.slowdown": 10}
    point = next(one for one in points if wanted.items() <= (one.at or {}).items())
    job = TrialGroup(point, point.config.seeds[0], point.config.algorithms[:1])
    trial = job.trials[0]
    setting = Workload.of(job, NullSink(), Alone(point.config.clients)).setting(trial)
    spent, simulation = _time_runs(
        lambda: simulation_of(trial, setting, trace=False), plan.repeats, prefixed(tick, "stragglers")
    )
    about = f"{trial.algorithm}, N = {setting.clients}, {point.label}, {simulation.now:g} s of virtual time"
    return Row("a run of stragglers", about, spent, details={"handled": simulation.handled})


def _time_runs(
    make: Callable[[], EventSimulation], repeats: int, tick: Tick
) -> tuple[dict[str, list[float]], EventSimulation]:
    """Time whole runs by the clock and by the processor; returns the last simulation too."""
    spent: dict[str, list[float]] = {"wall": [], "cpu": []}
    for repeat in range(repeats):
        tick(f"{repeat + 1} of {repeats}")
        simulation = make()
        begin, begin_cpu = time.perf_counter(), time.process_time()
        simulation.run()
        spent["wall"].append(time.perf_counter() - begin)
        spent["cpu"].append(time.process_time() - begin_cpu)
    return spent, simulation


def _speeds(
    plan: EventsPlan, tick: Tick, name: str, events: EventSimulation, what: str, most: float | None = None
) -> Row:
    """Time a round of both simulators in turn."""
    synchronous = Simulation(events.setting)

    def a_round() -> None:
        before = events.round
        while events.round == before:
            events.step()

    subjects = {"events": a_round, "synchronous": synchronous.step}
    seconds = in_turn(subjects, plan.repeats, prefixed(tick, name))
    size = plan.equal
    about = f"N = {size.clients}, {size.hidden} units, {size.samples} samples: {what}"
    return Row(name, about, seconds, of="events", to="synchronous", most=most)


def _dry(plan: EventsPlan, tick: Tick) -> Row:
    setting = replace(make_setting(plan.dry), aggregation="sequential")
    spent, simulation = _time_runs(
        lambda: EventSimulation(setting, options=EventOptions(rounds=plan.dry_rounds, dry=True)),
        plan.repeats,
        prefixed(tick, "dry"),
    )
    about = (
        f"N = {plan.dry.clients}, degree {plan.dry.degree}, {plan.dry_rounds} rounds; deliveries, ends of jobs and "
        "wakes, each counted once, per second of the processor"
    )
    details = {"handled": simulation.handled, "least": LEAST_EVENTS}
    return Row("events without training", about, spent, details=details)


def _election(plan: EventsPlan, tick: Tick) -> Row:
    size = plan.election
    tick(f"an election, N = {size.clients:,}")
    seconds = hold_election(make_setting(size)).seconds
    about = f"N = {size.clients:,}, degree {size.degree}, {size.parameters} floats: the start is elected, then a round"
    return Row("an election", about, {"wall": [seconds]}, details={"most": MOST_ELECTION_S})


class ElectionSent(NamedTuple):
    """What an election sent besides models: the wave, which is held once, and all turns; and how long it took.

    Everybody begins a wave at once, and a peer joins each better one that reaches it: about log N of them.
    """

    wave: int
    turns: int
    seconds: float


def hold_election(setting: Setting) -> ElectionSent:
    """Elect a start in virtual time, then train a round."""
    simulation = EventSimulation(setting, options=EventOptions(rounds=1))
    forward, sent = simulation.host.send, Counter[type]()

    def count(sender: int, receivers: tuple[int, ...], message: Any, number: int) -> None:
        if type(message) in WAVE or type(message) in TURN:
            sent[type(message)] += len(receivers) * scalars(message)
        forward(sender, receivers, message, number)

    simulation.host.send = count
    begin = time.perf_counter()
    simulation.run()
    seconds = time.perf_counter() - begin
    return ElectionSent(sum(sent[kind] for kind in WAVE), sum(sent[kind] for kind in TURN), seconds)


def _scalars(size: Size) -> Row:
    setting = make_setting(size)
    sent = hold_election(setting)
    (result,) = Simulation(setting).elections
    turns = len(result.turns)
    flooding = flooded_scalars(setting.graph, setting.seed, [turn.accepted for turn in result.turns])
    details = {
        "x": size.clients,
        "edges": setting.graph.number_of_edges(),
        "candidates": turns,
        "wave": sent.wave,
        "turn": sent.turns / turns,
        "flooding": flooding / turns,
    }
    about = f"degree {size.degree}, numbers besides models: of the wave once, of a turn per candidate"
    return Row(f"scalars, N = {size.clients:,}", about, {"wall": [sent.seconds]}, details=details)


def fits(measured: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Fit the exponents of an election's scalars against N, from rows as JSON holds them."""
    mine = [row["details"] for row in measured if "flooding" in row["details"]]
    fits = {name: fit([row["x"] for row in mine], [row[name] for row in mine]) for name in SCALARS}
    return {name: one._asdict() for name, one in fits.items() if one is not None}


def flooded_scalars(graph: nx.Graph, seed: int, accepted: Sequence[bool]) -> int:
    """Count what an election by flooding would send: every vote over every edge, every better bid to all neighbours.

    accepted: of each turn. Who bids how much does not matter much: the lots stand for all bids.
    """
    clients, ends = len(graph), 2 * int(graph.number_of_edges())
    bids = 2 * _flooded_bids(graph, {i: -float(lot(seed, i)) for i in graph})
    centres = list(accumulate(accepted, initial=0))[:-1]
    votes = sum(clients * ends * (5 + 2 * held) for held in centres if held)
    return len(centres) * (bids + 2 * ends + 2 * (clients - 1)) + votes


def _flooded_bids(graph: nx.Graph, bids: Mapping[int, float]) -> int:
    """Count the messages of the bidding: everybody forwards every improvement to all neighbours, hop by hop."""
    best = {i: (value, -i) for i, value in bids.items()}
    outgoing = {i: [best[i]] for i in graph}
    messages = 0
    while any(outgoing.values()):
        messages += sum(len(sent) * int(graph.degree(i)) for i, sent in outgoing.items())
        incoming = {i: [offered for m in sorted(graph.neighbors(i)) for offered in outgoing[m]] for i in graph}
        outgoing = {i: [] for i in graph}
        for i, offers in incoming.items():
            for offered in offers:
                if offered > best[i]:
                    best[i] = offered
                    outgoing[i].append(offered)
    return messages
