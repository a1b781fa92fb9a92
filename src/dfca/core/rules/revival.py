"""When clients that train call an election: a cluster was lost, or no model fits a distribution any more.

L_i is the loss of client i's best model in a round, l_i and h_i its lowest and highest loss since the last election;
idle_j counts the rounds since a local update of cluster j was last seen, gap_j is the longest such time that ended by
itself, and `last` is the round of the last election.

  risen_i  = L_i > ALARM l_i  and  L_i - l_i > LOST_SHARE (h_i - l_i)
  alarm_i  = risen_i in ROUNDS rounds in a row
  lost_j   = idle_j >= ROUNDS + 2 gap_j, and no election has failed to fill j since
  due      = (alarms >= support or any lost_j)  and  now - last >= pause
  pause    = PAUSE after an election that opened a cluster, else twice the pause before
"""

from __future__ import annotations

from typing import overload

from torch import Tensor

ALARM = 1.5  # ratio of the loss to the lowest one above which a loss has risen
LOST_SHARE = 0.2  # share of what was learned that must be lost too: twice a tiny loss is no drift
ROUNDS = 3  # in a row with a risen loss before the alarm, or without a trainer before a cluster counts as lost
UNSEEN = 10  # rounds before a cluster counts as lost of which no update was ever seen
PAUSE = 10  # rounds between two elections: a new centre must be trained before it is judged


@overload
def has_risen(loss: float, lowest: float, highest: float) -> bool: ...
@overload
def has_risen(loss: Tensor, lowest: Tensor, highest: Tensor) -> Tensor: ...
def has_risen(loss: float | Tensor, lowest: float | Tensor, highest: float | Tensor) -> bool | Tensor:
    """Return risen_i of one client, or of many (N,): L > ALARM l and L - l > LOST_SHARE (h - l)."""
    return (loss > ALARM * lowest) & (loss - lowest > LOST_SHARE * (highest - lowest))


def is_lost(idle: int, given_up: bool, gap: int = 0, seen: bool = True) -> bool:
    """Return lost_j; given_up: an election has failed to fill it; gap: 0 where clients see all updates at once; seen:
    whether an update of it was ever seen."""
    return not given_up and idle >= (ROUNDS + 2 * gap if seen else UNSEEN)


def is_due(alarms: int, support: int, lost: bool, waited: int, pause: int) -> bool:
    """Return whether a by-election is called, `waited` rounds after the last one."""
    return waited >= pause and (alarms >= support or lost)


def next_pause(pause: int, opened: bool) -> int:
    """Return the pause after an election; it doubles where nothing was opened, so that false alarms cost little."""
    return PAUSE if opened else 2 * pause
