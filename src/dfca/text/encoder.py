"""A BERT encoder that classifies texts, with low-rank adapters (LoRA, Hu et al., ICLR 2022).

An adapted layer is y = W x + b + (alpha / rank) B A x: W and b are frozen, A (rank, in) begins at random, B (out, rank)
at zero. Frozen tensors are constants: a process holds them once, and banks and messages have adapters and the head.

Averages are taken of A and of B, not of their product, as in most federated work on LoRA.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Trained = Literal["lora", "head", "all"]
PADDING = 0
"""The token that fills texts up."""


@dataclass(frozen=True)
class EncoderSize:
    """The size of an encoder; the default is MiniLM-L6, 22.6 million parameters."""

    words: int = 30_522
    positions: int = 512
    width: int = 384
    heads: int = 12
    inner: int = 1536
    layers: int = 6
    rank: int = 8
    alpha: float = 16.0


class AdaptedLinear(nn.Linear):
    """A linear layer with a low-rank adapter."""

    def __init__(self, width: int, rank: int, alpha: float) -> None:
        super().__init__(width, width)
        self.scale = alpha / rank
        self.down = nn.Parameter(nn.init.kaiming_uniform_(torch.empty(rank, width), a=math.sqrt(5)))
        self.up = nn.Parameter(torch.zeros(width, rank))

    def forward(self, x: Tensor) -> Tensor:
        """Add what the adapter gives: (n, T, width) -> (n, T, width)."""
        return super().forward(x) + self.scale * F.linear(F.linear(x, self.down), self.up)


class EncoderLayer(nn.Module):
    """Attention and a hidden layer, each added to its input and normed; queries and values may have adapters."""

    def __init__(self, size: EncoderSize, adapted: bool) -> None:
        super().__init__()
        self.heads, width = size.heads, size.width

        def linear() -> nn.Linear:
            return AdaptedLinear(width, size.rank, size.alpha) if adapted else nn.Linear(width, width)

        self.query, self.key, self.value, self.output = (
            linear(),
            nn.Linear(width, width),
            linear(),
            nn.Linear(width, width),
        )
        self.norm1, self.norm2 = (nn.LayerNorm(width, eps=1e-12) for _ in range(2))
        self.wide, self.narrow = nn.Linear(width, size.inner), nn.Linear(size.inner, width)

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        """Encode x (n, T, width); seen (n, 1, 1, T) bool: the tokens to attend to."""
        texts, length, width = x.shape
        q, k, v = (
            layer(x).view(texts, length, self.heads, -1).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(1, 2)
        x = self.norm1(x + self.output(attended.reshape(texts, length, width)))
        normed: Tensor = self.norm2(x + self.narrow(F.gelu(self.wide(x))))
        return normed


class TextClassifier(nn.Module):
    """Classify texts by the mean of their tokens' encodings: tokens (n, T) -> (n, classes).

    Args:
        classes: The number of classes.
        size: Of the encoder.
        trained: What is not frozen: "lora", adapters and the head; "head"; or "all", without adapters.
    """

    def __init__(self, classes: int, size: EncoderSize, trained: Trained = "lora") -> None:
        super().__init__()
        width = size.width
        self.words, self.places = nn.Embedding(size.words, width), nn.Embedding(size.positions, width)
        self.kinds = nn.Embedding(2, width)
        self.norm = nn.LayerNorm(width, eps=1e-12)
        self.layers = nn.ModuleList(EncoderLayer(size, adapted=trained == "lora") for _ in range(size.layers))
        self.head = nn.Linear(width, classes)
        for name, tensor in self.named_parameters():
            adapter = name.endswith((".down", ".up"))
            tensor.requires_grad_(trained == "all" or adapter or name.startswith("head."))

    def forward(self, tokens: Tensor) -> Tensor:
        """Classify."""
        tokens = tokens.long()
        seen = tokens != PADDING
        x = self.norm(self.words(tokens) + self.places.weight[: tokens.shape[1]] + self.kinds.weight[0])
        for layer in self.layers:
            x = layer(x, seen[:, None, None])
        present = seen[..., None].to(x.dtype)
        classified: Tensor = self.head((x * present).sum(dim=1) / present.sum(dim=1).clamp_min(1))
        return classified
