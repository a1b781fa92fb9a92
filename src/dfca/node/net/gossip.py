"""The roster travels along links: neighbours compare digests, and send their records where they differ."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from dfca.node.net.limits import Bucket
from dfca.node.net.links.link import NetLink, serialize
from dfca.node.trust.records import to_bytes
from dfca.node.trust.roster import OLD_CONTACT, Roster
from dfca.node.wire import wire_pb2 as pb
from dfca.node.wire.frames import MOST_FRAME_BYTES, MOST_RECORDS
from dfca.node.wire.refused import Refused

REFUSED_PER_S, REFUSED_BURST = 1.0, 512
"""Records of a neighbour that do not hold: an honest one sends few, a liar makes us check signatures."""
SPREAD_S = 0.5
"""The least time between two digests that are sent to all neighbours."""


def notice_frame(roster: Roster, device: str) -> bytes | None:
    """Make the frame that shows to a device that it is no member any more; None where it is one, or never was."""
    shown = list(map(to_bytes, roster.notice(device)))
    if not shown or len(shown) > MOST_RECORDS or sum(map(len, shown)) > MOST_FRAME_BYTES - 4096:
        return None
    return serialize(pb.Frame(roster_records=pb.RosterRecords(records=shown)))


class Gossip:
    """Exchanges the records of one roster with all neighbours.

    A link loses nothing while it is up, so each record crosses it once. News are spread at most once in SPREAD_S: a
    member that signs a new address a hundred times per second costs each link of the swarm no more than one record.
    """

    def __init__(self, roster: Roster, links: Callable[[], Iterable[NetLink]], now: Callable[[], float]) -> None:
        self._roster, self._links, self._now = roster, links, now
        self._spread_digest, self._spread_at = roster.digest(), float("-inf")
        self._sent: dict[NetLink, tuple[str, str]] = {}
        self._known: dict[NetLink, set[int]] = {}
        """By link, hashes of the records that crossed it."""
        self._budget: dict[str, Bucket] = {}

    def greet(self, link: NetLink) -> None:
        """Begin on a link that came up."""
        link.send(pb.Frame(roster_digest=pb.RosterDigest(digest=self._roster.digest())))

    def lose(self, link: NetLink) -> None:
        """Forget a link."""
        self._sent.pop(link, None)
        self._known.pop(link, None)

    def forget(self, member: str) -> None:
        """Forget one that is no longer a member."""
        self._budget.pop(member, None)

    def spread(self) -> None:
        """Send the new digest to all neighbours if there are new records, unless that was done a moment ago."""
        digest = self._roster.digest()
        if digest == self._spread_digest or self._now() - self._spread_at < SPREAD_S:
            return
        self._spread_digest, self._spread_at = digest, self._now()
        for link in list(self._links()):
            self.greet(link)

    def take_digest(self, link: NetLink, digest: str) -> None:
        """Send a neighbour that has other records those that it lacks, and ask for its own; once per two digests."""
        own = self._roster.digest()
        if digest == own or self._sent.get(link) == (digest, own):
            return
        self._sent[link] = (digest, own)
        self.greet(link)
        batch: list[bytes] = []
        for record in self._unknown_to(link):
            full = sum(map(len, batch)) + len(record) + 8 * len(batch) > MOST_FRAME_BYTES - 1024
            if batch and (full or len(batch) == MOST_RECORDS):
                link.send(pb.Frame(roster_records=pb.RosterRecords(records=batch)))
                batch = []
            batch.append(record)
        if batch:
            link.send(pb.Frame(roster_records=pb.RosterRecords(records=batch)))

    def _unknown_to(self, link: NetLink) -> list[bytes]:
        """List the records that have not crossed a link; from now on they have."""
        held = list(map(to_bytes, self._roster.records()))
        known = self._known.get(link, set())
        self._known[link] = set(map(hash, held))
        return [record for record in held if hash(record) not in known]

    def take_records(self, link: NetLink, records: Iterable[bytes], now: float) -> list[str]:
        """Merge records; returns the reasons of those that were refused.

        Raises Refused for a neighbour that sends many that do not hold.
        """
        received = list(records)
        reasons = self._roster.merge(received)
        if not reasons and link in self._known:
            self._known[link].update(map(hash, received))
        budget = self._budget.setdefault(link.member, Bucket(REFUSED_PER_S, REFUSED_BURST, now))
        self.spread()
        wrong = [reason for reason in reasons if reason != OLD_CONTACT]  # a device that was away long has many of those
        if wrong and not budget.take(now, len(wrong)):
            raise Refused("roster", f"many records that do not hold, the last: {wrong[-1]}")
        return wrong
