"""Which announced models to read, from whom and in which order: bookkeeping without I/O.

Of the updates of one neighbour and cluster the newest counts: it replaces one that waits, and cancels one that is being
read unless more than half of it is here; that one is finished first, so that a slow link receives something at all.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from dfca.node.wire.refused import Refused


@dataclass(eq=False)
class Pull:
    """One announced message whose model is read. cluster: of an update, None where it must arrive.

    link: the epoch that it belongs to; got: bytes that are here.
    """

    link: Any
    member: str
    number: int
    name: bytes
    size: int
    rows: int
    encoding: str
    cluster: int | None
    decoded: Any
    got: int = 0
    cancelled: bool = False


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
        """Take an announcement; returns what it makes needless: those that waited, and those to cancel.

        Raises:
            Refused: if the member has announced too much.
        """
        member = self._members.setdefault(pull.member, _Member())
        needless = []
        if pull.cluster is not None:
            for old in [each for each in member.waiting.values() if each.cluster == pull.cluster]:
                del member.waiting[old.number]
                needless.append(old)
            for old in member.running:
                same = old.cluster == pull.cluster and old.link is pull.link and not old.cancelled
                if same and old.got * 2 <= old.size and old.name != pull.name:
                    old.cancelled = True
                    needless.append(old)
        if len(member.waiting) >= self.most_waiting:
            raise Refused("rate", f"{len(member.waiting)} announcements wait")
        member.waiting[pull.number] = pull
        return needless

    def withdraw(self, member: str, number: int) -> Pull | None:
        """Forget one announcement; returns the pull if it must be cancelled."""
        found = self._members.get(member)
        if found is None:
            return None
        found.waiting.pop(number, None)
        for pull in found.running:
            if pull.number == number and not pull.cancelled:
                pull.cancelled = True
                return pull
        return None

    def forget(self, member: str) -> list[Pull]:
        """Forget everything of a member whose link went down; returns the pulls to cancel."""
        found = self._members.get(member)
        if found is None:
            return []
        found.waiting.clear()
        for pull in found.running:
            pull.cancelled = True
        running = list(found.running)
        if not running:
            del self._members[member]
        return running

    def begin(self) -> Pull | None:
        """Return the next one to read, of the member that has waited longest since its last; None: not now."""
        if sum(len(member.running) for member in self._members.values()) >= self.most:
            return None
        for name, member in self._members.items():
            names = {pull.name for pull in member.running}
            clusters = {pull.cluster for pull in member.running} - {None}
            free = (each for each in member.waiting.values() if each.name not in names)
            ready = next((each for each in free if each.cluster not in clusters), None)
            if ready is not None and len(member.running) < self.most_each:
                del member.waiting[ready.number]
                member.running.append(ready)
                self._members.move_to_end(name)
                return ready
        return None

    def end(self, pull: Pull) -> None:
        """Note that a read has ended."""
        member = self._members[pull.member]
        member.running.remove(pull)
        if not member.running and not member.waiting:
            del self._members[pull.member]

    def of(self, member: str) -> list[dict[str, Any]]:
        """Describe the reads from a member."""
        found = self._members.get(member)
        if found is None:
            return []
        return [{"name": pull.name.hex()[:12], "bytes": pull.size, "got": pull.got} for pull in found.running]
