"""The work of `work.py` in Flower's simulation: a script for an environment with `flwr[simulation]`."""

from __future__ import annotations

import os
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch import nn
from torch.nn.functional import cross_entropy
from work import LEARNING_RATE, Work, layers, now, print_result, read_work, samples_of

WORK: Work = read_work()
OBJECT_STORE_BYTES = 200 * 2**20
kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # of this actor: samples are drawn once, not once per round
client_app, server_app = ClientApp(), ServerApp()


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """Take the local steps of one client."""
    torch.set_num_threads(1)  # Ray gives an actor one CPU
    client = int(context.node_config["partition-id"])
    if client not in kept:
        kept[client] = samples_of(client, WORK)
    x, y = kept[client]
    model = nn.Sequential(*layers(WORK))
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimiser = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    for rows in torch.randperm(len(y)).split(WORK.batch):
        optimiser.zero_grad()
        cross_entropy(model(x[rows]), y[rows]).backward()
        optimiser.step()
    content = RecordDict(
        {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": len(y)})}
    )  # fmt: skip
    return Message(content=content, reply_to=message)


class Timed(FedAvg):
    """FedAvg that notes when each round has been averaged."""

    times: list[float]

    def aggregate_train(self, server_round: int, replies: Any) -> Any:
        """Average, and look at the clock."""
        aggregated = super().aggregate_train(server_round, replies)
        self.times.append(now())
        return aggregated


@server_app.main()
def serve(grid: Grid, context: Context) -> None:
    """Run the rounds."""
    strategy = Timed(fraction_train=1.0, fraction_evaluate=0.0, min_available_nodes=WORK.clients)
    strategy.times = []
    start = ArrayRecord(nn.Sequential(*layers(WORK)).state_dict())
    strategy.start(grid=grid, initial_arrays=start, num_rounds=WORK.rounds)
    print_result(strategy.times, WORK.clients * (len(strategy.times) - 1))


if __name__ == "__main__":
    os.environ.setdefault("RAY_DISABLE_DOCKER_CPU_WARNING", "1")
    run_simulation(
        server_app,
        client_app,
        num_supernodes=WORK.clients,
        backend_config={
            "init_args": {
                "num_cpus": WORK.threads,
                "object_store_memory": OBJECT_STORE_BYTES,
                "include_dashboard": False,
            },
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        },
    )
