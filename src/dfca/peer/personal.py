"""The personal last step of a participant: measures its curve, pools it, picks its steps, takes them (`curves`)."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from dfca.peer.curves import NO_CURVE, UNKNOWN, CurvePool
from dfca.peer.machine import Machine
from dfca.peer.records.lineage import Lineage, compatible
from dfca.peer.records.messages import Curves
from dfca.peer.records.options import PeerOptions
from dfca.peer.records.work import Curve, OwnCurve, Personalise

MOST_TRIES = 3
"""How often a measurement that was broken off, by a restart, is begun again; then there is no personal step."""


class Personal(Machine):
    """Measures the curve before the round of the release, and takes the last step after the last round.

    curves: those by which the steps are picked; tuned: the last step was asked for in this life.
    """

    def __init__(self, options: PeerOptions, allocate: Callable[[int], Tensor], incarnation: int = 0) -> None:
        super().__init__(options, allocate, incarnation)
        self.curves = CurvePool()
        self.tuned = False

    @property
    def personal_steps(self) -> int:
        """The steps of the personal last step, as far as is known now."""
        steps = self.options.personal
        return self.curves.steps if steps == "auto" else steps

    @property
    def unmeasured(self) -> bool:
        """Whether the curve is still to be measured, on samples that are held out of training until then."""
        return self.options.release is not None and not self.curves.measured

    def _personal_job(self) -> Curve | Personalise | None:
        """Return the job that is due between two rounds, if one is: the curve, or the last step, once in a life."""
        due, pool = self.options.due(self.round), self.curves
        if due is not None and pool.due < due:
            # Who comes after that trains a round first: measuring takes long, and it may not stay.
            ready, ended = self.round == due or any(self.copies.updates), self.round >= self.options.rounds
            if ready and pool.tried < MOST_TRIES:
                pool.tried, self._out.save = pool.tried + 1, True
                self._note("measure", round=self.round)
                return Curve(self.copies.closed)
            if ready or ended:
                self._take_curve(NO_CURVE, pool.lineage)  # so that nobody waits for it
        if self.round < self.options.rounds or self.tuned:
            return None
        self.tuned, steps = True, self.personal_steps
        if pool.measured and pool.picked is None:
            pool.picked, self._out.save = steps, True
        if not steps:
            return None
        self._note("tune", round=self.round, number=steps)
        return Personalise(steps, self.copies.closed)

    def _end_measuring(self, curve: OwnCurve, lineage: Lineage) -> None:
        self._note("measured", cluster=curve.cluster, round=self.round)
        self._take_curve(curve, lineage)

    def _take_curve(self, curve: OwnCurve, lineage: Lineage) -> None:
        due = self.options.due(self.round)
        assert due is not None
        self.curves.begin(due, curve, lineage)
        self._out.save = True  # from now on it trains on the samples that the curve was measured on
        self._broadcast(self.curves.everything())
        self._pool_curves()

    def _on_curves(self, sender: int, message: Curves) -> None:
        pool = self.curves
        if self.options.due(message.due) != message.due:
            self._refuse("a curve of another round", sender)
            return
        if pool.measured and message.cluster >= 0 and not compatible(pool.lineage, message.lineage, message.cluster):
            self._refuse("a curve of another lineage", sender, message.cluster)
        pool.take(sender, message)
        if message.values and message.degree == UNKNOWN != pool.degree:  # it begins, and rows were sent without it
            self._send_curves(sender)
        self._pool_curves()

    def _send_curves(self, neighbour: int) -> None:
        """Send all that there is over a link that has come up."""
        if self.curves.measured:
            self._send(neighbour, self.curves.everything())

    def _pool_curves(self) -> None:
        """Average the curves as far as what has come allows; neighbours without models have none."""
        if self.curves.measured:
            waited = [n for n, known in self.links.items() if known.hello is not None and known.hello.clusters]
            for receivers, message in self.curves.advance(waited, self.links):
                self._out.messages += [(neighbour, message) for neighbour in receivers]
