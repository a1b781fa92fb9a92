"""Data that is made when it is needed: sensors whose next value is to be forecast.

Every client has one sensor, on a machine that vibrates in one of k ways:

    s_t = a s_(t-1) + b s_(t-2) + e_t,   a = 2 r cos(theta_j),   b = -r^2,   e_t normal

a resonance at the angle theta_j = pi (j + 1/2) / k per sample for clusters j = 0..k-1, scaled to variance 1. A sample
is a window of WINDOW values, its target the value after it. The best forecast, a s_(t-1) + b s_(t-2), misses by the
standard deviation of e_t. Test windows lie after the training windows and share no value with them.
"""

from __future__ import annotations

import math
from itertools import accumulate

import torch
from torch import Tensor

from dfca.core.learning.task import TASKS
from dfca.core.rng import stream
from dfca.data.clients import ClientData, Split, validate
from dfca.data.options import DataOptions, refuse_options

WINDOW, STRIDE = 16, 4
"""Values of a window, and from one window to the next: neighbouring windows are much alike, and elections count samples
as if each were drawn by itself."""
RADIUS = 0.95
"""r: how slowly a vibration dies away."""
SAMPLES, TEST_SAMPLES = 200, 100
"""Of a client, where the options do not say."""
SETTLING = 200
"""Steps before the first value: r^200 of the arbitrary start is left, 4e-5."""


def make_forecast_split(options: DataOptions, true: Tensor, clusters: int, seed: int) -> Split:
    """Make the windows of N clients; true (N,): the cluster of each client, k after a drift. Raises ConfigError."""
    refuse_options(options)
    held, kept = options.samples_per_client or SAMPLES, options.test_samples_per_client or TEST_SAMPLES
    length = (held + kept) * STRIDE + 2 * WINDOW
    streams = [stream(seed, "series", client) for client in range(len(true))]
    noise = torch.stack([torch.randn(length + SETTLING, generator=g, dtype=torch.float64) for g in streams])
    angles = torch.tensor([angle(int(cluster), clusters) for cluster in true], dtype=torch.float64)
    values = vibrations(noise, angles)[:, SETTLING:].to(torch.float32)
    first = values.unfold(1, WINDOW + 1, STRIDE)[:, :held]
    last = values[:, held * STRIDE + WINDOW :].unfold(1, WINDOW + 1, STRIDE)[:, :kept]
    split = Split(_data(first), _data(last), true, 1, (), TASKS["regression"])
    validate(split)
    return split


def angle(cluster: int, clusters: int) -> float:
    """Return theta_j in radians per sample; cluster k, which a drift brings, lies between the first two."""
    if cluster < clusters:
        return math.pi * (cluster + 0.5) / clusters
    return math.pi / clusters if clusters > 1 else 0.75 * math.pi


def vibrations(noise: Tensor, angles: Tensor) -> Tensor:
    """Compute s_t of N sensors from noise (N, T) of variance 1, scaled to variance 1 in the long run: (N, T)."""
    a, b = 2 * RADIUS * angles.cos(), -(RADIUS**2)
    scale = innovation(angles)
    before = last = torch.zeros_like(a)
    steps = []
    for e in noise.T:
        before, last = last, a * last + b * before + scale * e
        steps.append(last)
    return torch.stack(steps, dim=1)


def innovation(angles: Tensor) -> Tensor:
    """Compute the standard deviation of e_t where s_t has variance 1: what the best forecast misses by.

    var(s) = var(e) (1 - b) / ((1 + b) ((1 - b)^2 - a^2)).
    """
    a, b = 2 * RADIUS * angles.cos(), -(RADIUS**2)
    return ((1 + b) * ((1 - b) ** 2 - a.square()) / (1 - b)).sqrt()


def _data(windows: Tensor) -> ClientData:
    clients, count, _ = windows.shape
    flat = windows.reshape(clients * count, WINDOW + 1)
    offsets = tuple(accumulate([count] * clients, initial=0))
    return ClientData(flat[:, None, :-1].contiguous(), flat[:, -1].clone(), offsets)
