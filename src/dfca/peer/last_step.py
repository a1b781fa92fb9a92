"""The personal last step: a participant measures its curve, pools it with others, picks its steps, takes them."""

from __future__ import annotations

from dfca.peer.curves import NO_CURVE, UNKNOWN, CurvePool
from dfca.peer.machine import Machine
from dfca.peer.parts import Outbox, Part
from dfca.peer.records.lineage import Lineage, compatible
from dfca.peer.records.messages import Curves
from dfca.peer.records.options import PeerOptions
from dfca.peer.records.work import Curve, OwnCurve, Personalise

MOST_TRIES = 3  # how often a measurement that a restart broke off is begun again; then there is no personal step


class LastStep(Part):
    """Measures the curve beside the round of the release, and takes the last step after the last round."""

    def __init__(self, out: Outbox, options: PeerOptions) -> None:
        super().__init__(out)
        self.curves = CurvePool()  # the own curve and those of neighbours, by which the steps are picked
        self.tuned = False  # the last step was asked for in this life
        self.measures: tuple[int, Lineage] | None = None  # the curve that is being measured: its round, of which models
        self._wanted = options.method.personal  # the steps, "auto": picked by curves
        self._release = options.release  # the round until which samples are held out for the curve

    NOT_STORED = Part.NOT_STORED | {"_wanted", "_release"}

    @property
    def steps(self) -> int:
        """The steps of the personal last step, as far as is known now."""
        return self.curves.steps if self._wanted == "auto" else self._wanted

    @property
    def unmeasured(self) -> bool:
        """Whether the curve is still to be measured, on samples that are held out of training until then."""
        return self._release is not None and not self.curves.measured

    def resume(self, curves: CurvePool) -> None:
        """Take the curves out of a save."""
        self.curves = curves.copy()

    def measurement(self, at: Machine, lineage: Lineage) -> Curve | None:
        """Return the measurement of the curve that is due, if one is: of the models, of a lineage."""
        due, pool = at.options.due(at.round), self.curves
        if due is None or pool.due >= due or at.bank is None:
            return None
        # Who comes later trains a round first: measuring takes long, and it may not stay.
        ready = at.round == due or any(at.copies.updates)
        if ready and pool.tried < MOST_TRIES:
            pool.tried += 1
            self.measures = due, lineage
            self.out.save()
            self.out.note("measure", round=at.round)
            return Curve(at.bank, at.copies.closed)
        if ready or at.round >= at.options.rounds:
            self._begin(at, due, NO_CURVE, pool.lineage)  # so that nobody waits for it
        return None

    def measured(self, at: Machine, curve: OwnCurve) -> None:
        """Take in the curve that was measured."""
        assert self.measures is not None
        self.out.note("measured", cluster=curve.cluster, round=at.round)
        (due, lineage), self.measures = self.measures, None
        self._begin(at, due, curve, lineage)

    def take(self, at: Machine) -> Personalise | None:
        """Return the last step, once in a life, after the last round."""
        if self.tuned:
            return None
        self.tuned, steps = True, self.steps
        if self.curves.settle(steps):
            self.out.save()
        if not steps:
            return None
        self.out.note("tune", round=at.round, number=steps)
        return Personalise(steps, at.copies.closed)

    def _begin(self, at: Machine, due: int, curve: OwnCurve, lineage: Lineage) -> None:
        self.curves.begin(due, curve, lineage)
        self.out.save()  # from now on it trains on the samples that the curve was measured on
        self.out.broadcast(self.curves.everything())
        self.pool(at)

    def hear(self, at: Machine, sender: int, message: Curves) -> None:
        """Take in curves of a neighbour."""
        pool = self.curves
        if at.options.due(message.due) != message.due:
            self.out.refuse("a curve of another round", sender)
            return
        if pool.measured and message.cluster >= 0 and not compatible(pool.lineage, message.lineage, message.cluster):
            self.out.refuse("a curve of another lineage", sender, message.cluster)
        pool.take(sender, message)
        if message.values and message.degree == UNKNOWN != pool.degree:  # it begins, and rows were sent without it
            self.greet(sender)
        self.pool(at)

    def hear_mean(self, sender: int, message: Curves) -> None:
        """Take the mean curve of the cluster, of a server, in place of what sweeps would bring."""
        if not self.curves.take_mean(message):
            self.out.refuse("a curve of another round", sender)

    def greet(self, neighbour: int) -> None:
        """Send all that there is over a link that has come up."""
        if self.curves.measured:
            self.out.send(neighbour, self.curves.everything())

    def pool(self, at: Machine) -> None:
        """Average the curves as far as what has come allows; neighbours without models have none."""
        if self.curves.measured:
            waited = [n for n, known in at.links.items() if known.hello is not None and known.hello.clusters]
            for receivers, message in self.curves.advance(waited, at.links):
                for neighbour in receivers:
                    self.out.send(neighbour, message)
