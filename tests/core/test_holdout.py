"""Held-out samples: a fifth, the same for everybody who asks, and none of a client that has few."""

import pytest
import torch

from dfca.core.learning.local import held_out


@pytest.mark.parametrize(("samples", "held"), [(0, 0), (1, 0), (4, 0), (5, 1), (9, 1), (10, 2), (60, 12), (64, 12)])
def test_a_fifth_is_held_out(samples: int, held: int) -> None:
    mask = held_out(samples, seed=0, client=3)
    assert mask.dtype == torch.bool
    assert (len(mask), int(mask.sum())) == (samples, held)


def test_clients_and_seeds_draw_their_own_and_always_the_same() -> None:
    first = held_out(100, 0, 0)
    assert torch.equal(first, held_out(100, 0, 0))
    assert not torch.equal(first, held_out(100, 0, 1))
    assert not torch.equal(first, held_out(100, 1, 0))
