"""Notices that the models of a node have collapsed, goes back to the last good ones, and leaves out what did it.

r is the median of the last held-out losses of the same data and lineage, from LEAST to RECENT of them, g the loss of
guessing:

  loss <= r + NEAR g    the models are good: they are kept, every SAVE_S seconds on the disk too
  loss >  r + FAR g     they have collapsed: the next round begins with the last good ones, and whose models were folded
                        since is watched: what it sends for the cluster of this node is scored before it is folded, and
                        left out if its loss is beyond this bound as well

A neighbour whose last TRUSTED models were sound is no longer watched. After MOST_RETURNS collapses in a row this is how
the swarm's models are now, and the guard starts anew. `robust` (`core.rules.robust`) bounds what one model does; this
mends what many did. Without held-out samples nothing is noticed.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import deque
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from torch import Tensor

from dfca.core.learning.parts import Layout
from dfca.node.disk.disk import SYSTEM_DISK, Disk
from dfca.peer.records.messages import Nothing, Update
from dfca.peer.records.work import Note

FILE = "good.safetensors"
LEAST, RECENT = 20, 100
MOST_RETURNS = 50
NEAR, FAR = 0.1, 0.5
TRUSTED = 20
SAVE_S = 600.0
MOST_BYTES = 2**33


@dataclass
class Watched:
    """A neighbour whose models are scored before they are folded."""

    left_out: int = 0
    sound: int = 0  # models since the last one that was left out
    loss: float = 0.0  # of the last one that was left out


class ModelGuard:
    """The guard of one node. guess: the loss of guessing; folder: of the node; now: seconds of a steady clock; layout:
    of models of which members keep a part.

    `settle` and `admit` are called in the thread that computes, the others in the event loop.
    """

    def __init__(
        self,
        guess: float,
        folder: Path,
        now: Callable[[], float],
        disk: Disk = SYSTEM_DISK,
        layout: Layout | None = None,
    ) -> None:
        self.lineage: Callable[[], Any] = lambda: None  # returns what the models come from
        self.score: Callable[[Tensor], float | None] = lambda model: None  # returns the held-out loss of a model (P,)
        self.watched: dict[int, Watched] = {}
        self.returns = 0  # how often the node went back to its last good models
        self._guess, self._path, self._now, self._disk, self._layout = guess, folder / FILE, now, disk, layout
        self._losses: deque[float] = deque(maxlen=RECENT)
        self._good: Tensor | None = None
        self._of: str | None = None  # the lineage of what is kept
        self._cluster: int | None = None
        self._folded: set[int] = set()  # whose models were folded since the models were good
        self._saved_at = -math.inf
        self._in_a_row = 0  # collapses

    def note(self, note: Note) -> None:
        """Take a note of the peer."""
        if note.kind == "fold":
            self._folded.add(note.other)

    def forget(self) -> None:
        """Forget the good models: the data has changed, and losses are no longer comparable."""
        self._losses.clear()
        self._good, self._in_a_row = None, 0

    def settle(self, bank: Tensor, cluster: int, loss: float | None) -> Tensor:
        """Judge models (m, P) by the held-out loss of the chosen one; returns those to continue with."""
        self._follow(bank)
        if loss is None:
            return bank
        self._cluster = cluster
        if self._good is not None and not loss <= self._bound(FAR) and self._in_a_row < MOST_RETURNS:
            self.returns, self._in_a_row = self.returns + 1, self._in_a_row + 1
            for sender in self._folded:
                self.watched.setdefault(sender, Watched())
            return self._good.to(bank.device)
        if self._in_a_row >= MOST_RETURNS:
            self.forget()
            self.watched.clear()
        self._in_a_row = 0
        if math.isfinite(loss):
            self._losses.append(loss)
        if loss <= self._bound(NEAR):
            self._good = bank.detach().cpu().clone()
            self._folded = set()
            self._save()
        return bank

    def doubts(self, sender: int, message: Any) -> bool:
        """Return whether a message must be scored before it is folded; the payload of a codec cannot be."""
        is_own = isinstance(message, Update) and message.message.cluster == self._cluster
        return is_own and sender in self.watched and message.message.model.is_floating_point()

    def admit(self, sender: int, update: Update) -> Update | Nothing:
        """Score a model of a neighbour that is watched; returns what the peer gets of its update.

        In place of a model that is left out the peer hears that there is none, so that nobody waits for it; of an
        update in several parts it gets the last good model.
        """
        message, good = update.message, self._good
        if good is None:
            return update
        whole = message.model if self._layout is None else self._layout.fill(message.model, good[message.cluster])
        if self._accepts(sender, whole):
            return update
        if update.parts == 1:
            return Nothing(message.round, update.lineage, update.freshness, update.offers)
        return update._replace(message=replace(message, model=good[message.cluster].clone()))

    def _accepts(self, sender: int, model: Tensor) -> bool:
        watched, loss = self.watched.setdefault(sender, Watched()), self.score(model)
        if loss is None or loss <= self._bound(FAR):
            watched.sound += 1
            if watched.sound >= TRUSTED:
                self.watched.pop(sender, None)
            return True
        watched.left_out, watched.sound, watched.loss = watched.left_out + 1, 0, loss
        return False

    def left_out(self, name: Callable[[int], str]) -> dict[str, int]:
        """Count the models that were left out, by neighbour."""
        return {name(sender): watched.left_out for sender, watched in [*self.watched.items()] if watched.left_out}

    def refuses(self, neighbours: Collection[int]) -> str:
        """Return the losses where the models of several neighbours are left out, and of no other one are any folded."""
        out = {sender: watched.loss for sender, watched in [*self.watched.items()] if watched.left_out}
        if len(out) < 2 or not out.keys() >= {*neighbours}:
            return ""
        return f"loss {median(out.values()):.3g}; its own models have {median(self._losses or [math.nan]):.3g}"

    def problems(self, name: Callable[[int], str], folder: Path) -> dict[str, str]:
        """Describe the neighbours whose models are left out, a sentence each."""
        return {
            f"poison {sender}": (
                f"models of {name(sender)} would ruin this device's (held-out loss {watched.loss:.3g}, with its own "
                f"{median(self._losses or [math.nan]):.3g}) and are left out; its data is of another kind, or it is "
                f"broken or lies: then remove it: dfca node remove {folder} {name(sender)}"
            )
            for sender, watched in [*self.watched.items()]
            if watched.left_out
        }

    def _bound(self, share: float) -> float:
        """Return r + share g; infinity before r is known."""
        return median(self._losses) + share * self._guess if len(self._losses) >= LEAST else math.inf

    def _follow(self, bank: Tensor) -> None:
        """Forget what was good of other models; take what an earlier life has kept of these."""
        name = hashlib.sha256(f"{self.lineage()!r} {tuple(bank.shape)}".encode()).hexdigest()
        if name == self._of:
            return
        is_first, self._of, self._cluster = self._of is None, name, None
        self.forget()
        if is_first:
            self._load()

    def _save(self) -> None:
        from safetensors.torch import save

        if self._good is None or len(self._losses) < LEAST or self._now() - self._saved_at < SAVE_S:
            return
        self._saved_at = self._now()
        with suppress(OSError), self._disk.replacing(self._path) as file:  # a full disk is reported by saves
            file.write(save({"bank": self._good}, {"of": self._of or "", "loss": repr(median(self._losses))}))

    def _load(self) -> None:
        """Load good models of this lineage; anything else in the file's place is passed over."""
        from safetensors import SafetensorError
        from safetensors.torch import load

        try:
            data = self._disk.read_small(self._path, MOST_BYTES)
            header = data[8 : 8 + int.from_bytes(data[:8], "little")]
            metadata, good = json.loads(header)["__metadata__"], load(data)["bank"]
        except (OSError, ValueError, KeyError, SafetensorError):
            return
        if metadata.get("of") == self._of and math.isfinite(loss := float(metadata.get("loss", "nan"))):
            self._good = good
            self._losses.extend([loss] * LEAST)
