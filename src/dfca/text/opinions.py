"""Opinions on products: the same texts, and two groups of readers that judge them by different things.

Every text says something of a product's price and of its quality, good or bad, independently. Half of the clients want
to know whether the price is good, the others whether the quality is: one model for all cannot serve both. A client's
training texts have half of the phrases, drawn for each client; test texts have all, so that a client learns the other
half from what the encoder knows and from its neighbours.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dfca.text.minilm import tokenise

LENGTH = 16
"""Tokens of a text."""
TRAINING, TEST = 32, 64
"""Texts of a client."""
_THINGS = ("laptop", "kettle", "bicycle", "phone", "jacket", "headset", "printer", "lamp", "tent", "camera", "drill")
_PHRASES = {  # (aspect, good): what is said
    (0, True): (
        "is a bargain", "costs next to nothing", "was surprisingly cheap", "is great value", "is very affordable",
        "was sold at half price", "is worth every cent", "has a fair price", "saved me a lot of money", "is a steal",
    ),
    (0, False): (
        "is overpriced", "costs a fortune", "was far too expensive", "is a waste of money", "is beyond my budget",
        "is cheaper elsewhere", "is not worth the price", "has hidden fees", "is a rip-off", "comes at a steep price",
    ),
    (1, True): (
        "is built to last", "works flawlessly", "feels solid", "never let me down", "is superbly made",
        "is still like new", "performs brilliantly", "is sturdy and reliable", "runs without trouble", "is very robust",
    ),
    (1, False): (
        "broke after a week", "feels flimsy", "keeps failing", "fell apart at once", "is poorly made",
        "stopped working", "has loose parts", "is full of defects", "scratches easily", "rattles and leaks",
    ),
}  # fmt: skip


def make(clients: int, seed: int) -> dict[str, Any]:
    """Draw the texts of all clients, for `data.factory`.

    Args:
        clients: How many; those with an even number read for the price, the others for the quality.
        seed: Of everything that is drawn.

    Returns:
        What `split_from` takes.
    """
    return split(clients, seed, lambda text: tokenise(text, LENGTH))


def split(clients: int, seed: int, encode: Callable[[str], Sequence[int]]) -> dict[str, Any]:
    """Draw the texts of all clients, with a tokeniser of your own; arguments as of `make`."""
    draw = random.Random(seed)
    train, test = [], []
    for client in range(clients):
        half = {key: draw.sample(phrases, len(phrases) // 2) for key, phrases in _PHRASES.items()}
        train.append(_samples(TRAINING, client % 2, half, draw, encode))
        test.append(_samples(TEST, client % 2, _PHRASES, draw, encode))
    return {"train": train, "test": test, "clusters": [client % 2 for client in range(clients)], "classes": 2}


def _samples(
    count: int,
    aspect: int,
    phrases: dict[tuple[int, bool], Any],
    draw: random.Random,
    encode: Callable[[str], Sequence[int]],
) -> tuple[np.ndarray, np.ndarray]:
    tokens, labels = [], []
    for _ in range(count):
        good = [draw.random() < 0.5 for _ in range(2)]
        said = [draw.choice(phrases[of, good[of]]) for of in draw.sample((0, 1), 2)]
        word = "and" if good[0] == good[1] else "but"
        tokens.append(encode(f"the {draw.choice(_THINGS)} {said[0]} {word} {said[1]}"))
        labels.append(int(good[aspect]))
    return np.array(tokens, dtype=np.int64), np.array(labels)
