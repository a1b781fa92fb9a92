"""What a client watches between elections: whether its distribution is new, or a cluster was lost.

`sim.revival` has the rule for all clients at once; here every client goes by what it has heard. Clients tell each other
which cluster they train and whether they raise the alarm, whenever it changes (`Status`, flooded). A client that
concludes that an election is due calls it (`Call`, flooded); who has missed an election hears of it by a `Decree`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from dfca.core.election import ElectionOptions
from dfca.core.revival import ALARM, PAUSE, ROUNDS
from dfca.sim.events.snapshot import storable
from dfca.sim.events.stage import Charter


@storable
class Status(NamedTuple):
    """What a client trains since a round, and whether no model fits it any more."""

    client: int
    round: int
    cluster: int
    alarmed: bool


@storable
class Call(NamedTuple):
    """A client calls the election of that number, for the clusters that it believes lost among so many."""

    number: int
    round: int
    client: int
    lost: tuple[int, ...]
    clusters: int


@storable
class Decree(NamedTuple):
    """The election of that number is over, and the clusters come from these."""

    number: int
    charter: Charter


@storable
class Want(NamedTuple):
    """A client asks for the receiver's copy of one model."""

    client: int
    cluster: int


@storable
class Regret(NamedTuple):
    """A client cannot send the copy that it was asked for."""

    client: int
    cluster: int


@storable
@dataclass(slots=True)
class Watch:
    """A client's memory: its lowest loss so far, since how many rounds it is above it, what it knows of the others.

    idle: for each cluster, the rounds since somebody was known to train it; mourned: lost clusters that an election did
    not fill; last, pause: when an election was held last, and how long none is called; number: the newest election that
    it has heard of; closed: the newest whose result it knows; known: by client, the round, the cluster and the alarm of
    its last `Status`.
    """

    lowest: float = math.inf
    alarm: int = 0
    idle: list[int] = field(default_factory=list)
    mourned: list[bool] = field(default_factory=list)
    last: int = -PAUSE
    pause: int = PAUSE
    number: int = 0
    closed: int = 0
    known: dict[int, tuple[int, int, bool]] = field(default_factory=dict)

    @property
    def alarmed(self) -> bool:
        return self.alarm >= ROUNDS

    def look(self, loss: float) -> None:
        """See the loss of one's best model."""
        self.alarm = self.alarm + 1 if loss > ALARM * self.lowest else 0
        self.lowest = min(self.lowest, loss)

    def hear(self, status: Status) -> bool:
        """Take in a status; tells whether it is news."""
        if status.client in self.known and status.round <= self.known[status.client][0]:
            return False
        self.known[status.client] = (status.round, status.cluster, status.alarmed)
        return True

    def end_round(self, clusters: int) -> None:
        """Count for how long each cluster has been idle."""
        self._grow(clusters)
        trained = {cluster for _, cluster, _ in self.known.values()}
        for j in range(clusters):
            self.idle[j] = 0 if j in trained else self.idle[j] + 1
            self.mourned[j] = self.mourned[j] and j not in trained

    def calls(self, now: int, options: ElectionOptions) -> bool:
        """Tell whether enough clients raise the alarm, or a cluster was lost."""
        if now - self.last < self.pause:
            return False
        return sum(alarmed for _, _, alarmed in self.known.values()) >= options.support or bool(self.lost())

    def lost(self) -> tuple[int, ...]:
        """Find the clusters that nobody trains and that no election has failed to fill yet."""
        return tuple(j for j, idle in enumerate(self.idle) if idle >= ROUNDS and not self.mourned[j])

    def close(self, number: int, now: int, clusters: int, opened: tuple[int, ...]) -> None:
        """End an election after which there are so many clusters; what nobody filled is not asked for again."""
        self.closed = number
        self.number = max(self.number, number)
        for j in self.lost():
            self.mourned[j] = True
        self._grow(clusters)
        for j in opened:
            self.idle[j], self.mourned[j] = 0, False
        self.last, self.pause = now, PAUSE if opened else 2 * self.pause
        self.alarm, self.lowest = 0, math.inf  # what is low is learned anew
        self.known = {client: (round, cluster, False) for client, (round, cluster, _) in self.known.items()}

    def _grow(self, clusters: int) -> None:
        missing = clusters - len(self.idle)
        self.idle += [0] * missing
        self.mourned += [False] * missing
