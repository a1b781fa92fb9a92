"""The roster travels along links: neighbours compare digests, and send their records where they differ."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from dfca.node.net.limits import Bucket
from dfca.node.net.links import Link
from dfca.node.trust.records import to_bytes
from dfca.node.trust.roster import OLD_CONTACT, Roster
from dfca.node.wire import wire_pb2 as pb
from dfca.node.wire.frames import MOST_FRAME_BYTES, MOST_RECORDS
from dfca.node.wire.refused import Refused

REFUSED_PER_S, REFUSED_BURST = 1.0, 512
"""Records of a neighbour that do not hold: an honest one sends few, a liar makes us check signatures."""


class Gossip:
    """Exchanges the records of one roster with all neighbours."""

    def __init__(self, roster: Roster, links: Callable[[], Iterable[Link]]) -> None:
        self._roster, self._links = roster, links
        self._digest = roster.digest()
        self._sent: dict[Link, tuple[str, str]] = {}
        self._budget: dict[str, Bucket] = {}

    def greet(self, link: Link) -> None:
        """Begin on a link that came up."""
        link.send(pb.Frame(roster_digest=pb.RosterDigest(digest=self._digest)))

    def lose(self, link: Link) -> None:
        """Forget a link."""
        self._sent.pop(link, None)

    def forget(self, member: str) -> None:
        """Forget one that is no longer a member."""
        self._budget.pop(member, None)

    def spread(self) -> None:
        """Send the new digest to all neighbours if there are new records."""
        digest = self._roster.digest()
        if digest == self._digest:
            return
        self._digest = digest
        for link in list(self._links()):
            self.greet(link)

    def take_digest(self, link: Link, digest: str) -> None:
        """Send all records to a neighbour that has others, and ask for its own; once for each pair of digests."""
        if digest == self._digest or self._sent.get(link) == (digest, self._digest):
            return
        self._sent[link] = (digest, self._digest)
        self.greet(link)
        batch: list[bytes] = []
        for record in map(to_bytes, self._roster.records()):
            full = sum(map(len, batch)) + len(record) + 8 * len(batch) > MOST_FRAME_BYTES - 1024
            if batch and (full or len(batch) == MOST_RECORDS):
                link.send(pb.Frame(roster_records=pb.RosterRecords(records=batch)))
                batch = []
            batch.append(record)
        link.send(pb.Frame(roster_records=pb.RosterRecords(records=batch)))

    def take_records(self, link: Link, records: Iterable[bytes], now: float) -> list[str]:
        """Merge records; returns the reasons of those that were refused.

        Raises Refused for a neighbour that sends many that do not hold.
        """
        reasons = self._roster.merge(list(records))
        budget = self._budget.setdefault(link.member, Bucket(REFUSED_PER_S, REFUSED_BURST, now))
        self.spread()
        wrong = [reason for reason in reasons if reason != OLD_CONTACT]  # a device that was away long has many of those
        if wrong and not budget.take(now, len(wrong)):
            raise Refused("roster", f"many records that do not hold, the last: {wrong[-1]}")
        return wrong
