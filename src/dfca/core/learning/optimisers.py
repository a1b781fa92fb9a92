"""Optimisers of local steps: SGD as the paper has it, those of torch, and functions with torch's interface.

An optimiser begins anew in every round, for the model has been averaged since, or is another one, and old moments may
point elsewhere; or each client keeps its state (`Kept`) while it trains the same cluster. It sees the gradient after
`clip` has bounded its norm:

    g <- g min(1, clip / |g|)    |g| over all tensors that are trained, of each client by itself
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dfca.base.errors import ConfigError, place_of

if TYPE_CHECKING:
    from dfca.core.method import LocalOptions


State = dict[str, Tensor]
"""The state of an optimiser, by name and place of the tensor that is trained."""


class Kept:
    """The optimisers' states of clients, each with the round that left it and the cluster that it trained.

    The last two of every client: a round that is done again begins where it began before.
    """

    def __init__(self) -> None:
        self.entries: dict[int, list[tuple[int, int, State]]] = {}

    def before(self, client: int, cluster: int, round: int) -> State:
        """Return a copy of the state that a client trains a cluster with in a round; {}: it begins anew."""
        earlier = [entry for entry in self.entries.get(client, ()) if entry[0] < round]
        if not earlier or earlier[-1][1] != cluster:
            return {}
        return {name: tensor.clone() for name, tensor in earlier[-1][2].items()}

    def after(self, client: int, cluster: int, round: int, state: State) -> None:
        """Note the state that a round has left."""
        earlier = [entry for entry in self.entries.get(client, ()) if entry[0] < round]
        self.entries[client] = [*earlier[-1:], (round, cluster, state)]

    def tensors(self) -> State:
        """List everything for a checkpoint, by name."""
        return {
            f"optimizer/{client}/{round}/{cluster}/{name}": tensor
            for client, entries in self.entries.items()
            for round, cluster, state in entries
            for name, tensor in state.items()
        }

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue from what `tensors` listed, among others."""
        states: dict[tuple[int, int, int], State] = {}
        for key, tensor in tensors.items():
            if key.startswith("optimizer/"):
                *place, name = key.removeprefix("optimizer/").split("/", 3)
                client, round, cluster = map(int, place)
                states.setdefault((client, round, cluster), {})[name] = tensor.clone()
        self.entries = {}
        for (client, round, cluster), state in sorted(states.items(), key=lambda item: item[0]):
            self.after(client, cluster, round, state)


def make_stepper(
    theta: Sequence[Tensor],
    options: LocalOptions,
    decays: Sequence[float],
    stacked: bool = False,
    state: State | None = None,
) -> Callable[[Sequence[Tensor]], None]:
    """Make the function that takes one step in place, given the gradients.

    theta: the tensors that are trained; with `stacked` those of C clients, (C, *shape). decays: the weight decays.
    state: of the optimiser, which continues with it and leaves its own there; None: it begins anew.
    """
    take: Callable[[Sequence[Tensor]], None]
    if options.optimizer == "sgd":
        velocity: Sequence[Tensor] | None = None
        if state:
            velocity = [state[f"velocity/{place}"].to(tensor.device) for place, tensor in enumerate(theta)]

        def take(gradients: Sequence[Tensor]) -> None:
            nonlocal velocity
            velocity = descend_(theta, gradients, velocity, options, decays)
            if state is not None:
                state.update({f"velocity/{place}": tensor for place, tensor in enumerate(velocity)})

    else:
        optimiser = make_optimiser(theta, options, decays)
        for name, kept in (state or {}).items():
            key, place = name.rsplit("/", 1)
            tensor = theta[int(place)]  # a count of steps stays on the CPU
            optimiser.state[tensor][key] = kept.to(tensor.device) if kept.dim() else kept

        def take(gradients: Sequence[Tensor]) -> None:
            for tensor, gradient in zip(theta, gradients, strict=True):
                tensor.grad = gradient
            optimiser.step()
            if state is not None:
                state.update(_state_of(optimiser, theta))

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
            f"local.optimizer {name} failed with {type(error).__name__}: {error}{place_of(error)}; it is called as "
            'make(groups, lr=...) with groups of "params" and "weight_decay", like the classes of torch.optim'
        ) from error
    if not callable(getattr(optimiser, "step", None)):
        raise ConfigError(
            f"local.optimizer {name} must return an object with step(), like torch.optim.SGD, got "
            f"{type(optimiser).__name__}"
        )
    return optimiser


def _state_of(optimiser: Any, theta: Sequence[Tensor]) -> State:
    """Return what an optimiser remembers: tensors, in the state that those of torch have."""
    states = {place: optimiser.state.get(tensor, {}) for place, tensor in enumerate(theta)}
    return {
        f"{key}/{place}": value for place, kept in states.items() for key, value in kept.items() if value is not None
    }


def check_optimiser(options: LocalOptions) -> None:
    """Raise ConfigError where the optimiser that is named is none, or has no state that could be kept."""
    if options.optimizer == "sgd":
        return
    probe = torch.zeros(1, requires_grad=True)
    optimiser = make_optimiser([probe], options, [0.0])
    if not options.keeps_state:
        return
    probe.grad = torch.zeros(1)
    try:
        optimiser.step()
    except Exception as error:  # a user's own function
        raise ConfigError(
            f"local.optimizer {type(optimiser).__name__}.step() failed with {type(error).__name__}: "
            f"{error}{place_of(error)}; it is called without arguments, on dense gradients"
        ) from error
    state = getattr(optimiser, "state", None)
    if not isinstance(state, Mapping) or not all(
        isinstance(value, Tensor) for value in _state_of(optimiser, [probe]).values()
    ):
        raise ConfigError(
            f"local.optimizer {type(optimiser).__name__} has no state of tensors, as those of torch.optim have, that "
            'could be kept; set local.optimizer_state = "fresh"'
        )


def clipped(gradients: Sequence[Tensor], limit: float, stacked: bool) -> list[Tensor]:
    """Scale gradients down to a norm of at most `limit`; stacked: those of each client, (C, *shape), by themselves."""
    lead = 1 if stacked else 0
    squares = torch.stack([g.flatten(lead).square().sum(dim=-1) for g in gradients]).sum(dim=0)
    scale = (limit / squares.sqrt()).clamp(max=1.0).nan_to_num(nan=1.0)
    return [g * scale.view(-1, *[1] * (g.dim() - 1)) if stacked else g * scale for g in gradients]


def descend_(
    theta: Sequence[Tensor],
    gradients: Sequence[Tensor],
    velocity: Sequence[Tensor] | None,
    options: LocalOptions,
    decays: Sequence[float],
) -> Sequence[Tensor]:
    """Take one step of SGD in place, with weight decay and heavy-ball momentum; returns the velocity."""
    with torch.no_grad():
        if any(decays):
            decayed = zip(gradients, theta, decays, strict=True)
            gradients = [g.add(t, alpha=decay) if decay else g for g, t, decay in decayed]
        if options.momentum and velocity is not None:
            gradients = [g.add(v, alpha=options.momentum) for g, v in zip(gradients, velocity, strict=True)]
        for tensor, gradient in zip(theta, gradients, strict=True):
            tensor.sub_(gradient, alpha=options.learning_rate)
    return gradients
