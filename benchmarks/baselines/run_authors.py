"""The work of `work.py` in the public code of DFCA's authors, of which DFCA_AUTHORS names a clone."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import torch
from work import LEARNING_RATE, now, print_result, read_work, samples_of, stub

stub("matplotlib", "matplotlib.pyplot", "scipy", "scipy.optimize", "seaborn", "sklearn", "sklearn.metrics")
stub("torchvision", "torchvision.datasets")

WORK = read_work()
PLACE = "mnist/notebooks/exp_1/dfca.py"


def trainer() -> Any:
    """Make the authors' trainer: their local steps and their exchange, on random images.

    It takes `tau` full-batch steps, so each step gets a batch in place of all samples.
    """
    path = Path(os.environ["DFCA_AUTHORS"]) / PLACE
    if WORK.model != "mlp":
        sys.exit("the authors' code for MNIST has an MLP only")
    if not path.exists():
        sys.exit(f"DFCA_AUTHORS must name a clone of the authors' code: there is no {path}")
    sys.path.insert(0, str(path.parent))  # for its own imports
    spec = importlib.util.spec_from_file_location("authors", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    batches = [tuple(part[: WORK.batch] for part in samples_of(client, WORK)) for client in range(WORK.clients)]

    class Trainer(module.TrainMNISTCluster):  # type: ignore[misc, name-defined]
        def load_data(self, m_i: int, train: bool = True) -> Any:
            return batches[m_i]

    config = {"m": WORK.clients, "p": 1, "h1": WORK.hidden, "tau": WORK.steps, "local_model_init": False}
    made = Trainer({**config, "train_seed": 0}, torch.device("cpu"))
    made.setup_models()
    return made


def main() -> None:
    """Run the rounds."""
    training, times = trainer(), []
    for _ in range(WORK.rounds):
        training.train([0] * WORK.clients, LEARNING_RATE)
        times.append(now())
    print_result(times, WORK.clients * (len(times) - 1))


if __name__ == "__main__":
    main()
