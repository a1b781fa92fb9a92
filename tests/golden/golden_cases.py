"""What the golden files hold, computed by the code of today: `make.py` stores it, the tests compare.

Everything here goes through entry points that drivers and users have: `dfca.simulate`, `run`, the inputs of `Peer`.
"""

from __future__ import annotations

import asyncio
import copy
import io
import math
import tempfile
import time
import tomllib
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tomli_w
import torch
from torch import Tensor

import dfca
from dfca.base.renamed import earlier
from dfca.base.table import fields_of
from dfca.core.exchange import Rules
from dfca.core.method import MergeOptions, Method
from dfca.core.rules.merging import differ
from dfca.core.rules.personal import GRID
from dfca.core.rules.staleness import Staleness
from dfca.experiment.config import Config
from dfca.experiment.load import Experiment, load_experiment, preset_text, presets
from dfca.node.disk.folder import NodeFolder
from dfca.node.service import Service, ServiceOptions
from dfca.node.task.facts import Facts
from dfca.node.task.founding import Founding, init_swarm
from dfca.peer.packing import Packer, Unpacker
from dfca.peer.peer import Peer
from dfca.peer.records.options import PeerOptions
from dfca.peer.records.work import Losses, OwnCurve, Trained, Warm

HERE = Path(__file__).parent
VERSIONS = sorted((path for path in HERE.iterdir() if (path / "bits.json").exists()), key=lambda path: path.name)
"""The folders that `make.py` wrote, the newest last."""
NEXT = HERE / "next.json"
"""The numbers that changed on purpose since the newest version: `make.py next`. Of 0.3 they are those of surveys, which
run beside rounds, ask about pairs of clusters, and take effect a round later."""


# Numbers.


def differences(stored: Any, now: Any, rel: float = 0.0, at: str = "") -> list[str]:
    """List where two JSON values differ: floats by more than `rel`, anything else at all."""
    if isinstance(stored, dict) and isinstance(now, dict):
        keys = [f"{at}: keys {sorted(stored.keys() ^ now.keys())}"] if stored.keys() != now.keys() else []
        return keys + [
            difference
            for key in stored.keys() & now.keys()
            for difference in differences(stored[key], now[key], rel, f"{at}.{key}")
        ]
    if isinstance(stored, list) and isinstance(now, list):
        if len(stored) != len(now):
            return [f"{at}: {len(stored)} items, now {len(now)}"]
        pairs = enumerate(zip(stored, now, strict=True))
        return [difference for place, (a, b) in pairs for difference in differences(a, b, rel, f"{at}[{place}]")]
    if isinstance(stored, float) and isinstance(now, float):
        same = math.isclose(stored, now, rel_tol=rel, abs_tol=rel * 1e-3) or (stored != stored and now != now)
        return [] if same else [f"{at}: {stored!r}, now {now!r}"]
    return [] if stored == now and type(stored) is type(now) else [f"{at}: {stored!r}, now {now!r}"]


# Runs.

TINY: dict[str, Any] = {
    "clusters": 2,
    "seeds": [0],
    "data": {"name": "digits", "samples_per_client": 20, "test_samples_per_client": 10},
    "model": {"name": "mlp", "hidden": 2},
    "topology": {"name": "erdos-renyi", "p": 0.6},
    "checkpoint": {"every_s": 1e9},
}
RUNS: dict[str, dict[str, Any]] = {
    "rounds": {
        **TINY,
        "clients": 9,
        "rounds": 20,
        "algorithms": ["dfca-auto", "dfca-gi", "ifca"],
        "local": {"steps": 2, "batch_size": 8, "learning_rate": 0.3},
        "evaluation": {"every": 5, "samples": 20},
    },
    "virtual": {
        **TINY,
        "clients": 4,
        "rounds": 4,
        "topology": {"name": "ring"},
        "algorithms": ["dfca-auto"],
        "local": {"steps": 2, "learning_rate": 0.3},
        "evaluation": {"every": 2, "samples": 20},
        "world": {"preset": "wifi", "trace": True, "faults": {"loss": 0.05}},
        "clock": {"timeout_s": 5.0},
    },
}
RUNS["server"] = RUNS["virtual"] | {"algorithms": ["ifca"], "world": {"preset": "wifi", "faults": {"loss": 0.05}}}
"""The configs of the stored runs."""
STOPS = {"rounds": 13, "virtual": 2, "server": 3}
"""The round of the first trial after which the interrupted runs were stopped."""


def experiment_of(name: str) -> Experiment:
    """Make the experiment of a stored run."""
    return Experiment(f"golden-{name}", "default", Config.of(RUNS[name]))


# Digests.

OVERRIDES = (
    ("quickstart", ("rounds=7", "local.learning_rate=0.05")),
    ("quickstart", ('clusters="auto"', "data.distributions=4", "mixing.share=relay", "mixing.robust=clip")),
    ("quickstart", ("world.preset=wifi", "clock.until_s=60", "clock.staleness.kind=polynomial")),
    ("quickstart", ("liars.share=0.2", "liars.kind=flip-signs", "personal.steps=20")),
    ("quickstart", ("data.skew=mixed", "data.alpha=0.3", "algorithm.dfca-auto.warmup_steps=20")),
    ("table3-skew", ("seeds=2", "rounds=30")),
)


WITH_LAST_STEP = (
    *("table1-mnist", "table1-emnist", "table1-cifar10", "table2-mnist", "table2-emnist", "table2-femnist"),
    *("table4-femnist-k", "figure-femnist-k", "figure-convergence"),
)
"""Presets that had a row "dfedavgm + last step" in 0.2."""
WITHOUT_MERGING = ("churn", "delays", "late-joiner", "lossy", "partition", "stragglers")
"""Presets whose dfca-auto merged nothing in 0.2."""


def digests() -> dict[str, Any]:
    """Compute the first digits of the digests of all points of all presets in every scale, and of some overrides.

    Presets with recipes came to train in another way: what 0.2 ran is their recipe "text". And they came to compare one
    training for all rows: `_as_in_0_2` gives rows their extras back.
    """
    by_preset: dict[str, Any] = {}
    for name in presets():
        values = tomllib.loads(preset_text(name))
        recipe = "text" if "recipe" in values else None
        for scale in ("default", *values.get("scale", {})):
            if scale != "hour":  # since 0.3
                with _as_in_0_2(name, values) as path:
                    by_preset[f"{name} {scale}"] = _digests(load_experiment(path, scale, device="cpu", recipe=recipe))
    for name, overrides in OVERRIDES:
        text = " ".join(overrides).replace("algorithm.dfca-auto", "algorithm.dfca")  # as 0.2 stored it
        with _as_in_0_2(name, tomllib.loads(preset_text(name))) as path:
            by_preset[f"{name} --set {text}"] = _digests(load_experiment(path, None, overrides, device="cpu"))
    return by_preset


@contextmanager
def _as_in_0_2(name: str, values: dict[str, Any]) -> Iterator[Path]:
    """Write a preset with the rows that it had in 0.2, whose dfca-auto trained with momentum and took a last step."""
    values = copy.deepcopy(values)
    tables = values.get("algorithm", {})
    if name not in ("liars", "rivals"):
        tables.pop("dfedavgm", None)
        for key in ("momentum", "personal"):
            tables.get("dfca-auto", {}).pop(key, None)
        if name in WITHOUT_MERGING:
            tables["dfca-auto"] = {"merge": False}
        if name == "stragglers":
            tables["dfca-auto"] |= {"warmup_steps": 20, "warmup_momentum": 0.9}
        values["algorithm"] = {label: table for label, table in tables.items() if table}
    values.pop("extras", None)
    rows = [row for row in values["algorithms"] if not isinstance(row, dict)]
    one_model = {"name": "dfedavgm", "label": "dfedavgm + last step", "personal": {"steps": "auto"}}
    plain = {"name": "dfca-auto", "label": "dfca-auto, plain", "momentum": 0.0, "personal": {"steps": 0}}
    if name in ("quickstart", "soft", "har", "forecast"):
        rows += [plain, one_model]
    elif name in WITH_LAST_STEP:
        rows.append(one_model)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.toml"
        text = preset_text(name) if name == "rivals" else tomli_w.dumps({**values, "algorithms": rows})
        path.write_text(text)  # the order of the keys of points is that of their labels
        yield path


def _digests(experiment: Experiment) -> dict[str, str]:
    return {point.label or "-": point.digest[:16] for point in experiment.points}


# Bits.

VARIANTS: dict[str, dict[str, Any]] = {
    "batch": {"aggregation": "batch"},
    "sequential": {"aggregation": "sequential"},
    "ideal": {"world": "ideal"},
    "faulty": {"world": {"preset": "wifi", "faults": {"loss": 0.1, "duplication": 0.1}, "churn": {"away": 0.1}}},
}
EXTRAS: dict[str, tuple[str, dict[str, Any]]] = {
    "relay": ("dfca-gi", {"share": "relay"}),
    "relay in virtual time": ("dfca-gi", {"share": "relay", "world": "wifi"}),
    "share all, metropolis": ("dfca-li", {"share": "all", "weights": "metropolis"}),
    "clip": ("dfca-auto", {"robust": "clip"}),
    "median": ("dfca-gi", {"robust": "median"}),
    "trimmed": ("dfca-gi", {"robust": "trimmed", "world": "ideal"}),
    "half of the clients": ("dfca-auto", {"participation": 0.5}),
    "half of the clients, with a server": ("ifca", {"participation": 0.5}),
    "batches with momentum": ("dfca-gi", {"batch_size": 8, "momentum": 0.5, "weight_decay": 0.01}),
    "liars": ("dfca-gi", {"liars": {"share": 0.2, "kind": "flip-signs"}, "robust": "clip"}),
    "quiet rounds": ("dfca-gi", {"quiet_rounds": 2}),
    "merging": ("dfca-auto", {"clients": 9, "clusters": "auto", "rounds": 20}),
    "merging in virtual time": ("dfca-auto", {"clients": 9, "clusters": "auto", "rounds": 20, "world": "wifi"}),
}
NO_PEERS_IN_TIME = ("pens", "dac")
"""They choose their peers by losses, which virtual time does not have."""


def bit_cases() -> list[tuple[str, str, dict[str, Any]]]:
    """List the name, the algorithm and the options of every tiny run; names are those of 0.2."""
    cases = [
        (f"{earlier(algorithm)}, {variant}", algorithm, options)
        for algorithm in dfca.ALGORITHMS
        for variant, options in VARIANTS.items()
        if not (algorithm in NO_PEERS_IN_TIME and "world" in options)
    ]
    return cases + [
        (f"{earlier(algorithm)}, {name}", algorithm, options) for name, (algorithm, options) in EXTRAS.items()
    ]


def bits_of(algorithm: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Run one of the cases in float64, and return its last scores and checksums of its banks."""
    given = {"clients": 6, "clusters": 2, "rounds": 6, "steps": 3, "learning_rate": 0.2, **options}
    clients, seed = given.pop("clients"), 3
    data = dfca.DataOptions(name="digits", samples_per_client=16, test_samples_per_client=8)
    split = dfca.make_split(data, clients=clients, clusters=2, seed=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dfca.DfcaWarning)
        result = dfca.simulate(
            lambda: dfca.mlp((1, 8, 8), 10, 4),
            split,
            algorithm,
            topology={"name": "erdos-renyi", "p": 0.6},
            seed=seed,
            dtype=torch.float64,
            evaluate_every=3,
            evaluation_samples=16,
            **given,
        )
    last = result.evaluations[-1]
    kept = ("round", "accuracy", "train_loss", "cluster_accuracy", "live_clusters", "time_s", "bytes_sent")
    banks = result.banks
    return {
        "assignments": result.assignments.tolist(),
        **{key: last[key] for key in (*kept, "accuracy_by_client") if key in last},
        "shape": list(banks.shape),
        "sum": float(banks.sum()),
        "norms": banks.norm(dim=2).flatten().tolist(),
        "place": float((banks.flatten() * torch.arange(1.0, banks.numel() + 1, dtype=banks.dtype)).norm()),
    }


# Facts.


def facts_of(scratch: Path) -> dict[str, Facts]:
    """Make facts of several kinds; two of them from a CSV file, as `dfca node init` does."""
    founder, table = "a" * 52, {"features": ["a", "b", "c"]}
    csv = scratch / "samples.csv"
    write_samples(csv)

    def facts(name: str, **given: Any) -> Facts:
        base = {"name": name, "founder": founder, "nonce": "0" * 32, "inputs": table, "classes": ["rest", "walk"]}
        return Facts.checked(base | given)

    def founded(name: str, **given: Any) -> Facts:
        # Since 0.3 a new swarm guards its folds.
        agreed = {"nonce": "1" * 32, "name": name, "robust": "none", **given.pop("agreed", {})}
        return init_swarm(scratch, founder, Founding(str(csv), swarm=name, name="device", agreed=agreed, **given))[1]

    images = {"shape": [1, 8, 8], "kind": "images"}
    digits = [str(digit) for digit in range(10)]
    staleness = {"kind": "polynomial", "unit": "seconds", "power": 0.25}
    return {
        "plain": facts("plain"),
        "csv": founded("csv", label="activity", hidden=(8,)),
        "csv-regression": founded("csv-regression", label="c", ignore=("activity",), task="regression", hidden=(4, 4)),
        "dfca-gi": facts("dfca-gi", algorithm="dfca-gi", clusters=3, aggregation="batch", timeout_s=30.0, seed=7),
        "dfca-li": facts("dfca-li", algorithm="dfca-li", clusters=2, share="relay", weights="metropolis"),
        "merging": facts("merging", merging={"opens": 6, "worth": 0.1}, personal="auto", election={"quorum": 0.5}),
        "images": facts(
            "images", inputs=images, classes=digits, model={"name": "cnn", "hidden": [32], "size": 1000, "digest": "ab"}
        ),
        "encoded": facts("encoded", payload="bf16", compression="zstd", starts_with=5),
        "int8": facts("int8", payload="int8", local={"steps": 3, "batch_size": None, "momentum": 0.5}),
        "guarded": facts("guarded", robust="clip", rounds=100, staleness=staleness, revives=False),
        "dfedavgm": facts("dfedavgm", algorithm="dfedavgm", share="all", personal=20),
        "factory": facts("factory", algorithm="local", model={"name": "factory", "factory": "models:make"}),
    }


def write_samples(path: Path) -> None:
    """Write a table of 60 samples with two classes."""
    rows = [(k * 7 % 13 / 4 - 1.5, k * 5 % 11 / 3 - 1.5, k * 3 % 7 / 2 - 1.5) for k in range(60)]
    lines = [f"{a:.4f},{b:.4f},{c:.4f},{'walk' if a + b > 0 else 'rest'}" for a, b, c in rows]
    path.write_text("\n".join(["a,b,c,activity", *lines]) + "\n")


# A node by itself.


class NoNeighbours:
    """The transport of a node whose swarm has no other members."""

    def __init__(self) -> None:
        self.on_neighbours: Any = None

    async def start(self) -> str:
        """Listen nowhere."""
        return "127.0.0.1:7447"

    async def stop(self) -> None:
        """Do nothing."""

    def open(self, node: Any) -> None:
        """Do nothing: no link comes up."""

    def send(self, neighbour: int, message: Any) -> None:
        """Lose a message that has no receiver."""

    def when_quiet(self, call: Any) -> None:
        """Call back at once: nothing is on its way."""
        asyncio.get_running_loop().call_soon(call)

    def close(self) -> None:
        """Do nothing."""

    def status(self) -> dict[str, Any]:
        """Return what a service asks for."""
        return {"refused": {}, "neighbours": {}, "bytes_in": 0, "bytes_out": 0, "silent_s": {}}


def run_node(folder: Path, rounds: int) -> dict[str, Any]:
    """Run the node of a folder until it has done some rounds more; return its last status."""

    async def life() -> dict[str, Any]:
        options = ServiceOptions(log_stream=io.StringIO())
        service = Service(NodeFolder.load(folder), options, lambda _: NoNeighbours())  # type: ignore[arg-type, return-value]
        task = asyncio.create_task(service.run())
        limit = time.monotonic() + 60
        begin = None
        while not task.done():
            assert time.monotonic() < limit, "the node does not train"
            await asyncio.sleep(0.01)
            if hasattr(service, "node"):
                now = service.status()["round"]
                begin = now if begin is None else begin
                if now >= begin + rounds:
                    break
        status = service.status()
        service.stop()
        await task
        return status

    return asyncio.run(life())


# Peers: a small swarm with made-up samples, whose driver is the 90 lines below.

SHORT = ("Score", "Draw")
LENGTHS = {"WarmUp": 4, "Train": 3, "Rest": 2, "Curve": 2, "Personalise": 2}
"""Ticks that the jobs take, and some more for some peers."""
SWARMS: dict[str, dict[str, Any]] = {
    "elected": {
        "start": "elected",
        "rounds": 24,
        "clusters": None,
        "aggregation": "sequential",
        "merging": MergeOptions(opens=3, first=3, every=2, steps=1),
        "personal": "auto",
        "late": {9: 45},
        "lost": (62, 70, 2, 3),
        "changes": None,
        "goals": ((4.0, 1.0), (-4.0, -1.0), (4.0, 2.25)),
    },
    "drawn": {
        "start": "shared",
        "rounds": 12,
        "clusters": 3,
        "aggregation": "batch",
        "timeout_s": 12.0,
        "participation": 0.75,
        "share": "relay",
        "late": {9: 25},
        "lost": (20, 33, 2, 3),
        "changes": None,
    },
    "drifting": {
        "start": "elected",
        "rounds": 40,
        "clusters": 2,
        "aggregation": "sequential",
        "revives": True,
        "late": {},
        "lost": (62, 70, 2, 3),
        "changes": 50,
    },
    "endless": {
        "start": "own",
        "rounds": 2**53,
        "clusters": 2,
        "aggregation": "sequential",
        "staleness": Staleness("polynomial", 0.5, 4.0, "seconds"),
        "weights": "metropolis",
        "share": "all",
        "personal": "auto",
        "late": {9: 10},
        "lost": (62, 70, 2, 3),
        "changes": None,
    },
}
PEERS, END = 10, 320
EDGES = [(i, (i + 1) % PEERS) for i in range(PEERS)] + [(0, 4), (2, 7), (1, 5), (3, 8)]
GOALS, DRIFTED = ((4.0, 1.0), (-4.0, -1.0)), (3.0, -5.0)


class Swarm:
    """Peers in lock-step: a message takes a tick, work some; everything follows from the state that `pack` stores."""

    def __init__(self, name: str) -> None:
        given = dict(SWARMS[name])
        self.late, self.lost, self.changes = given.pop("late"), given.pop("lost"), given.pop("changes")
        self.goals = given.pop("goals", GOALS)
        rules = {key: given.pop(key) for key in ("share", "weights") if key in given}
        names = [field.name for field in fields_of(Method)]
        method = Method(**{name: given.pop(name) for name in names if name in given})
        near = {
            i: tuple(sorted({*(b for a, b in EDGES if a == i), *(a for a, b in EDGES if b == i)})) for i in range(PEERS)
        }
        self.options = [
            PeerOptions(
                Rules(i, len(near[i]), **rules),
                near[i],
                2,
                dtype=torch.float64,
                seed=5,
                join_s=8.0,
                hang_s=20.0,
                method=method,
                **given,
            )
            for i in range(PEERS)
        ]
        self.tick = 0
        self.peers: list[Peer | None] = [None] * PEERS
        self.banks = [torch.zeros(0, 2, dtype=torch.float64) for _ in range(PEERS)]
        self.queue: list[Any] = []
        self.jobs: dict[int, tuple[int, Any]] = {}

    def run(self, end: int = END) -> Swarm:
        """Go on until a tick."""
        while self.tick < end:
            self._step()
            self.tick += 1
        return self

    def pack(self) -> dict[str, Any]:
        """Store everything as JSON: the state of every peer, what is on its way, and their models."""
        packer = Packer()
        ends = [
            [i, end] for i, (end, job) in sorted(self.jobs.items()) if self.peers[i] is not None and job is self._job(i)
        ]
        facts = {
            "tick": self.tick,
            "peers": [None if peer is None else peer.state_of() for peer in self.peers],
            "queue": self.queue,
            "ends": ends,
        }
        packed = packer.pack(facts)
        held = {
            name: [str(tensor.dtype), list(tensor.shape), tensor.flatten().tolist()]
            for name, tensor in packer.tensors.items()
        }
        return {"packed": packed, "tensors": held, "banks": [bank.tolist() for bank in self.banks]}

    @classmethod
    def unpack(cls, name: str, stored: Mapping[str, Any]) -> Swarm:
        """Go on from what `pack` stored."""
        swarm = cls(name)
        tensors = {
            key: torch.tensor(values, dtype=getattr(torch, kind.removeprefix("torch."))).view(shape)
            for key, (kind, shape, values) in stored["tensors"].items()
        }
        facts = Unpacker(tensors).unpack(stored["packed"])
        swarm.tick, swarm.queue = facts["tick"], facts["queue"]
        swarm.banks = [torch.tensor(bank, dtype=torch.float64).view(-1, 2) for bank in stored["banks"]]
        for i, state in enumerate(facts["peers"]):
            if state is not None:
                swarm.peers[i] = Peer(swarm.options[i], swarm._allocator(i))
                swarm.peers[i].restore(state)  # type: ignore[union-attr]
        jobs = ((i, end, swarm._job(i)) for i, end in facts["ends"])
        swarm.jobs = {i: (end, job) for i, end, job in jobs if job is not None}
        return swarm

    def phases(self) -> list[str]:
        """Name the states of all peers, and what those in a wave wait for."""
        return [
            "absent" if peer is None else f"{peer.state.value}, {peer.waits()}, {type(peer.job).__name__}"
            for peer in self.peers
        ]

    def outcome(self) -> list[Any]:
        """Return what every peer would save: its round, cluster, lineage and models."""
        saves = [None if peer is None else peer.save() for peer in self.peers]
        return [
            None
            if saved is None
            else {
                "round": saved.round,
                "assignment": saved.assignment,
                "lineage": plain(saved.lineage),
                "bank": None if saved.bank is None else saved.bank.tolist(),
                "stamps": list(saved.stamps),
                "updates": list(saved.updates),
                "curve": [saved.curves.due, saved.curves.cluster, saved.curves.picked],
            }
            for saved in saves
        ]

    def _step(self) -> None:
        now, peers = float(self.tick), self.peers
        first, last, a, b = self.lost
        for i in range(PEERS):
            if self.tick == self.late.get(i, 0):
                peers[i] = peer = Peer(self.options[i], self._allocator(i))
                peer.begin(now, late=i in self.late)
                self._drain(i)
        for i, j in EDGES:
            both = peers[i] is not None and peers[j] is not None
            begins = self.tick == max(self.late.get(i, 0), self.late.get(j, 0))
            if both and (begins or ((i, j) == (a, b) and self.tick == last)):
                self._tell(i, "connected", j)
                self._tell(j, "connected", i)
            if both and (i, j) == (a, b) and self.tick == first:
                self.queue = [parcel for parcel in self.queue if {parcel[1], parcel[2]} != {i, j}]
                self._tell(i, "disconnected", j)
                self._tell(j, "disconnected", i)
        arrived = [parcel for parcel in self.queue if parcel[0] <= self.tick]
        self.queue = [parcel for parcel in self.queue if parcel[0] > self.tick]
        for _, sender, receiver, message in arrived:
            self._peer(receiver).receive(sender, message, now)
            self._drain(receiver)
        for i, (end, job) in sorted(self.jobs.items()):
            if end <= self.tick:
                del self.jobs[i]
                self._finish(i, job)
        for _ in range(100):
            due = [i for i, peer in enumerate(peers) if peer is not None and _is_due(peer.next_wake(), now)]
            for i in due:
                self._peer(i).wake(now)
                self._drain(i)
            if not due:
                break

    def _peer(self, i: int) -> Peer:
        peer = self.peers[i]
        assert peer is not None
        return peer

    def _job(self, i: int) -> Any:
        return self._peer(i).job

    def _tell(self, i: int, what: str, other: int) -> None:
        getattr(self._peer(i), what)(other, float(self.tick))
        self._drain(i)

    def _allocator(self, i: int) -> Any:
        def allocate(models: int) -> Tensor:
            if len(self.banks[i]) != models:
                bank = torch.zeros(models, 2, dtype=torch.float64)
                bank[: len(self.banks[i])] = self.banks[i][:models]
                self.banks[i] = bank
            return self.banks[i]

        return allocate

    def _drain(self, i: int) -> None:
        ready = self._peer(i).ready()
        for receiver, message in ready.messages:
            packer = Packer()
            copied = packer.pack(message)  # what is sent does not change with the sender's models
            self.queue.append((self.tick + 1, i, receiver, Unpacker(packer.tensors).unpack(copied)))
        for job in ready.work:
            kind = type(job).__name__
            if kind in SHORT or job is self._peer(i).background:
                self._finish(i, job)
            else:
                self.jobs[i] = self.tick + LENGTHS[kind] + (i % 3 == 0), job

    def _finish(self, i: int, job: Any) -> None:
        self._peer(i).finished(job, getattr(self, f"_{type(job).__name__.lower()}")(i, job), float(self.tick))
        self._drain(i)

    # What comes of the jobs: model (2,), its loss on a sample is the squared distance to it.

    def _samples(self, i: int, part: int) -> list[tuple[float, float]]:
        drifted = self.changes is not None and self.tick >= self.changes and i % 3 == 0
        x, y = DRIFTED if drifted else self.goals[i % len(self.goals)]
        return [(x + i / 8 + (k * 5 + part) % 7 / 8, y - (k * 3 + part) % 5 / 8) for k in range(8)]

    def _losses(self, i: int, models: Tensor, part: int) -> Tensor:
        rows = [[(a - x) ** 2 + (b - y) ** 2 for x, y in self._samples(i, part)] for a, b in models.tolist()]
        return torch.tensor(rows, dtype=torch.float64)

    def _means(self, i: int, part: int = 0) -> list[float]:
        return [math.fsum(row) / 8 for row in self._losses(i, self.banks[i], part).tolist()]

    def _best(self, i: int, closed: tuple[int, ...]) -> tuple[int, float]:
        loss, cluster = min((loss, j) for j, loss in enumerate(self._means(i)) if j not in closed)
        return cluster, loss

    def _nearer(self, i: int, model: Tensor, share: float) -> Tensor:
        samples = self._samples(i, 0)
        goal = [math.fsum(sample[axis] for sample in samples) / 8 for axis in (0, 1)]
        return torch.tensor(
            [a + share * (g - a) for a, g in zip(model.tolist(), goal, strict=True)], dtype=torch.float64
        )

    def _score(self, i: int, job: Any) -> Losses:
        return Losses(self._losses(i, job.models, 1), self._losses(i, job.models, 2))

    def _warmup(self, i: int, job: Any) -> Warm:
        model = self._nearer(i, torch.zeros(2, dtype=torch.float64), 0.75)
        return Warm(model, Losses(self._losses(i, model[None], 1), self._losses(i, model[None], 2)))

    def _train(self, i: int, job: Any) -> Trained:
        cluster, loss = self._best(i, job.closed)
        model = self._nearer(i, self.banks[i][cluster], 0.5)
        return Trained(cluster, True, model, loss, 20, tuple(self._means(i)))

    def _rest(self, i: int, job: Any) -> None:
        return None

    def _draw(self, i: int, job: Any) -> Tensor:
        models = [[1.0, 0.5], [-1.0, 0.25], [0.125, -1.0]]
        return torch.tensor(models[: self.options[i].clusters], dtype=torch.float64)

    def _observe(self, i: int, job: Any) -> Any:
        own, partner = self._losses(i, job.models, 3).mean(dim=1).tolist()
        return differ(own, partner), 0.01

    def _curve(self, i: int, job: Any) -> OwnCurve:
        curve = [1.0 + abs(steps - 10 - i) / 64 for steps in GRID]
        return OwnCurve(self._best(i, job.closed)[0], 10, torch.tensor(curve, dtype=torch.float64))

    def _personalise(self, i: int, job: Any) -> None:
        return None


def _is_due(wake: float | None, now: float) -> bool:
    return wake is not None and wake <= now


def plain(value: Any) -> Any:
    """Turn records into what JSON has: named tuples and dataclasses become tables, tensors lists."""
    if isinstance(value, Tensor):
        return {"dtype": str(value.dtype), "values": value.tolist()}
    if hasattr(value, "_asdict"):
        return {key: plain(item) for key, item in value._asdict().items()}
    if hasattr(value, "__dataclass_fields__"):
        return {key: plain(getattr(value, key)) for key in value.__dataclass_fields__}
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return [plain(item) for item in sorted(value)]
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value
