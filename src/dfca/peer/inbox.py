"""What has come from the neighbours and waits to be folded, and what is known of each of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import lru_cache
from operator import itemgetter

from dfca.peer.records.lineage import Lineage, clusters_of
from dfca.peer.records.messages import MOST_ROUND, Hello, Offers, Update

MOST_PARTS = 4096  # how many models of a neighbour's round a peer counts
Limit = Callable[[int], float]  # by sender, the newest round that is folded now
UNKNOWN = -1  # the incarnation of a neighbour that has sent models and no hello yet


@lru_cache(64)
def _alone(cluster: int) -> frozenset[int]:
    """Return the set of one cluster: the same for all neighbours, of whom there are many."""
    return frozenset((cluster,))


@dataclass(slots=True)
class Neighbour:
    """What a neighbour in reach has said."""

    hello: Hello | None = None  # its last
    since: int = 0  # the first round that it can still be expected to send
    round: int = -1  # the newest that it has ended
    clusters: frozenset[int] = frozenset()  # those of that round whose models are here
    parts: int = 1  # how many models that round has
    offers: Offers = ()  # the copies that it would hand on
    offers_round: int = -1  # as of which round
    offers_lineage: Lineage = ()  # and of which lineage

    def greet(self, hello: Hello) -> None:
        """Take in its hello."""
        self.hello, self.since = hello, min(hello.round, MOST_ROUND)
        if not hello.clusters:
            self.offers = ()

    def decline(self) -> None:
        """Take in that it has no models after all."""
        if self.hello is not None:
            self.hello = self.hello._replace(clusters=0)

    def ended(self, round: int, cluster: int, parts: int) -> None:
        """Note that a part of what the neighbour sends at the end of a round is here."""
        if round > self.round:
            self.round, self.clusters, self.parts = round, _alone(cluster), parts
        elif round == self.round and len(self.clusters) < min(self.parts, MOST_PARTS):
            self.clusters |= {cluster}

    def learn_lineage(self, round: int, lineage: Lineage, clusters: int) -> bool:
        """Take in the lineage of a model that was sent in a round; return False where that is no news.

        Models are overtaken by small messages. Rounds and lineages only grow in a peer's life: of two things that it
        said, the one with the higher (round, lineage) was said later.
        """
        hello = self.hello
        if hello is None or (hello.clusters and (round, lineage) <= (hello.round, hello.lineage)):
            return False
        self.hello = hello._replace(round=round, lineage=lineage, clusters=clusters)
        return True

    def learn_from_model(self, round: int, lineage: Lineage) -> bool:
        """Take in a model of another lineage than its sender's hello said, or one that stands for a missing hello.

        Returns whether that is news.
        """
        hello, next_round = self.hello, min(round, MOST_ROUND) + 1
        if hello is None:
            self.hello = Hello(UNKNOWN, next_round, max(1, clusters_of(lineage)), lineage)
            return True
        clusters = clusters_of(lineage) if lineage else hello.clusters
        return self.learn_lineage(next_round, lineage, max(1, clusters))

    def has_ended(self, round: int) -> bool:
        """Return whether all that the neighbour sends at the end of a round is here, or will never come."""
        if self.since > round or self.round > round:
            return True
        return self.round == round and len(self.clusters) >= self.parts


@dataclass(slots=True)
class Inbox:
    """Updates that wait to be folded."""

    depth: int = 1  # how many of a sender and cluster are kept, the newest
    kept: dict[tuple[int, int], list[tuple[Update, float]]] = field(default_factory=dict)  # with when they came
    newest: dict[tuple[int, int], int] = field(default_factory=dict)  # the newest round seen of a sender and cluster

    def add(self, sender: int, update: Update, now: float) -> bool:
        """Keep an update; return False where a newer one has come before."""
        message = update.message
        key, round, newest = (sender, message.cluster), message.round, self.newest
        if round <= newest.get(key, -1):
            return False
        newest[key] = round
        kept = None if self.depth == 1 else self.kept.get(key)
        if kept is None:
            self.kept[key] = [(update, now)]
        else:
            kept.append((update, now))
            del kept[: -self.depth]
        return True

    def take(self, limit: Limit | None = None) -> list[tuple[Update, float]]:
        """Take out the newest update of each sender and cluster up to the sender's limit, cluster by cluster.

        Later ones are kept. Returns each with when it came.
        """
        kept, self.kept = self.kept, {}
        taken, order = [], sorted(kept, key=itemgetter(1, 0))
        if limit is None:
            return [kept[key][-1] for key in order]
        for key in order:
            updates, most = kept[key], limit(key[0])  # in the order of their rounds
            if updates[-1][0].message.round > most:
                due = [pair for pair in updates if pair[0].message.round <= most]
                self.kept[key] = updates[len(due) :]
                updates = due
            if updates:
                taken.append(updates[-1])
        return taken

    def senders(self, limit: Limit) -> Counter[int]:
        """Count, by cluster, the senders of whom an update up to their limit waits; the first is the oldest."""
        return Counter(
            cluster for (sender, cluster), updates in self.kept.items() if updates[0][0].message.round <= limit(sender)
        )

    def forget_sender(self, sender: int) -> None:
        """Forget what a sender has said: it has begun a new life."""
        for store in (self.kept, self.newest):
            for key in [key for key in store if key[0] == sender]:
                del store[key]

    def forget_strangers(self, neighbours: Collection[int]) -> None:
        """Forget the rounds of those that are no neighbours and of whom nothing waits."""
        self.newest = {key: n for key, n in self.newest.items() if key[0] in neighbours or key in self.kept}

    def forget_clusters(self, clusters: Collection[int]) -> None:
        """Drop the updates of clusters that have changed."""
        self.kept = {key: updates for key, updates in self.kept.items() if key[1] not in clusters}
