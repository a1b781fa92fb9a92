"""Codecs by name: what travels in place of a model (`core.codec`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dfca.base.errors import ConfigError, unknown
from dfca.base.imports import import_function, is_import
from dfca.codecs.quantised import bf16, int8, one_bit
from dfca.codecs.sparse import random_k, top_k
from dfca.core.codec import Codec

CODECS: dict[str, Callable[[float], Codec]] = {
    "bf16": lambda keep: bf16(),
    "int8": lambda keep: int8(),
    "1-bit": lambda keep: one_bit(),
    "top-k": top_k,
    "random-k": random_k,
}
"""Makes a codec from `mixing.keep`."""


def get(codec: Any, keep: float) -> Codec | None:
    """Find a codec by its name, "module:function" of one's own, or as the record itself; None for "none". keep: the
    share of the numbers that sparse codecs send. Raises ConfigError if there is none of this name."""
    if codec is None or codec == "none":
        return None
    if isinstance(codec, str) and is_import(codec):
        named, codec = codec, import_function(codec, "mixing.codec")()
        if not isinstance(codec, Codec):
            raise ConfigError(f'mixing.codec "{named}" must return a dfca.Codec, got {type(codec).__name__}')
    if isinstance(codec, Codec):
        return codec
    if not isinstance(codec, str):
        raise ConfigError(f"mixing.codec must be a name or a dfca.Codec, got {type(codec).__name__}")
    if codec not in CODECS:
        raise unknown("mixing.codec", codec, ("none", *CODECS, "module:function"))
    return CODECS[codec](keep)


__all__ = ["CODECS", "get"]
