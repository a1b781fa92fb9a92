"""A tiny transformer and its words, for tests that must not need the pretrained one."""

from __future__ import annotations

from torch import nn

from dfca.text.encoder import EncoderSize, TextClassifier, Trained

SIZE = EncoderSize(words=101, positions=12, width=16, heads=2, inner=32, layers=2, rank=2)
LENGTH = 10


def make(shape: tuple[int, ...], classes: int, trained: Trained = "lora") -> nn.Module:
    return TextClassifier(classes, SIZE, trained)


def encode(text: str) -> list[int]:
    """Number words by their letters."""
    tokens = [1 + sum(map(ord, word)) % 100 for word in text.split()][:LENGTH]
    return tokens + [0] * (LENGTH - len(tokens))
