"""How clusters differ: each cluster sees the samples through its own transform.

A transform maps x `(n, *shape)` and y `(n,)` to new ones of the same shapes; what it draws, it draws from the stream
that it is given, which is a client's own. Cluster 0 sees samples as they are, unless the angles or levels differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import affine_grid, avg_pool2d, grid_sample

from dfca.base.errors import ConfigError
from dfca.core.rng import stream
from dfca.data.options import DataOptions, TransformName
from dfca.data.options import resolve as resolve

Draw = Callable[[], torch.Generator]
"""Opens the random stream of one part of a client's samples."""
Transform = Callable[[Tensor, Tensor, Draw], tuple[Tensor, Tensor]]

NOISE = 0.15
"""The standard deviation that the noise of a cluster has more than that of the one before."""


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


def label_swaps(classes: int, pairs: Sequence[int], seed: int) -> list[Tensor]:
    """Draw for every cluster that many pairs of labels, and swap them: permutations of the labels, all different where
    labels are swapped at all."""
    chosen: list[Tensor] = []
    for cluster, count in enumerate(pairs):
        if 2 * count > classes:
            raise ConfigError(f"levels must be <= {classes // 2} (pairs of {classes} labels), got {count}")
        generator = stream(seed, "swaps", cluster)
        order = _swapped(classes, count, generator)
        for _ in range(1000):
            if not count or not any(torch.equal(order, other) for other in chosen):
                break
            order = _swapped(classes, count, generator)
        else:
            raise ConfigError(
                f"{len(pairs)} clusters cannot all swap other pairs of {classes} labels; use fewer clusters or "
                'transform "label-permutation"'
            )
        chosen.append(order)
    return chosen


def blur(x: Tensor, times: int) -> Tensor:
    """Average images `(n, c, h, w)` over 3 x 3 pixels, repeatedly; pixels outside are 0."""
    for _ in range(times):
        x = avg_pool2d(x, 3, stride=1, padding=1)
    return x


def make_transforms(
    name: TransformName,
    clusters: int,
    angles: Sequence[float] | None,
    classes: int,
    seed: int,
    levels: Sequence[float] | None = None,
) -> list[Transform]:
    """Make the transform of each cluster. `name` is resolved: not `auto`."""
    if name == "none":
        return [_keep] * clusters
    if name == "noise":
        return [_noisy(level) for level in _per_cluster("level", levels, [NOISE * j for j in range(clusters)])]
    if name == "blur":
        return [_blurred(times) for times in _whole(_per_cluster("level", levels, list(range(clusters))))]
    if name == "label-swap":
        pairs = _whole(_per_cluster("level", levels, [min(j, 1) for j in range(clusters)]))
        return [_relabel(order) for order in label_swaps(classes, pairs, seed)]
    if name == "label-permutation":
        return [_relabel(order) for order in label_permutations(classes, clusters, seed)]
    turn = rotate if name == "rotation" else rotate_axes
    steps = [cluster * 360 / clusters for cluster in range(clusters)]
    return [_turned(turn, degrees) for degrees in _per_cluster("angle", angles, steps)]


def other_clusters(options: DataOptions, true: Tensor, clusters: int, seed: int) -> Tensor:
    """Draw, per client, the cluster whose transform the skewed share of its samples has: `(N,)`.

    consistent: one draw per cluster. inconsistent, mixed: one draw per client. Never the client's own.
    """
    if clusters < 2:
        raise ConfigError(f'skew "{options.skew}" needs clusters >= 2, got {clusters}')
    drawn = []
    for client, own in enumerate(true.tolist()):
        name = ("skew", "cluster", own) if options.skew == "consistent" else ("skew", "client", client)
        step = int(torch.randint(1, clusters, (), generator=stream(seed, *name)))
        drawn.append((own + step) % clusters)
    return torch.tensor(drawn)


def dominant_share(options: DataOptions, client: int, seed: int) -> float:
    """Return the share of a client's samples with its own cluster's transform: alpha, or drawn from alpha to 1."""
    if options.skew != "mixed":
        return options.alpha
    drawn = float(torch.rand((), generator=stream(seed, "skew", "share", client), dtype=torch.float64))
    return options.alpha + (1 - options.alpha) * drawn


def dominant_mask(samples: int, alpha: float, generator: torch.Generator) -> Tensor:
    """Mark the round(alpha n) samples, drawn at random, that have the dominant transform: `(n,)` bool."""
    mask = torch.zeros(samples, dtype=torch.bool)
    mask[torch.randperm(samples, generator=generator)[: round(alpha * samples)]] = True
    return mask


def _per_cluster(kind: str, values: Sequence[float] | None, default: Sequence[float]) -> Sequence[float]:
    if values is not None and len(values) != len(default):
        raise ConfigError(
            f"{kind}s must name one {kind} per cluster ({len(default)}), got {len(values)}; "
            "leave them out for even steps"
        )
    return default if values is None else values


def _whole(levels: Sequence[float]) -> list[int]:
    for level in levels:
        if level != int(level):
            raise ConfigError(f"levels of blur and label-swap must be integers, got {level}")
    return [int(level) for level in levels]


def _swapped(classes: int, pairs: int, generator: torch.Generator) -> Tensor:
    """Draw pairs of labels and swap them: a permutation (classes,)."""
    order, drawn = torch.arange(classes), torch.randperm(classes, generator=generator)[: 2 * pairs]
    one, two = drawn[0::2], drawn[1::2]
    order[one], order[two] = two, one
    return order


def _quarter_turns(degrees: float) -> int | None:
    """Count the quarter turns 0..3; None for other angles."""
    turns, rest = divmod(degrees, 90)
    return int(turns) % 4 if rest == 0 else None


def _cos_sin(degrees: float) -> tuple[float, float]:
    turns = _quarter_turns(degrees)
    if turns is not None:
        return ((1.0, 0.0), (0.0, 1.0), (-1.0, 0.0), (0.0, -1.0))[turns]
    return math.cos(math.radians(degrees)), math.sin(math.radians(degrees))


def _keep(x: Tensor, y: Tensor, *_: Draw) -> tuple[Tensor, Tensor]:
    return x, y


def _turned(turn: Callable[[Tensor, float], Tensor], degrees: float) -> Transform:
    return lambda x, y, *_: (turn(x, degrees), y)


def _relabel(order: Tensor) -> Transform:
    return lambda x, y, *_: (x, order[y])


def _blurred(times: int) -> Transform:
    return lambda x, y, *_: (blur(x, times), y)


def _noisy(level: float) -> Transform:
    return lambda x, y, draw: (x + level * torch.randn(x.shape, generator=draw()) if level else x, y)
