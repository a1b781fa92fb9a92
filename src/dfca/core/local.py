"""What a client computes alone: the losses of its models and its local steps.

F_client(theta, D_i) = 1/|D_i| sum_d L(theta, d), L the cross entropy.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from dfca.core.params import FlatModel, Mode
from dfca.errors import ConfigError


@dataclass(frozen=True)
class LocalOptions:
    """How a client trains: the paper's tau is `steps`, its gamma is `learning_rate`.

    batch_size None is the paper's full batch. With mini-batches, `steps` still counts gradient steps; the batches run
    through fresh permutations of the client's samples.
    """

    steps: int = 5
    learning_rate: float = 0.1
    batch_size: int | None = None
    momentum: float = 0.0
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        if self.steps < 0:
            raise ConfigError(f"local.steps must be >= 0, got {self.steps}")
        if not self.learning_rate > 0:
            raise ConfigError(f"local.learning_rate must be > 0, got {self.learning_rate}")
        if self.batch_size is not None and self.batch_size < 1:
            raise ConfigError(f'local.batch_size must be >= 1 or "full", got {self.batch_size}')
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"local.momentum must be in [0, 1), got {self.momentum}")
        if not self.weight_decay >= 0:
            raise ConfigError(f"local.weight_decay must be >= 0, got {self.weight_decay}")


def infer(model: FlatModel, vector: Tensor, x: Tensor, mode: Mode) -> Tensor:
    """Run one model (P,) on x (n, *shape) -> (n, classes); the running statistics in the vector stay as they are."""
    return model.forward(vector[: model.trained], vector[model.trained :].clone(), x, mode)


def sample_losses(model: FlatModel, vectors: Tensor, x: Tensor, y: Tensor, mode: Mode = "objective") -> Tensor:
    """Compute L(theta_j, d) of each model on each sample: vectors (m, P), x (n, *shape), y (n,) -> (m, n)."""
    with torch.no_grad():
        outputs = (infer(model, vector, x, mode) for vector in vectors)
        return torch.stack([cross_entropy(output, y, reduction="none") for output in outputs])


def losses(model: FlatModel, vectors: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Compute F_client of each model: vectors (m, P) -> (m,)."""
    return sample_losses(model, vectors, x, y).mean(dim=1)


def hits(model: FlatModel, vector: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Tell for each sample whether the deployed model is right: vector (P,) -> (n,) bool."""
    with torch.no_grad():
        return infer(model, vector, x, "score").argmax(dim=1) == y


def lowest(values: Tensor) -> int:
    """Pick the index of the lowest loss: the lowest index on ties; NaN never wins against a number."""
    numbers = [float("inf") if value != value else value for value in values.tolist()]
    return numbers.index(min(numbers))


def draw_batches(samples: int, options: LocalOptions, generator: torch.Generator) -> Tensor | None:
    """Draw the sample indices of each local step, (steps, batch), or None for full batches."""
    if options.batch_size is None or options.batch_size >= samples:
        return None
    needed = options.steps * options.batch_size
    epochs = -(-needed // samples)
    order = torch.cat([torch.randperm(samples, generator=generator) for _ in range(epochs)] or [torch.empty(0).long()])
    return order[:needed].view(options.steps, options.batch_size)


def local_steps(
    model: FlatModel,
    vector: Tensor,
    x: Tensor,
    y: Tensor,
    options: LocalOptions,
    batches: Tensor | None = None,
) -> Tensor:
    """Train a copy of one model: theta <- theta - gamma v, v <- momentum v + grad F_client(theta) + decay theta.

    vector (P,), x (n, *shape), y (n,), batches (steps, b) or None for the full batch; returns (P,).
    """
    vector = vector.clone()
    theta, rest = vector[: model.trained], vector[model.trained :]
    velocity: Tensor | None = None
    for step in range(options.steps):
        x_step, y_step = (x, y) if batches is None else (x[batches[step]], y[batches[step]])
        theta.requires_grad_()
        loss = cross_entropy(model.forward(theta, rest, x_step, "train"), y_step)
        (gradient,) = torch.autograd.grad(loss, theta)
        theta = theta.detach()
        velocity = descend_(theta, gradient, velocity, options)
    return vector


def descend_(theta: Tensor, gradient: Tensor, velocity: Tensor | None, options: LocalOptions) -> Tensor:
    """Take one gradient step in place, with weight decay and heavy-ball momentum; returns the velocity."""
    if options.weight_decay:
        gradient = gradient.add(theta, alpha=options.weight_decay)
    if options.momentum and velocity is not None:
        gradient = gradient.add(velocity, alpha=options.momentum)
    theta.sub_(gradient, alpha=options.learning_rate)
    return gradient
