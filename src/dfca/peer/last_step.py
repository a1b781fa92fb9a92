"""The personal last step: a participant measures its curve, pools it with others, picks its steps, takes them."""

from __future__ import annotations

from dfca.peer.curves import NO_CURVE, UNKNOWN, CurvePool
from dfca.peer.machine import Machine
from dfca.peer.parts import Outbox, Part
from dfca.peer.records.lineage import Lineage, compatible
from dfca.peer.records.messages import Curves
from dfca.peer.records.options import PeerOptions
from dfca.peer.records.work import Curve, OwnCurve, Personalise

MOST_TRIES = 3
"""How often a measurement that a restart broke off is begun again; then there is no personal step."""


class LastStep(Part):
    """Measures the curve before the round of the release, and takes the last step after the last round."""

    def __init__(self, out: Outbox, options: PeerOptions) -> None:
        super().__init__(out)
        self.curves = CurvePool()  # the own curve and those of neighbours, by which the steps are picked
        self.tuned = False  # the last step was asked for in this life
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

    def next_job(self, at: Machine) -> Curve | Personalise | None:
        """Return the job that is due between two rounds, if one is: the curve, or the last step, once in a life."""
        due, pool, ended = at.options.due(at.round), self.curves, at.round >= at.options.rounds
        if due is not None and pool.due < due:
            # Who comes later trains a round first: measuring takes long, and it may not stay.
            ready = at.round == due or any(at.copies.updates)
            if ready and pool.tried < MOST_TRIES:
                pool.tried += 1
                self.out.save()
                self.out.note("measure", round=at.round)
                return Curve(at.copies.closed)
            if ready or ended:
                self._take(at, NO_CURVE, pool.lineage)  # so that nobody waits for it
        if not ended or self.tuned:
            return None
        self.tuned, steps = True, self.steps
        if pool.settle(steps):
            self.out.save()
        if not steps:
            return None
        self.out.note("tune", round=at.round, number=steps)
        return Personalise(steps, at.copies.closed)

    def end_job(self, at: Machine, job: Curve | Personalise, result: OwnCurve | None, lineage: Lineage) -> None:
        """Take in what came of such a job; lineage: of the models that the curve was measured on."""
        if isinstance(job, Personalise):
            self.out.note("tuned")
            return
        assert result is not None
        self.out.note("measured", cluster=result.cluster, round=at.round)
        self._take(at, result, lineage)

    def _take(self, at: Machine, curve: OwnCurve, lineage: Lineage) -> None:
        due = at.options.due(at.round)
        assert due is not None
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
