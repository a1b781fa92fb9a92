"""The work of `work.py` in BlazeFL's federated averaging: a script for an environment with `blazefl`."""

from __future__ import annotations

from typing import Any

from blazefl.contrib.fedavg import FedAvgBaseClientTrainer, FedAvgBaseServerHandler, FedAvgThreadPoolClientTrainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from work import LEARNING_RATE, layers, now, print_result, read_work, samples_of

WORK = read_work()
OPTIONS = {"model_name": "model", "device": "cpu", "num_clients": WORK.clients, "batch_size": WORK.batch, "seed": 0}
TRAINING = {**OPTIONS, "epochs": 1, "lr": LEARNING_RATE}


class Models:
    """What BlazeFL asks for a model."""

    def select_model(self, name: str) -> nn.Module:
        """Build the model."""
        return nn.Sequential(*layers(WORK))


class Data:
    """What BlazeFL asks for batches."""

    def __init__(self) -> None:
        self.sets = [TensorDataset(*samples_of(i, WORK)) for i in range(WORK.clients)]

    def get_dataloader(self, type_: Any, cid: int, batch_size: int, generator: Any = None) -> DataLoader:
        """Return a client's batches, shuffled."""
        return DataLoader(self.sets[cid], batch_size, shuffle=True, generator=generator)


def measure(trainer: Any, data: Data) -> list[float]:
    """Run the rounds with one kind of trainer; return the times when they ended."""
    server = FedAvgBaseServerHandler(
        Models(), dataset=data, global_round=WORK.rounds, sample_ratio=1.0, **OPTIONS
    )  # fmt: skip
    times = []
    while not server.if_stop():
        trainer.local_process(server.downlink_package(), server.sample_clients())
        for package in trainer.uplink_package():
            server.load(package)
        times.append(now())
    return times


def main() -> None:
    """Run the rounds with both trainers, and print the times of the faster one."""
    data = Data()
    trainers = [
        FedAvgBaseClientTrainer(Models(), dataset=data, **TRAINING),
        FedAvgThreadPoolClientTrainer(Models(), dataset=data, num_parallels=WORK.threads, **TRAINING),
    ]
    measured = [measure(trainer, data) for trainer in trainers]
    print_result(min(measured, key=lambda times: times[-1] - times[0]), WORK.clients * (WORK.rounds - 1))


if __name__ == "__main__":
    main()
