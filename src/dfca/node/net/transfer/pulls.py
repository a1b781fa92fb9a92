"""Which announced models to read, from whom and in which order: bookkeeping without I/O.

Of the updates of one neighbour and cluster one is read at a time, and only the newest waits. What is being read is not
cancelled for it: else a link that is slower than the rounds of the neighbour would bring nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from dfca.node.net.links.parts import PartReader
from dfca.node.wire.frames import Refused


@dataclass(eq=False)
class Pull:
    """One announced message whose model is read."""

    link: Any  # the epoch that it belongs to
    member: str
    number: int
    name: bytes
    size: int
    rows: int
    encoding: str
    cluster: int | None  # of an update; None for a message that must arrive
    decoded: Any
    got: int = 0  # bytes that have come
    cancelled: bool = False
    reader: PartReader | None = None  # where it is read on the link


@dataclass
class _Member:
    waiting: OrderedDict[int, Pull] = field(default_factory=OrderedDict)
    running: list[Pull] = field(default_factory=list)


class Pulls:
    """Announcements that wait, and those that are being read: bounded in all and for each member."""

    def __init__(self, most: int, most_each: int, most_waiting: int) -> None:
        self.most, self.most_each, self.most_waiting = most, most_each, most_waiting
        self._members: OrderedDict[str, _Member] = OrderedDict()

    def announce(self, pull: Pull) -> list[Pull]:
        """Take an announcement; returns the pulls that it replaces. Raises Refused if too many wait."""
        member = self._members.setdefault(pull.member, _Member())
        needless = []
        if pull.cluster is not None:
            for old in [waiting for waiting in member.waiting.values() if waiting.cluster == pull.cluster]:
                del member.waiting[old.number]
                needless.append(old)
        if len(member.waiting) >= self.most_waiting:
            raise Refused("rate", f"{len(member.waiting)} announcements wait")
        member.waiting[pull.number] = pull
        return needless

    def withdraw(self, member: str, number: int) -> Pull | None:
        """Forget one announcement; returns the pull if it must be cancelled."""
        pulls = self._members.get(member, _Member())
        pulls.waiting.pop(number, None)
        for pull in pulls.running:
            if pull.number == number and not pull.cancelled:
                pull.cancelled = True
                return pull
        return None

    def forget(self, member: str) -> list[Pull]:
        """Forget everything of a member whose link went down; returns the pulls to cancel."""
        pulls = self._members.get(member, _Member())
        pulls.waiting.clear()
        for pull in pulls.running:
            pull.cancelled = True
        if not pulls.running:
            self._members.pop(member, None)
        return list(pulls.running)

    def begin(self) -> Pull | None:
        """Return the next pull, of the member that has waited longest since its last one; None: not now."""
        if sum(len(member.running) for member in self._members.values()) >= self.most:
            return None
        for name, member in self._members.items():
            names = {pull.name for pull in member.running}
            clusters = {pull.cluster for pull in member.running} - {None}
            free = (pull for pull in member.waiting.values() if pull.name not in names and pull.cluster not in clusters)
            ready = next(free, None)
            if ready is not None and len(member.running) < self.most_each:
                del member.waiting[ready.number]
                member.running.append(ready)
                self._members.move_to_end(name)
                return ready
        return None

    def end(self, pull: Pull) -> None:
        """Note the end of a read."""
        member = self._members[pull.member]
        member.running.remove(pull)
        if not member.running and not member.waiting:
            del self._members[pull.member]

    def of(self, member: str) -> list[dict[str, Any]]:
        """Describe the reads from a member."""
        running = self._members.get(member, _Member()).running
        return [{"name": pull.name.hex()[:12], "bytes": pull.size, "got": pull.got} for pull in running]
