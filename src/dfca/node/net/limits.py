"""What a neighbour may cost: frames per second, and how long one that broke the rules is kept out."""

from __future__ import annotations

from collections import Counter


class Bucket:
    """Allows `rate` events per second, and `burst` at once."""

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self.rate, self.burst = rate, burst
        self._tokens, self._time = float(burst), now

    def take(self, now: float, amount: float = 1.0) -> bool:
        """Return whether one more is allowed."""
        self._tokens = min(self.burst, self._tokens + self.rate * max(0.0, now - self._time))
        self._time = now
        if self._tokens < amount:
            return False
        self._tokens -= amount
        return True


class Refusals:
    """Counts what was refused, by reason: in all and by member."""

    def __init__(self) -> None:
        self.total: Counter[str] = Counter()
        self._members: dict[str, Counter[str]] = {}

    def add(self, reason: str, member: str | None = None) -> None:
        """Count one refusal; member: of the roster only, so that strangers cannot fill the table."""
        self.total[reason] += 1
        if member is not None:
            self._members.setdefault(member, Counter())[reason] += 1

    def of(self, member: str) -> dict[str, int]:
        """Return the refusals of a member."""
        return dict(self._members.get(member, ()))

    def forget(self, member: str) -> None:
        """Drop the counts of a removed member; the total stays."""
        self._members.pop(member, None)


class Penalties:
    """Keeps out members that broke the rules, twice as long each time."""

    def __init__(self, first_s: float, most_s: float) -> None:
        self.first_s, self.most_s = first_s, most_s
        self._until: dict[str, tuple[float, float]] = {}

    def punish(self, member: str, now: float) -> None:
        """Keep a member out; one that behaved for as long as it was kept out starts again at the first span."""
        until, span = self._until.get(member, (now, 0.0))
        again = span > 0 and now - until < max(span, self.most_s)
        span = min(self.most_s, 2 * span) if again else self.first_s
        self._until[member] = (now + span, span)

    def keep_out(self, member: str, until: float) -> None:
        """Keep a member out until a given time."""
        self._until[member] = (until, 0.0)

    def left_s(self, member: str, now: float) -> float:
        """Return for how long a member is still kept out."""
        until, _ = self._until.get(member, (now, 0.0))
        return max(0.0, until - now)
