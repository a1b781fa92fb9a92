"""The work of `work.py` in pfl-research's federated averaging: a script for an environment with `pfl`."""

from __future__ import annotations

from itertools import count
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from work import LEARNING_RATE, layers, now, print_result, read_work, samples_of, stub

stub("dp_accounting", "dp_accounting.pld", "dp_accounting.rdp", "prv_accountant")

from pfl.aggregate.simulate import SimulatedBackend  # noqa: E402
from pfl.algorithm.base import NNAlgorithmParams  # noqa: E402
from pfl.algorithm.federated_averaging import FederatedAveraging  # noqa: E402
from pfl.callback.base import TrainingProcessCallback  # noqa: E402
from pfl.data.federated_dataset import FederatedDataset  # noqa: E402
from pfl.data.pytorch import PyTorchTensorDataset  # noqa: E402
from pfl.hyperparam.base import NNTrainHyperParams  # noqa: E402
from pfl.metrics import Metrics  # noqa: E402
from pfl.model.pytorch import PyTorchModel  # noqa: E402

WORK = read_work()


class Net(nn.Sequential):
    """The model, as pfl wants it."""

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Compute the loss of a batch."""
        return cross_entropy(self(x), y)

    def metrics(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
        """Measure nothing."""
        return {}


class Clock(TrainingProcessCallback):
    """Notes when rounds end."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def after_central_iteration(self, aggregate_metrics: Metrics, model: Any, *, central_iteration: int) -> Any:
        """Look at the clock."""
        self.times.append(now())
        return False, Metrics()


def main() -> None:
    """Run the rounds."""
    users = {i: PyTorchTensorDataset(samples_of(i, WORK), user_id=str(i)) for i in range(WORK.clients)}
    turns = count()
    data = FederatedDataset(users.__getitem__, lambda: next(turns) % WORK.clients)
    module = Net(*layers(WORK))
    model = PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), lr=1.0))
    clock = Clock()
    FederatedAveraging().run(
        backend=SimulatedBackend(training_data=data, val_data=data),
        model=model,
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=WORK.rounds,
            evaluation_frequency=10**9,
            train_cohort_size=WORK.clients,
            val_cohort_size=0,
        ),
        model_train_params=NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=LEARNING_RATE, local_batch_size=WORK.batch
        ),
        callbacks=[clock],
        send_metrics_to_platform=False,
    )
    print_result(clock.times, WORK.clients * (len(clock.times) - 1))


if __name__ == "__main__":
    main()
