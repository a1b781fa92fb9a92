"""Epsilon of what clients have sent (`core.privacy`), by opacus's accountant: the extra `privacy`."""

from __future__ import annotations

import warnings
from functools import cache
from importlib.util import find_spec

from dfca.base.errors import ConfigError

ORDERS = [*(1 + step / 1000 for step in range(1, 100)), *(1 + step / 10 for step in range(1, 100)), *range(12, 512)]
"""Of Renyi divergence: finer and more than opacus's own, for epsilons above 100 and below 1."""


def check_accountant() -> None:
    """Raise ConfigError where the accountant is not installed."""
    if find_spec("opacus") is None:
        raise ConfigError("[privacy] needs one more library, which computes epsilon: pip install 'dfca[privacy]'")


@cache
def epsilon(noise: float, releases: int, delta: float, rate: float = 1.0) -> float:
    """Compute epsilon of a number of releases, by Renyi differential privacy.

    noise: its standard deviation in units of the clipping norm; delta: the probability with which the bound may fail;
    rate: the share of clients that are drawn in secret for each release.
    """
    if not releases:
        return 0.0
    check_accountant()
    from opacus.accountants import RDPAccountant

    accountant = RDPAccountant()
    accountant.history = [(min(max(noise, 1e-100), 1e100), rate, releases)]  # it squares the noise
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Optimal order is")  # at an end of ORDERS the bound holds as well
        return max(0.0, float(accountant.get_epsilon(delta=delta, alphas=ORDERS)))
