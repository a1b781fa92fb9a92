"""When clients that train call an election: a lost cluster, or a distribution that no model fits any more."""

from __future__ import annotations

ALARM = 1.5
"""A client whose lowest loss stays above so many times the lowest it has seen raises the alarm."""
LOST_SHARE = 0.2
"""... and has lost so much of what its loss went down by since the last election: with momentum losses become tiny, and
twice of next to nothing is no drift."""
ROUNDS = 3
"""It does after so many rounds in a row; after as many rounds without a trainer a cluster counts as lost."""
PAUSE = 10
"""Rounds between two elections: a new centre needs some to be trained before it is judged. Twice as many after each
election that opened nothing, so that a false alarm costs little."""
