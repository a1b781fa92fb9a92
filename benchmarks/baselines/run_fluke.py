"""The work of `work.py` in fluke's gossip: a script for an environment with `fluke-fl`."""

from __future__ import annotations

from typing import Any

import networkx
from torch import nn
from work import CLASSES, LEARNING_RATE, circulant, layers, now, print_result, read_work, samples_of, stub

stub("torchvision", "torchvision.datasets", "torchvision.datasets.utils", "torchvision.models")
stub("torchvision.transforms", "wandb", "clearml", "opacus")

from fluke import DDict, FlukeENV  # noqa: E402
from fluke.algorithms.decentralized import GossipDFL, Topology  # noqa: E402
from fluke.data import DataSplitter, DummyDataContainer, FastDataLoader  # noqa: E402
from fluke.evaluation import ClassificationEval  # noqa: E402
from fluke.utils import FederationObserver  # noqa: E402

WORK = read_work()


class Clock(FederationObserver):
    """Notes when rounds end, and how many clients have trained."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.trained: list[int] = []
        self.fits = 0

    def end_round(self, round: int) -> None:
        """Look at the clock."""
        self.times.append(now())
        self.trained.append(self.fits)


def main() -> None:
    """Run the rounds."""
    env = FlukeENV()
    env.set_seed(0)
    env.set_device("cpu")
    env.set_evaluator(ClassificationEval(eval_every=10**9, n_classes=CLASSES))
    env.set_eval_cfg(pre_fit=False, post_fit=False, locals=False, server=False)
    loaders = [
        FastDataLoader(*samples_of(i, WORK), num_labels=CLASSES, batch_size=WORK.batch, shuffle=True)
        for i in range(WORK.clients)
    ]
    splitter = DataSplitter(DummyDataContainer(loaders, [None] * WORK.clients, None, CLASSES))
    splitter.assign = lambda *_: ((loaders, [None] * WORK.clients), None)
    graph = networkx.Graph([(i, m) for i, neighbours in enumerate(circulant(WORK)) for m in neighbours])
    federation = GossipDFL(
        n_clients=WORK.clients,
        data_splitter=splitter,
        hyper_params=DDict(
            model=nn.Sequential(*layers(WORK)),
            client=DDict(
                batch_size=WORK.batch,
                local_epochs=1,
                loss="CrossEntropyLoss",
                policy="aggregate",
                optimizer=DDict(name="SGD", lr=LEARNING_RATE),
                scheduler=DDict(name="StepLR", step_size=1, gamma=1),
            ),
        ),
        topology=Topology(graph),
    )
    clock = Clock()
    federation.set_callbacks([clock])
    for client in federation.clients:
        client.fit = _counted(client.fit, clock)
    federation.finalize = lambda: None
    federation.run(WORK.rounds)
    print_result(clock.times, clock.trained[-1] - clock.trained[0])


def _counted(fit: Any, clock: Clock) -> Any:
    def fit_and_count(*args: Any, **kwargs: Any) -> Any:
        clock.fits += 1
        return fit(*args, **kwargs)

    return fit_and_count


if __name__ == "__main__":
    main()
