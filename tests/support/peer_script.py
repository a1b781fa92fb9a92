"""Scripts for one peer: lines of input, each followed by what the peer does, indented. Models are single numbers.

    peer neighbours=(1, 2), aggregation="batch"    the peer, always number 0; the options that differ
    begin                                          an input; `@5 begin`: at 5 s, and from then on
    receive 1 Hello(0, 3, 1)                       a message from neighbour 1
    trained 0 2.5 [loss]                           the job's result: cluster, model; also warmed, drawn, scored, rested
    observed 0.5 0.3 0.1                           of a survey: losses of the own model and the partner, optimism
    wake                                           as often as something is due now
    rewire 2 3                                     the neighbours from now on
    measured 0 10 5                                the curve: cluster, held-out samples, the best number of steps
    show                                           the state, its round and models
    restart [SAVE]                                 a new life, with the last save or a changed one, or None

DFCA_REWRITE=1 pytest tests/peer/test_peer.py writes what the peers do into the scripts: read the difference.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dfca.base.table import fields_of
from dfca.core.exchange import Rules
from dfca.core.method import LocalOptions, Method
from dfca.core.rules.election import ElectionOptions, Tally, lot, no_votes
from dfca.core.rules.merging import Merge, MergeOptions, differ
from dfca.core.rules.personal import GRID
from dfca.core.rules.relay import Offer
from dfca.core.rules.staleness import Staleness
from dfca.core.state import Message
from dfca.peer.peer import Peer
from dfca.peer.records import messages
from dfca.peer.records.lineage import Entry, Lineage
from dfca.peer.records.options import PeerOptions
from dfca.peer.records.work import Curve, Job, Losses, Observe, OwnCurve, Score, Trained, Warm


def elected(voters: int, *slots: int, root: int = 9, before: Lineage = ()) -> Lineage:
    """Make a lineage: one more election."""
    return (*before, Entry(voters, 0, root, 0, 0, slots))


A = elected(3, 0, 1)
S = Entry(3, 0, 1, 0, 0, (0, 1), (Merge(0, 1, 0.25, 0.1),), (), True)
Q = Entry(3, 0, 1, 0, 0, ())
LINEAGES = {
    "A": A,
    "A2": elected(3, 2, before=A),
    "B": elected(5, 0, 1),
    "LOW": elected(1, 0),
    "MANY": elected(30, 0, 1),
    "AS": (*A, S),
    "AQ": (*A, Q),
    "AX": (*A, S._replace(slots=(0,))),
}


def model(value: float) -> Tensor:
    return torch.tensor([float(value)], dtype=torch.float64)


def update(sender: int, cluster: int, round: int, value: float, lineage: Lineage = (), **fields: Any) -> Any:
    parts = {key: fields.pop(key) for key in ("degree", "updates") if key in fields}
    message = Message(sender, cluster, round, parts.get("degree", 2), model(value), None, parts.get("updates", 1))
    return messages.Update(message, fields.pop("parts", 1), lineage, **fields)


def copied(sender: int, cluster: int, value: float, stamp: int, origin: int) -> Message:
    return Message(sender, cluster, stamp, 2, model(value), Offer(sender, stamp, origin), 1)


def curve(best: int) -> tuple[float, ...]:
    """Make a curve with the loss 0 after this many steps, and 1 after all others."""
    return tuple(float(steps != best) for steps in GRID)


NAMES: dict[str, Any] = {
    **{name: value for name, value in vars(messages).items() if isinstance(value, type)},
    **LINEAGES,
    "Update": update,
    "Copy": lambda sender, cluster, value, stamp, origin, lineage=(): messages.Copy(
        copied(sender, cluster, value, stamp, origin), lineage
    ),
    "BankCopy": lambda sender, cluster, value, round, clusters, lineage=(): messages.BankCopy(
        copied(sender, cluster, value, round, -2), round, clusters, lineage
    ),
    "S": S,
    "Q": Q,
    "OWN": messages.Key(0, 0, -lot(0, 0), 0, 0),
    "MergeOptions": MergeOptions,
    "Offer": Offer,
    "Entry": Entry,
    "ElectionOptions": ElectionOptions,
    "Staleness": Staleness,
    "model": model,
    "nan": float("nan"),
    "votes": no_votes,
    "curve": curve,
}


KINDS = {
    "trained": "Train",
    "warmed": "WarmUp",
    "drawn": "Draw",
    "scored": "Score",
    "rested": "Rest",
    "measured": "Curve",
    "tuned": "Personalise",
    "observed": "Observe",
}


class Script:
    """A peer and what it has done."""

    def __init__(self) -> None:
        self.now, self.jobs, self.saved, self.life = 0.0, list[Job](), None, 0
        self.bank = torch.zeros(0, 1, dtype=torch.float64)
        self.options: PeerOptions
        self.peer: Peer

    def run(self, text: str) -> str:
        """Carry a script out; return it with what the peer does."""
        lines = []
        for line in text.splitlines():
            if line.startswith("    "):
                continue
            lines.append(line)
            if line.strip() and not line.startswith("#"):
                words = line
                if line.startswith("@"):
                    at, words = line[1:].split(maxsplit=1)
                    self.now = float(at)
                lines += [f"    {shown}" for shown in self.step(words)]
        return "\n".join(lines) + "\n"

    def step(self, line: str) -> list[str]:
        """Carry one line out."""
        what, _, rest = line.partition(" ")
        if what == "peer":
            self._make(eval(f"dict({rest})", NAMES))
        elif what == "restart":
            self.life, self.jobs = self.life + 1, []
            self.bank = self.bank[:0]
            saved = eval(rest, NAMES | {"SAVE": self.saved}) if rest else self.saved
            self.peer = Peer(self.options, self._allocate, self.life, saved)
        elif what == "show":
            return [self._show()]
        elif what == "wake":
            while (due := self.peer.next_wake()) is not None and due <= self.now:
                self.peer.wake(self.now)
        elif what == "begin":
            self.peer.begin(self.now, late=rest == "late")
        elif what in ("connect", "disconnect"):
            {"connect": self.peer.connected, "disconnect": self.peer.disconnected}[what](int(rest), self.now)
        elif what == "rewire":
            self.peer.rewire(tuple(map(int, rest.split())), self.now)
        elif what == "receive":
            sender, _, message = rest.partition(" ")
            self.peer.receive(int(sender), eval(message, NAMES), self.now)
        else:
            self._finish(what, [float(word) for word in rest.split()])
        return self._outputs()

    def _make(self, given: dict[str, Any]) -> None:
        rules = {key: given.pop(key) for key in ("exchange", "weights", "share") if key in given}
        neighbours = given.pop("neighbours", (1, 2))
        fields = {
            "start": "shared",
            "rounds": 100,
            "seed": 0,
            "clusters": 1,
            "join_s": 5.0,
            "hang_s": 5.0,
            **given,
        }
        method = {field.name: fields.pop(field.name) for field in fields_of(Method) if field.name in fields}
        self.options = PeerOptions(
            Rules(0, len(neighbours), **rules),
            neighbours,
            1,
            dtype=torch.float64,
            method=Method(**{"aggregation": "sequential", "local": LocalOptions(50), **method}),
            **fields,
        )
        self.peer = Peer(self.options, self._allocate)

    def _allocate(self, models: int) -> Tensor:
        bank = torch.zeros(models, 1, dtype=torch.float64)
        bank[: len(self.bank)] = self.bank[:models]
        self.bank = bank
        return bank

    def _finish(self, what: str, numbers: list[float]) -> None:
        """End the job that was asked for last and fits."""
        kind = KINDS[what]
        place = next(n for n, job in enumerate(self.jobs) if type(job).__name__ == kind)
        job, result = self.jobs.pop(place), None
        if what == "trained":
            cluster, value, *loss = numbers
            fine = value == value
            result = Trained(int(cluster), fine, model(value) if fine else None, *(loss or [1.0]), samples=20)
        elif what == "warmed":
            value, *own = numbers
            result = Warm(model(value), losses([own or [1.0]]))
        elif what == "observed":
            own, partner, optimism = numbers
            result = differ(own, partner), optimism
        elif what == "drawn":
            result = torch.stack([model(value) for value in numbers])
        elif what == "scored":
            assert isinstance(job, Score)
            result = losses([[value] for value in numbers])
        elif what == "measured":
            cluster, samples, best = map(int, numbers)
            result = OwnCurve(cluster, samples, torch.tensor(curve(best), dtype=torch.float64))
        self.peer.finished(job, result, self.now)

    def _outputs(self) -> list[str]:
        ready = self.peer.ready()
        if ready.save:
            self.saved = self.peer.save()
        self.jobs += ready.work
        sent: dict[str, list[int]] = {}
        for to, message in ready.messages:
            sent.setdefault(show(message), []).append(to)
        return [
            *(["save"] if ready.save else []),
            *(f"to {', '.join(map(str, who))}: {message}" for message, who in sent.items()),
            *(f"work {show_job(job)}" for job in ready.work),
            *(show_note(note, self.peer) for note in ready.notes),
        ]

    def _show(self) -> str:
        peer = self.peer
        bank = "no models" if peer.bank is None else "models " + " ".join(f"{x:g}" for x in peer.bank[:, 0].tolist())
        refused = "".join(f"; refused {n} {reason}" for reason, n in sorted(peer.refused.items()))
        beside = "" if peer.background is None else f"; beside it {type(peer.background).__name__}"
        due = peer.next_wake()
        wakes = "" if due is None else "; wakes now" if due < 0 else f"; wakes at {due:g}"
        return (
            f"{peer.state.value}, round {peer.round}, {bank}{show_lineage(peer.lineage)}, "
            f"{peer.waits()}{beside}{wakes}{refused}"
        )


def losses(rows: list[list[float]]) -> Losses:
    """Make losses of models, the same on both parts, with two samples each."""
    table = torch.tensor([row * 2 if len(row) == 1 else row for row in rows], dtype=torch.float64)
    return Losses(table, table)


def show_lineage(lineage: Lineage) -> str:
    if not lineage:
        return ""
    name = next((name for name, known in LINEAGES.items() if known == lineage), None)
    last = lineage[-1]
    return f", lineage {name or f'of {last.voters} voters, root {last.root}, clusters {last.slots}'}"


def show(message: Any) -> str:
    """Write a message, without what is as usual."""
    parts = []
    for name, value in zip(message._fields, message, strict=True):
        if isinstance(value, Message):
            offer = "" if value.offer is None else f", stamp {value.offer.stamp} of {value.offer.origin}"
            parts.append(
                f"cluster {value.cluster}, round {value.round}, {show_model(value)}, {value.updates} updates{offer}"
            )
        elif name in ("lineage", "base"):
            parts += [show_lineage(value)[2:]] if value else []
        elif name == "key":
            parts.append(f"wave {value.attempt}.{value.decided} of {value.root}")
        elif name == "offers":
            parts += [f"offers {', '.join(f'{j} of round {offer.stamp}' for j, offer in value)}"] if value else []
        elif name == "values":
            parts += [f"values {' '.join(f'{number:g}' for number in value)}"] if value else []
        elif isinstance(value, Tally):
            parts.append(f"{value.voters} voters, {value.movers} movers")
        elif isinstance(value, Tensor):
            parts.append(f"model {value.item():g}")
        elif value not in ((), None) and (name, value) not in (("parts", 1), ("age_s", 0.0), ("incarnation", 0)):
            parts.append(f"{name} {value}")
    return f"{type(message).__name__} {', '.join(parts)}".strip()


def show_model(message: Message) -> str:
    return f"model {message.model.item():g}"


def show_job(job: Job) -> str:
    if isinstance(job, Score | Observe | Curve):
        return f"{type(job).__name__} {' '.join(f'{value:g}' for value in job.models[:, 0].tolist())}"
    parts = [f" {name} {value}" for name, value in vars(job).items() if str(value) not in ("None", "False", "()")]
    return type(job).__name__ + "".join(parts)


def show_note(note: Any, peer: Peer) -> str:
    parts = [note.kind]
    parts += [f"of {note.other}"] if note.other >= 0 else []
    parts += [f"cluster {note.cluster}"] if note.cluster >= 0 else []
    parts += [f"round {note.round}"] if note.round >= 0 else []
    parts += [f"({note.number:g})"] if note.number else []
    return "note " + " ".join(parts)
