"""Optimisers of local steps: SGD as the paper has it, those of torch, and functions with torch's interface.

An optimiser begins anew in every round: the model has been averaged since, or is another one, and old moments
would point elsewhere. It sees the gradient after `clip` has bounded its norm:

    g <- g min(1, clip / |g|)    |g| over all tensors that are trained, of each client by itself
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from dfca.base.errors import ConfigError

if TYPE_CHECKING:
    from dfca.core.method import LocalOptions


class Rule(NamedTuple):
    """How a gradient step of SGD is taken; decays: of each tensor."""

    rate: float
    momentum: float
    decays: Sequence[float]


def make_stepper(
    theta: Sequence[Tensor], options: LocalOptions, decays: Sequence[float], stacked: bool = False
) -> Callable[[Sequence[Tensor]], None]:
    """Make the function that takes one step in place, given the gradients.

    theta: the tensors that are trained; with `stacked` those of C clients, (C, *shape). decays: the weight decays.
    """
    take: Callable[[Sequence[Tensor]], None]
    if options.optimizer == "sgd":
        rule, velocity = Rule(options.learning_rate, options.momentum, decays), None

        def take(gradients: Sequence[Tensor]) -> None:
            nonlocal velocity
            velocity = descend_(theta, gradients, velocity, rule)

    else:
        optimiser = make_optimiser(theta, options, decays)

        def take(gradients: Sequence[Tensor]) -> None:
            for tensor, gradient in zip(theta, gradients, strict=True):
                tensor.grad = gradient
            optimiser.step()

    if options.clip is None:
        return take
    limit = options.clip
    return lambda gradients: take(clipped(gradients, limit, stacked))


def make_optimiser(theta: Sequence[Tensor], options: LocalOptions, decays: Sequence[float]) -> Any:
    """Make an optimiser with torch's interface.

    Raises ConfigError where the user's own function fails, or returns something else.
    """
    groups = [{"params": [tensor], "weight_decay": decay} for tensor, decay in zip(theta, decays, strict=True)]
    make = options.optimizer
    if isinstance(make, str):
        return {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[make](groups, lr=options.learning_rate)
    name = getattr(make, "__name__", type(make).__name__)
    try:
        optimiser = make(groups, lr=options.learning_rate)
    except Exception as error:  # a user's own function
        raise ConfigError(
            f"local.optimizer {name} failed with {type(error).__name__}: {error}; it is called as make(groups, lr=...) "
            'with groups of "params" and "weight_decay", like the classes of torch.optim'
        ) from error
    if not callable(getattr(optimiser, "step", None)):
        raise ConfigError(
            f"local.optimizer {name} must return an object with step(), like torch.optim.SGD, got "
            f"{type(optimiser).__name__}"
        )
    return optimiser


def check_optimiser(options: LocalOptions) -> None:
    """Raise ConfigError where the optimiser that is named is none."""
    if options.optimizer != "sgd":
        make_optimiser([torch.zeros(1, requires_grad=True)], options, [0.0])


def clipped(gradients: Sequence[Tensor], limit: float, stacked: bool) -> list[Tensor]:
    """Scale gradients down to a norm of at most `limit`; stacked: those of each client, (C, *shape), by themselves."""
    lead = 1 if stacked else 0
    squares = torch.stack([g.flatten(lead).square().sum(dim=-1) for g in gradients]).sum(dim=0)
    scale = (limit / squares.sqrt()).clamp(max=1.0).nan_to_num(nan=1.0)
    return [g * scale.view(-1, *[1] * (g.dim() - 1)) if stacked else g * scale for g in gradients]


def descend_(
    theta: Sequence[Tensor], gradients: Sequence[Tensor], velocity: Sequence[Tensor] | None, rule: Rule
) -> Sequence[Tensor]:
    """Take one step of SGD in place, with weight decay and heavy-ball momentum; returns the velocity."""
    with torch.no_grad():
        if any(rule.decays):
            decayed = zip(gradients, theta, rule.decays, strict=True)
            gradients = [g.add(t, alpha=decay) if decay else g for g, t, decay in decayed]
        if rule.momentum and velocity is not None:
            gradients = [g.add(v, alpha=rule.momentum) for g, v in zip(gradients, velocity, strict=True)]
        for tensor, gradient in zip(theta, gradients, strict=True):
            tensor.sub_(gradient, alpha=rule.rate)
    return gradients
