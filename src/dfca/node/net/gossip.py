"""The roster travels along links: neighbours compare digests and send their records if the digests differ."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from dfca.node.net.limits import Bucket
from dfca.node.net.links.link import NetLink, serialize
from dfca.node.trust.records import to_bytes
from dfca.node.trust.roster import Roster, RosterReason
from dfca.node.wire import wire_pb2 as pb
from dfca.node.wire.frames import MOST_FRAME_BYTES, MOST_RECORDS, Refused

REFUSED_PER_S, REFUSED_BURST = 1.0, 512  # invalid records of a neighbour: each costs the check of a signature
SPREAD_S = 0.5  # the least time between two digests that are sent to all neighbours


def notice_frame(roster: Roster, device: str) -> bytes | None:
    """Make the frame that proves to a device that it was removed; None if it is a member, or never was one."""
    proof = list(map(to_bytes, roster.notice(device)))
    if not proof or len(proof) > MOST_RECORDS or sum(map(len, proof)) > MOST_FRAME_BYTES - 4096:
        return None
    return serialize(pb.Frame(roster_records=pb.RosterRecords(records=proof)))


class Gossip:
    """Exchanges the records of one roster with all neighbours.

    A link loses nothing while it is up, so each record crosses it once. News spread at most once in SPREAD_S: a member
    that signs a hundred new addresses per second costs each link one record.
    """

    def __init__(self, roster: Roster, links: Callable[[], Iterable[NetLink]], now: Callable[[], float]) -> None:
        self._roster, self._links, self._now = roster, links, now
        self._spread_digest, self._spread_at = roster.digest(), float("-inf")
        self._sent: dict[NetLink, tuple[str, str]] = {}
        self._told: dict[NetLink, int] = {}  # by link, the change of the roster (`serial`) up to which it has been told
        self._heard: dict[NetLink, set[int]] = {}  # by link, hashes of the records that came over it since
        self._budget: dict[str, Bucket] = {}

    def greet(self, link: NetLink) -> None:
        """Send the digest on a link that came up."""
        link.send(pb.Frame(roster_digest=pb.RosterDigest(digest=self._roster.digest())))

    def lose(self, link: NetLink) -> None:
        """Forget a link."""
        self._sent.pop(link, None)
        self._told.pop(link, None)
        self._heard.pop(link, None)

    def forget(self, member: str) -> None:
        """Forget one that is no longer a member."""
        self._budget.pop(member, None)

    def spread(self) -> None:
        """Send the new digest to all neighbours if there are new records, at most once in SPREAD_S."""
        digest = self._roster.digest()
        if digest == self._spread_digest or self._now() - self._spread_at < SPREAD_S:
            return
        self._spread_digest, self._spread_at = digest, self._now()
        for link in list(self._links()):
            self.greet(link)

    def take_digest(self, link: NetLink, digest: str) -> None:
        """Send a neighbour with another digest the records it lacks, and ask for its own; once per pair of digests."""
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
        """List the records that have not crossed a link, and note that they do now."""
        told, heard = self._told.get(link), self._heard.pop(link, set())
        news = self._roster.records() if told is None else self._roster.since(told)
        self._told[link] = self._roster.serial
        return [record for record in map(to_bytes, news) if hash(record) not in heard]

    def take_records(self, link: NetLink, records: Iterable[bytes], now: float) -> list[str]:
        """Merge records; returns why some were refused. Raises Refused for a neighbour that sends many invalid ones."""
        received = list(records)
        reasons = self._roster.merge(received)
        if not reasons and link in self._told:
            self._heard.setdefault(link, set()).update(map(hash, received))
        budget = self._budget.setdefault(link.member, Bucket(REFUSED_PER_S, REFUSED_BURST, now))
        self.spread()
        wrong = [reason for reason in reasons if reason != RosterReason.OLD_CONTACT]  # who was away has many old ones
        if wrong and not budget.take(now, len(wrong)):
            raise Refused("roster", f"many records that do not hold, the last: {wrong[-1]}")
        return wrong
