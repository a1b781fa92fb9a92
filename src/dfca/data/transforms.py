"""How clusters differ: each cluster sees the samples through its own transform.

A transform maps x `(n, *shape)` and y `(n,)` to new ones of the same shapes. Cluster 0 sees them as they are, unless
the angles differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample

from dfca.core.rng import stream
from dfca.data.options import DataOptions, TransformName
from dfca.data.registry import SampleKind
from dfca.errors import ConfigError

Transform = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def rotate(x: Tensor, degrees: float) -> Tensor:
    """Rotate images `(n, c, h, w)` counter-clockwise: exactly for multiples of 90, bilinearly (zeros outside) else."""
    if x.shape[-1] != x.shape[-2]:
        raise ConfigError(f"rotation needs square images, got {x.shape[-2]}x{x.shape[-1]}; use transform none")
    turns = _quarter_turns(degrees)
    return rotate_by_sampling(x, degrees) if turns is None else torch.rot90(x, turns, dims=(-2, -1))


def rotate_by_sampling(x: Tensor, degrees: float) -> Tensor:
    """Rotate float images `(n, c, h, w)` counter-clockwise by bilinear sampling; what comes from outside is 0."""
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    backwards = torch.tensor([[cos, -sin, 0.0], [sin, cos, 0.0]], dtype=x.dtype, device=x.device)
    grid = affine_grid(backwards.expand(len(x), 2, 3), list(x.shape), align_corners=False)
    return grid_sample(x, grid, mode="bilinear", padding_mode="zeros", align_corners=False)


def rotate_axes(x: Tensor, degrees: float) -> Tensor:
    """Rotate sensor windows `(n, channels, time)` about the z axis: the phone is turned in its holder.

    Channels come in triples x y z (acceleration, gyroscope); in each, x' = x cos a - y sin a, y' = x sin a + y cos a,
    z' = z. Four clusters are the four in-plane orientations of a phone.
    """
    if x.shape[1] % 3:
        raise ConfigError(f"axis-rotation needs channels in triples x y z, got {x.shape[1]} channels")
    cos, sin = _cos_sin(degrees)
    turned = x.clone()
    turned[:, 0::3] = cos * x[:, 0::3] - sin * x[:, 1::3]
    turned[:, 1::3] = sin * x[:, 0::3] + cos * x[:, 1::3]
    return turned


def label_permutations(classes: int, clusters: int, seed: int) -> list[Tensor]:
    """Draw one permutation of the labels per cluster, all different; cluster 0 keeps the labels."""
    if clusters > math.factorial(min(classes, 20)):
        raise ConfigError(f"clusters must be <= {math.factorial(classes)} (orders of {classes} labels), got {clusters}")
    chosen = [torch.arange(classes)]
    for cluster in range(1, clusters):
        generator = stream(seed, "labels", cluster)
        order = torch.randperm(classes, generator=generator)
        while any(torch.equal(order, other) for other in chosen):
            order = torch.randperm(classes, generator=generator)
        chosen.append(order)
    return chosen


def resolve(options: DataOptions, kind: SampleKind) -> TransformName:
    """Return which transform `auto` means, and refuse one that does not fit the kind of data."""
    name = options.transform
    if name == "auto":
        if kind == "window":
            name = "axis-rotation"
        else:
            name = "none" if options.partition == "owner" else "rotation"
    if (name, kind) in (("rotation", "window"), ("axis-rotation", "image")):
        fitting = "axis-rotation" if kind == "window" else "rotation"
        raise ConfigError(f'transform "{name}" does not fit {options.name} ({kind}s); use "{fitting}"')
    if name == "none" and options.skew != "none":
        raise ConfigError(f'skew "{options.skew}" needs a transform; set data.transform')
    return name


def make_transforms(
    name: TransformName, clusters: int, angles: Sequence[float] | None, classes: int, seed: int
) -> list[Transform]:
    """Make the transform of each cluster. `name` is resolved: not `auto`."""
    if name == "none":
        return [_keep] * clusters
    if name == "label-permutation":
        return [_relabel(order) for order in label_permutations(classes, clusters, seed)]
    turn = rotate if name == "rotation" else rotate_axes
    return [_turned(turn, degrees) for degrees in _angles(clusters, angles)]


def other_clusters(options: DataOptions, true: Tensor, clusters: int, seed: int) -> Tensor:
    """Draw, per client, the cluster whose transform the skewed share of its samples has: `(N,)`.

    consistent: one draw per cluster. inconsistent: one draw per client. Never the client's own.
    """
    if clusters < 2:
        raise ConfigError(f'skew "{options.skew}" needs clusters >= 2, got {clusters}')
    drawn = []
    for client, own in enumerate(true.tolist()):
        name = ("skew", "cluster", own) if options.skew == "consistent" else ("skew", "client", client)
        step = int(torch.randint(1, clusters, (), generator=stream(seed, *name)))
        drawn.append((own + step) % clusters)
    return torch.tensor(drawn)


def dominant_mask(samples: int, alpha: float, generator: torch.Generator) -> Tensor:
    """Mark the round(alpha n) samples, drawn at random, that have the dominant transform: `(n,)` bool."""
    mask = torch.zeros(samples, dtype=torch.bool)
    mask[torch.randperm(samples, generator=generator)[: round(alpha * samples)]] = True
    return mask


def _angles(clusters: int, angles: Sequence[float] | None) -> list[float]:
    if angles is None:
        return [cluster * 360 / clusters for cluster in range(clusters)]
    if len(angles) != clusters:
        raise ConfigError(
            f"angles must name one angle per cluster ({clusters}), got {len(angles)}; leave them out for even steps"
        )
    return list(angles)


def _quarter_turns(degrees: float) -> int | None:
    """Count the quarter turns 0..3, None for an angle that is no multiple of 90."""
    turns, rest = divmod(degrees, 90)
    return int(turns) % 4 if rest == 0 else None


def _cos_sin(degrees: float) -> tuple[float, float]:
    turns = _quarter_turns(degrees)
    if turns is not None:
        return ((1.0, 0.0), (0.0, 1.0), (-1.0, 0.0), (0.0, -1.0))[turns]
    return math.cos(math.radians(degrees)), math.sin(math.radians(degrees))


def _keep(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x, y


def _turned(turn: Callable[[Tensor, float], Tensor], degrees: float) -> Transform:
    return lambda x, y: (turn(x, degrees), y)


def _relabel(order: Tensor) -> Transform:
    return lambda x, y: (x, order[y])
