"""The work of `work.py` in gossipy: a script for an environment with `gossipy-dfl`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from work import LEARNING_RATE, circulant, layers, now, print_result, read_work, samples_of, stub

stub("torchvision")

from gossipy.core import AntiEntropyProtocol, CreateModelMode, StaticP2PNetwork  # noqa: E402
from gossipy.model import TorchModel  # noqa: E402
from gossipy.model.handler import TorchModelHandler  # noqa: E402
from gossipy.node import GossipNode  # noqa: E402
from gossipy.simul import GossipSimulator, SimulationEventReceiver  # noqa: E402

WORK = read_work()
ROUND = 100
"""Time units of a round in gossipy's clock; nodes act at a random one."""


class Net(TorchModel):
    """The model, as gossipy wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers(WORK))

    def init_weights(self, *args: Any, **kwargs: Any) -> None:
        """Keep torch's own initialisation."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the model."""
        return self.layers(x)


class Data:
    """What gossipy asks a dispatcher for: samples per node, nothing to evaluate on."""

    def size(self) -> int:
        """Count the nodes."""
        return WORK.clients

    def __getitem__(self, node: int) -> tuple[Any, Any]:
        return samples_of(node, WORK), None

    def has_test(self) -> bool:
        """Return that nothing is evaluated."""
        return False


class Clock(SimulationEventReceiver):
    """Notes when rounds end, and how many messages were sent; each makes one node merge and train."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.messages: list[int] = []
        self.sent = 0

    def update_message(self, failed: bool, msg: Any = None) -> None:
        """Count a message."""
        self.sent += not failed

    def update_timestep(self, t: int) -> None:
        """Look at the clock at the end of a round."""
        if (t + 1) % ROUND == 0:
            self.times.append(now())
            self.messages.append(self.sent)

    def update_evaluation(self, *args: Any) -> None:
        """Ignore scores; there are none."""

    def update_end(self) -> None:
        """Do nothing at the end."""


def main() -> None:
    """Run the rounds."""
    adjacency = np.zeros((WORK.clients, WORK.clients))
    for i, neighbours in enumerate(circulant(WORK)):
        adjacency[i, neighbours] = 1
    handler = TorchModelHandler(
        net=Net(),
        optimizer=torch.optim.SGD,
        optimizer_params={"lr": LEARNING_RATE},
        criterion=nn.CrossEntropyLoss(),
        local_epochs=1,
        batch_size=WORK.batch,
        create_model_mode=CreateModelMode.MERGE_UPDATE,
    )
    nodes = GossipNode.generate(
        data_dispatcher=Data(),
        p2p_net=StaticP2PNetwork(WORK.clients, adjacency),
        model_proto=handler,
        round_len=ROUND,
        sync=True,
    )
    simulator = GossipSimulator(nodes=nodes, data_dispatcher=Data(), delta=ROUND, protocol=AntiEntropyProtocol.PUSH)
    clock = Clock()
    simulator.add_receiver(clock)
    simulator.init_nodes()
    simulator.start(n_rounds=WORK.rounds)
    print_result(clock.times, clock.messages[-1] - clock.messages[0])


if __name__ == "__main__":
    main()
