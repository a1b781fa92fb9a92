"""The one error that received data can raise, with the reasons that metrics count."""

from __future__ import annotations

from typing import Literal, get_args

Reason = Literal[
    # frames and messages
    "malformed",  # not the bytes of a frame, a message or a payload
    "too_large",  # more bytes than allowed
    "kind",  # no kind of frame or message, or an unknown one
    "field",  # a field that is missing or has a value that no such message can have
    "number",  # a whole number beyond its bounds
    "length",  # a list with too many items
    # models
    "encoding",
    "compression",
    "dtype",
    "size",
    "shape",
    "digest",
    "not_finite",
    "norm",
    # the link
    "version",
    "swarm",
    "model",
    "member",
    "proof",  # an alarm of another device without its signature
    "epoch",
    "roster",
    "rate",
    "deadline",
    "unasked",
]
REASONS: tuple[str, ...] = get_args(Reason)


class Refused(Exception):
    """Received data is not accepted; reason: one of `REASONS`, text: details for a log."""

    def __init__(self, reason: Reason, text: str = "") -> None:
        super().__init__(f"{reason}: {text}" if text else reason)
        self.reason: Reason = reason
        self.text = text
