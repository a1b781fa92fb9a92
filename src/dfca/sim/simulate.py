"""The modules that a simulation starts from, made of a user's module (`dfca.api.simulate`)."""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from dfca.base.errors import DfcaWarning, ModelError, place_of
from dfca.core.learning.params import load_constants_
from dfca.core.rng import seeded
from dfca.models import looks_trained, on_images, pretrained


def make_starts(
    model: nn.Module | Callable[[], nn.Module], start_from: Any, crop: int | None = None
) -> Callable[[], nn.Module]:
    """Make the factory of a simulation's modules, which start afresh, or from given weights; crop: the side of the
    centres of images that they see.

    Warns of a module that looks trained and is started afresh.
    """
    if start_from is None:
        return on_images(fresh_copies(model) if isinstance(model, nn.Module) else _explained(model), crop, False)
    make = (lambda: copy.deepcopy(model)) if isinstance(model, nn.Module) else _explained(model)
    return pretrained(on_images(make, crop, False), start_from)


def _explained(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Make a factory whose errors say how it is called and where it failed; warns once of what it should not return."""
    name = getattr(build, "__name__", type(build).__name__)
    last: list[weakref.ref[nn.Module]] = []
    said: set[str] = set()

    def warn(text: str) -> None:
        if text not in said:
            said.add(text)
            warnings.warn(text, DfcaWarning, stacklevel=3)

    def make() -> nn.Module:
        try:
            made = build()
        except Exception as error:  # a user's own function
            raise ModelError(
                f"the model's function {name} fails with {type(error).__name__}: {error}{place_of(error)}; it is "
                "called without arguments and returns a torch.nn.Module"
            ) from error
        if not isinstance(made, nn.Module):
            return made
        if last and last[0]() is made:
            warn(
                f"the model's function {name} returns the same module again, so all models start alike and clusters "
                "cannot form; build a new one in it"
            )
        last[:] = [weakref.ref(made)]
        if narrow := {parameter.dtype for parameter in made.parameters()} & {torch.float16, torch.bfloat16}:
            warn(f"the module is of {narrow.pop()}, and models are trained in float32; dtype=... chooses another")
        return made

    return make


def fresh_copies(module: nn.Module) -> Callable[[], nn.Module]:
    """Make a factory of re-initialised copies of a module, with its own frozen parameters.

    Raises ModelError where some trained parameter belongs to a layer without `reset_parameters`.
    """
    frozen = {name: tensor.detach() for name, tensor in module.named_parameters() if not tensor.requires_grad}
    for name, layer in module.named_modules():
        trained = any(parameter.requires_grad for parameter in layer.parameters(recurse=False))
        if trained and not callable(getattr(layer, "reset_parameters", None)):
            raise ModelError(
                f"layer {name!r} ({type(layer).__name__}) has no reset_parameters(), so the module cannot be "
                "started afresh; pass a function that builds it instead of the module"
            )

    def build() -> nn.Module:
        twin = copy.deepcopy(module)
        for layer in twin.modules():
            if callable(reset := getattr(layer, "reset_parameters", None)):
                reset()
        load_constants_(twin, frozen)
        return twin

    with seeded(0, "looks-trained"):
        if looks_trained(module, build()):
            warnings.warn(
                "the module looks trained, and its weights are not used: every model starts afresh; pass "
                "start_from=module to start from them, or a function that builds the module to say that they are not "
                "wanted",
                DfcaWarning,
                stacklevel=4,
            )
    return build
