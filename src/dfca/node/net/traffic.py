"""What has gone over the links of a node since it began, and when it last heard from whom."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field


@dataclass
class LinkTraffic:
    """Bytes by member. The sums only grow: what a link or a member that is gone has counted stays in them.

    heard: when something last came from a member whose link is down, by `time.time`.
    """

    received: Counter[str] = field(default_factory=Counter)
    sent: Counter[str] = field(default_factory=Counter)
    heard: dict[str, float] = field(default_factory=dict)
    gone_received: int = 0
    gone_sent: int = 0

    def end_link(self, member: str, received: int, sent: int, silent_s: float) -> None:
        """Take over what a link has counted, which is down now."""
        self.received[member] += received
        self.sent[member] += sent
        self.heard[member] = time.time() - silent_s

    def forget(self, member: str) -> None:
        """Drop the counts of one that is no longer a member; the sums stay."""
        self.gone_received += self.received.pop(member, 0)
        self.gone_sent += self.sent.pop(member, 0)
        self.heard.pop(member, None)
