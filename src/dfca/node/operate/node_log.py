"""What has happened at a node since it started: counts and last values, for its status, metrics and log."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from dfca.node.operate.logs import Log
from dfca.node.operate.status import counted
from dfca.peer.records.work import Note

REMEMBERED = 200  # folds of which the age is remembered


@dataclass
class NodeLog:
    """Counts the notes of a peer by kind. name: returns the name of a member by its number."""

    log: Log
    name: Callable[[int], str] = str
    counts: Counter[str] = field(default_factory=Counter)
    ages: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    finished_at: float | None = None
    round_s: float | None = None
    trained: int | None = None
    now: Callable[[], float] = time.monotonic
    _began: float = 0.0

    def note(self, note: Note) -> None:
        """Count a note, and log it if it is of interest."""
        self.counts[note.kind] += 1
        if note.kind == "start":
            self._began = self.now()
        elif note.kind == "finish":
            self.finished_at = self.now()
            self.round_s = self.finished_at - self._began
            self.trained = None if note.cluster < 0 else note.cluster
            self._log_round(note)
        elif note.kind == "fold":
            self.ages.append(note.number)
        elif note.kind in LOGGED:
            number = int(note.number)
            text = LOGGED[note.kind].format(
                other=self.name(note.other),
                cluster=note.cluster,
                round=note.round,
                are="is" if number == 1 else "are",
                clusters=counted(number, "cluster"),
                models=counted(number, "model"),
                steps=counted(number, "personal step"),
            )
            (self.log.debug if note.kind in ("timeout", "warmed") else self.log.info)(text, event=note.kind)

    def _log_round(self, note: Note) -> None:
        """Log the first ten rounds, then every tenth, then every hundredth; the others as debugging."""
        if note.cluster < 0:
            self.log.warning(f"round {note.round}: training diverged, the model is left as it was; is the data scaled?")
            return
        log = self.log.debug if note.round % 10 ** (len(str(note.round)) - 1) else self.log.info
        text = f"round {note.round} is done, cluster {note.cluster}"
        log(text, event="round", round=note.round, cluster=note.cluster, seconds=self.round_s)

    @property
    def staleness(self) -> float | None:
        """The mean age of the last folds."""
        return sum(self.ages) / len(self.ages) if self.ages else None


LOGGED = {
    "warm": "trains a model of its own, to vote with",
    "warmed": "the warm-up ended",
    "elect": "an election ended: there {are} {clusters}",
    "survey": "a survey ended: {clusters} {are} left",
    "join": "took over the {models} of {other}",
    "switch": "took over the {models} of {other}, whose election counts more",
    "adopt": "took cluster {cluster} from {other}",
    "afresh": "nobody is there: begins with models of its own",
    "jump": "continues with round {round} of its neighbours",
    "timeout": "stopped waiting for neighbours in round {round}",
    "measure": "measures which number of personal steps is best on its held-out samples",
    "tune": "takes {steps} from the model that it uses",
    "done": "all {round} rounds are done; continues to serve its neighbours",
}
