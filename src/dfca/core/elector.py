"""The election of `core.election` as messages: one client's part in it, a state machine without I/O.

Each turn has three phases. A phase is over when nothing travels any more; the driver says so by `settle` (a simulator
knows it, a node waits for a quiet time). Every client forwards only what is new to it:

  bid      the best (value, client) heard so far; the first turn bids by lot      two scalars per improvement and edge
  model    who has the winner's model announces it; who lacks it asks the         one model per client; two scalars per
           first that announced it, and announces it in turn                      edge, two per client
  vote     everybody's vote on it, flooded                                        5 + 2c scalars per client and edge

All clients hear the same votes, so all reach the same verdict, the same centres and the same k. On a graph that falls
into parts, every part elects its own.

A by-election is held while training goes on (`sim.revival` says when): the centres are the k models that each client
holds, only those that `stand` bid, at most `room` candidates are accepted, and models that nobody follows any more need
not be told apart from a candidate.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from dfca.core.client import Client, effective
from dfca.core.election import ElectionOptions, Parts, Vote, bid, cast, divide, lot, verdict
from dfca.core.local import local_steps, sample_losses
from dfca.core.params import initial
from dfca.core.rng import seeded, stream


@dataclass(frozen=True)
class Bid:
    """The best bid that the sender has heard of in a turn."""

    turn: int
    value: float
    client: int


@dataclass(frozen=True)
class Announcement:
    """`holder` has the model of the client that won a turn's bidding."""

    turn: int
    client: int
    holder: int


@dataclass(frozen=True)
class Request:
    """`asker` wants the model that the receiver announced; goes to that one neighbour."""

    turn: int
    asker: int
    to: int


@dataclass(frozen=True)
class Candidacy:
    """The model (P,) of the client that won a turn's bidding; goes to the one neighbour that asked."""

    turn: int
    client: int
    model: Tensor
    to: int


@dataclass(frozen=True)
class Ballot:
    """One client's vote in a turn."""

    turn: int
    client: int
    vote: Vote


ElectionMessage = Bid | Announcement | Request | Candidacy | Ballot


@dataclass(frozen=True)
class ElectorState:
    """What a client knows of an election that is going on; voters: the most votes that it has heard on a candidate."""

    own: Tensor
    turn: int = 0
    phase: Literal["bid", "model", "vote", "done"] = "bid"
    best: Bid | None = None
    asked: bool = False
    candidate: int | None = None
    model: Tensor | None = None
    votes: dict[int, Vote] = field(default_factory=dict)
    centres: tuple[Tensor, ...] = ()
    chosen: tuple[int, ...] = ()
    refused: tuple[int, ...] = ()
    misses: int = 0
    voters: int = 0

    @property
    def opened(self) -> tuple[tuple[int, Tensor], ...]:
        """The candidates that were accepted, with their models (P,), in that order."""
        new = self.centres[len(self.centres) - len(self.chosen) :]
        return tuple(zip(self.chosen, new, strict=True))


@dataclass(frozen=True)
class Elector:
    """What does not change: the client, the number of clusters asked for (None: to be found), the options.

    held: the models (k, P) of a client in a by-election; None: a start is elected. round: the client's round in which
    it joins a by-election, which names its random parts. stands: whether the client may be a candidate; votes: whether
    it has a vote. One that has neither forwards what it hears and ends with the same centres. room: how many candidates
    a by-election accepts at most.
    """

    client: Client
    clusters: int | None
    options: ElectionOptions
    held: Tensor | None = None
    round: int | None = None
    stands: bool = True
    votes: bool = True
    room: int = 0

    def start(self) -> tuple[ElectorState, list[ElectionMessage]]:
        """Warm up one's own model, and bid for the first centre by lot."""
        return self.open(self.warm_up())

    def warm_up(self) -> Tensor:
        """Train one's own model (P,) from the common start; one that diverges is the start itself."""
        client, warm = self.client, self._parts.warm
        begin = initial(client.model, client.make_model, client.seed, "init", 0).to(client.x.device)
        local = effective(client.local, client.algorithm)
        options = replace(local, steps=self.options.warmup_steps, batch_size=None, momentum=0.0)
        with seeded(client.seed, "noise", client.id, -1):
            own = local_steps(client.model, begin, client.x[warm], client.y[warm], options)
        return own if bool(own.isfinite().all()) else begin

    def open(self, own: Tensor) -> tuple[ElectorState, list[ElectionMessage]]:
        """Open the first turn with a warmed-up model (P,)."""
        if self.held is None:
            return self._open(ElectorState(own))
        state = ElectorState(own, centres=tuple(self.held.clone()))
        return self._open(state) if self.room else (replace(state, phase="done"), [])

    def receive(self, state: ElectorState, message: ElectionMessage) -> tuple[ElectorState, list[ElectionMessage]]:
        """Take in a message; returns what to send, to the neighbour named by `to`, else to all neighbours.

        A message of another turn, or one that does not fit, is dropped.
        """
        if state.phase == "done" or message.turn != state.turn:
            return state, []
        if isinstance(message, Bid):
            if state.best is not None and _order(message) <= _order(state.best):
                return state, []
            return replace(state, best=message), [message]
        if isinstance(message, Announcement):
            if state.asked or state.model is not None:
                return state, []
            return replace(state, asked=True), [Request(state.turn, self.client.id, to=message.holder)]
        if isinstance(message, Request):
            if state.model is None or state.candidate is None:
                return state, []
            return state, [Candidacy(state.turn, state.candidate, state.model, to=message.asker)]
        if isinstance(message, Candidacy):
            fits = message.model.shape == state.own.shape and bool(torch.isfinite(message.model).all())
            if state.model is not None or not fits:
                return state, []
            announcement = Announcement(state.turn, message.client, self.client.id)
            return replace(state, candidate=message.client, model=message.model), [announcement]
        if message.client in state.votes:
            return state, []
        return replace(state, votes={**state.votes, message.client: message.vote}), [message]

    def settle(self, state: ElectorState) -> tuple[ElectorState, list[ElectionMessage]]:
        """Go on to the next phase: nothing of this one travels any more."""
        if state.phase == "bid":
            return self._stand(state)
        if state.phase == "model":
            return self._vote(state)
        if state.phase == "vote":
            return self._conclude(state)
        return state, []

    def _open(self, state: ElectorState) -> tuple[ElectorState, list[ElectionMessage]]:
        """Open the bidding of a turn with one's own bid, if one may stand."""
        fresh = replace(state, phase="bid", best=None, asked=False, candidate=None, model=None, votes={})
        forced = state.misses >= self.options.patience
        barred = state.chosen if forced else (*state.chosen, *state.refused)
        if self.client.id in barred or not self.stands:
            return fresh, []
        value = -float(lot(self.client.seed, self.client.id)) if not state.centres else self._bid(state)
        own = Bid(state.turn, value, self.client.id)
        return replace(fresh, best=own), [own]

    def _stand(self, state: ElectorState) -> tuple[ElectorState, list[ElectionMessage]]:
        """Announce one's model if one's bid is the best."""
        if state.best is None and state.misses >= self.options.patience:  # nobody is left who could stand
            return replace(state, phase="done"), []
        if state.best is None:  # everybody has stood
            return self._after(replace(state, misses=self.options.patience))
        after = replace(state, phase="model")
        if state.best.client != self.client.id:
            return after, []
        own = replace(after, candidate=self.client.id, model=state.own)
        return own, [Announcement(state.turn, self.client.id, self.client.id)]

    def _vote(self, state: ElectorState) -> tuple[ElectorState, list[ElectionMessage]]:
        """Cast one's vote; the first centre needs none."""
        if state.model is None:  # it was lost on the way: this part of the network goes on without
            return self._after(replace(state, misses=state.misses + 1))
        if not state.centres:
            return self._after(self._accept(state))
        if not self.votes:
            return replace(state, phase="vote"), []
        model = state.model[None]
        centres = torch.stack(state.centres)
        on_bid, on_vote = self._losses(centres, self._parts.bid), self._losses(centres, self._parts.vote)
        own = self._losses(state.own[None], self._parts.bid)[0]
        new_bid, new_vote = self._losses(model, self._parts.bid)[0], self._losses(model, self._parts.vote)[0]
        ballot = Ballot(state.turn, self.client.id, cast(on_bid, own, new_bid, on_vote, new_vote))
        return replace(state, phase="vote", votes={**state.votes, self.client.id: ballot.vote}), [ballot]

    def _conclude(self, state: ElectorState) -> tuple[ElectorState, list[ElectionMessage]]:
        """Reach the verdict that everybody reaches."""
        assert state.candidate is not None  # the phase before had one
        voters = sorted(state.votes)
        votes = [state.votes[i] for i in voters]
        heard = state.candidate in voters
        refused = (*state.refused, state.candidate)
        followed_only = self.held is not None
        found = heard and verdict(votes, voters.index(state.candidate), self.options, followed_only).accepted
        state = replace(state, voters=max(state.voters, len(voters)))
        if found or state.misses >= self.options.patience:
            return self._after(self._accept(state))
        return self._after(replace(state, refused=refused, misses=state.misses + 1))

    def _accept(self, state: ElectorState) -> ElectorState:
        assert state.candidate is not None
        assert state.model is not None
        return replace(
            state,
            centres=(*state.centres, state.model),
            chosen=(*state.chosen, state.candidate),
            misses=state.misses if state.misses >= self.options.patience else 0,
        )

    def _after(self, state: ElectorState) -> tuple[ElectorState, list[ElectionMessage]]:
        """Open the next turn, or end the election."""
        wanted = self.options.most if self.clusters is None else self.clusters
        full = len(state.chosen) >= (wanted if self.held is None else self.room)
        finds = self.clusters is None or self.held is not None
        ended = full or (finds and state.misses >= self.options.patience)
        if ended:
            return replace(state, phase="done"), []
        return self._open(replace(state, turn=state.turn + 1))

    def _bid(self, state: ElectorState) -> float:
        centres = self._losses(torch.stack(state.centres), self._parts.bid)
        return bid(centres, self._losses(state.own[None], self._parts.bid)[0])

    def _losses(self, models: Tensor, rows: Tensor) -> Tensor:
        return sample_losses(self.client.model, models, self.client.x[rows], self.client.y[rows])

    @property
    def _parts(self) -> Parts:
        when = () if self.round is None else (self.round,)
        return divide(len(self.client.y), stream(self.client.seed, "parts", self.client.id, *when))


def _order(message: Bid) -> tuple[float, int]:
    return message.value, -message.client
