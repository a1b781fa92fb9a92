"""Measure encodings and compression of models on networks trained here: the table of docs/protocol.md.

Run with one thread: OMP_NUM_THREADS=1 python docs/measure_payload.py
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate

from dfca.core.learning.params import FlatModel
from dfca.core.rng import seeded
from dfca.models import cnn, mlp
from dfca.node.wire import payload

TRAIN = 1000
SCALES = (16, 32, 64, 128, 256, 1024)


def train(module: nn.Module, x: Tensor, y: Tensor, epochs: int, lr: float) -> nn.Module:
    """Train on the first `TRAIN` samples with momentum 0.9 and batches of 50."""
    optimiser = torch.optim.SGD(module.parameters(), lr=lr, momentum=0.9)
    for _ in range(epochs):
        for i in range(0, TRAIN, 50):
            optimiser.zero_grad()
            cross_entropy(module(x[i : i + 50]), y[i : i + 50]).backward()
            optimiser.step()
    return module


def best_s(call: Callable[[], Any], repeats: int = 5) -> float:
    """Take the least CPU time of some calls, with as many in a row as last 20 ms."""
    begin = time.process_time()
    call()
    many = max(1, int(0.02 / max(1e-6, time.process_time() - begin)))
    times = []
    for _ in range(repeats):
        begin = time.process_time()
        for _ in range(many):
            call()
        times.append((time.process_time() - begin) / many)
    return min(times)


def accuracy(flat: FlatModel, model: Tensor, x: Tensor, y: Tensor) -> float:
    """Score on the samples that were not trained on."""
    with torch.no_grad():
        return float((flat.to_module(model)(x[TRAIN:]).argmax(1) == y[TRAIN:]).float().mean())


def rows(name: str, module: nn.Module, x: Tensor, y: Tensor) -> list[str]:
    """Measure every encoding of one network."""
    flat = FlatModel(module)
    model = flat.flatten(module)
    base, statistics, lines = accuracy(flat, model, x, y), flat.size - flat.trained, []
    cases = [("float32", False, 0), ("float32", True, 0), ("bf16", False, 0), ("bf16", True, 0), ("int8", False, 0)]
    if statistics:
        cases.append(("int8", False, statistics))
    for encoding, compress, tail in cases:
        data = payload.pack(model, encoding, compress, tail)
        back = payload.unpack(data, payload.Expect(flat.size))
        error = float((back - model).norm() / model.norm())
        change = accuracy(flat, back, x, y) - base
        mb = 4 * flat.size / 1e6
        pack_s = best_s(lambda e=encoding, c=compress, t=tail: payload.pack(model, e, c, t))  # type: ignore[misc]
        unpack_s = best_s(lambda d=data: payload.unpack(d, payload.Expect(flat.size)))  # type: ignore[misc]
        label = encoding + (" + zstd" if compress else "") + (", statistics exact" if tail else "")
        lines.append(
            f"| {name} | {label} | {len(data) / (4 * flat.size):.3f} | {error:.1e} | {100 * change:+.2f} "
            f"| {mb / pack_s:,.0f} | {mb / unpack_s:,.0f} |"
        )
    return lines


def by_block(name: str, module: nn.Module) -> str:
    """Measure the error of int8 by the size of its blocks."""
    flat = FlatModel(module)
    model = flat.flatten(module)
    cells = []
    chosen = payload.BLOCK
    for block in SCALES:
        payload.BLOCK = block
        data = payload.pack(model, "int8", tail=flat.size - flat.trained)
        back = payload.unpack(data, payload.Expect(flat.size))
        cells.append(f"{float((back - model).norm() / model.norm()):.2e} ({1 + 4 / block:.3f})")
    payload.BLOCK = chosen
    return f"| {name} | " + " | ".join(cells) + " |"


def large() -> list[str]:
    """Measure a random model of 20 MB: speeds of large arrays."""
    generator = torch.Generator().manual_seed(0)
    model, rows = torch.randn(5_000_000, generator=generator) / 30, []
    for encoding, compress in (("float32", False), ("float32", True), ("bf16", False), ("bf16", True), ("int8", False)):
        data = payload.pack(model, encoding, compress)
        expect = payload.Expect(len(model), encoding=encoding, reference_norm=float(model.norm()))
        times = [
            best_s(lambda e=encoding, c=compress: payload.pack(model, e, c), 3),  # type: ignore[misc]
            best_s(lambda d=data: payload.name(d), 3),  # type: ignore[misc]
            best_s(lambda d=data, e=expect: payload.unpack(d, e), 3),  # type: ignore[misc]
        ]
        speeds = " | ".join(f"{20 / seconds:,.0f}" for seconds in (*times, sum(times)))
        rows.append(f"| {encoding}{' + zstd' if compress else ''} | {len(data) / 20e6:.3f} | {speeds} |")
    return rows


def main() -> None:
    """Print the tables."""
    torch.set_num_threads(1)
    with seeded(0, "payload"):
        digits = load_digits()
        order = torch.randperm(len(digits.target))
        x = torch.tensor(digits.data / 16, dtype=torch.float32)[order]
        y = torch.tensor(digits.target)[order]
        images = interpolate(x.view(-1, 1, 8, 8), 16)
        networks = [
            ("MLP 64-2048-10", train(mlp((64,), 10), x, y, 20, 0.05), x),
            ("CNN 16x16", train(cnn((1, 16, 16), 10), images, y, 8, 0.02), images),
        ]
    for name, module, inputs in networks:
        print(*rows(name, module, inputs, y), sep="\n")
    print(*(by_block(name, module) for name, module, _ in networks), sep="\n")
    print(*large(), sep="\n")


if __name__ == "__main__":
    main()
