"""A script as a user writes it: mypy checks it; it is never run. Lines that must be errors are marked as ignored."""

from typing import assert_type

import torch
from torch import nn

import dfca


def network() -> nn.Module:
    return dfca.mlp((1, 8, 8), 10, 32)


split = dfca.split_from([(torch.zeros(4, 1, 8, 8), [0, 1, 2, 3])] * 6)
one = dfca.simulate(network, split, rounds=2)

assert_type(one, dfca.Result)
assert_type(dfca.simulate(network(), split, {"name": "ifca"}, rounds=2, seed=1, participation=0.5), dfca.Result)
assert_type(dfca.simulate(network, split, dfca.ALGORITHMS["ifca"](), rounds=2, clusters="auto"), dfca.Result)
assert_type(dfca.simulate(network, split, ["ifca", "local"], rounds=2), dfca.Comparison)
assert_type(dfca.simulate(network, split, ("ifca", dfca.ALGORITHMS["local"]()), rounds=2, seed=3), dfca.Comparison)
assert_type(dfca.simulate(network, split, "ifca", rounds=2, seed=[0, 1]), dfca.Comparison)
assert_type(dfca.simulate(network, split, ["ifca"], rounds=2, seed=range(3), topology="ring"), dfca.Comparison)
assert_type(one.score, float)
assert_type(one.model(0), nn.Module)
assert_type(one.assignments, torch.Tensor)
assert_type(dfca.load_run("runs/quickstart"), dfca.StoredRun)
assert_type(dfca.make_task("regression"), dfca.Task)

dfca.simulate(network, split, rounds=2, participaton=0.5)  # type: ignore[call-overload]
dfca.simulate(network, split, rounds="2")  # type: ignore[call-overload]
dfca.simulate(network, split, rounds=2, weights="equal")  # type: ignore[call-overload]
