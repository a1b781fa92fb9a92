"""Whatever comes over a link is a sound message or refused: mutated frames, messages and payloads, by a seed.

`pytest -m slow tests/node/test_wire_fuzz.py` takes 100,000 of them.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import torch
import zstandard
from mutations import BANK, BYTES, FRAME_MUTATIONS, FRAMES, MODEL, MUTATIONS, PAYLOADS, P
from torch import Tensor

from dfca.node.wire import codec, frames, payload
from dfca.node.wire.frames import REASONS, Refused
from dfca.peer.records import messages as m


def take_frame(data: bytes) -> Any:
    """Do with a frame what a node does, up to the point where the peer gets it; models come from a sound neighbour."""
    frame = frames.parse(data)
    kind = frame.WhichOneof("kind")
    if kind == "message":
        decoded = codec.decode(frame.message)
        message = decoded.message(None)
    elif kind == "announce":
        decoded = codec.decode(frame.announce.message)
        message = decoded.message(BANK if frame.announce.rows else MODEL)
    else:
        return None
    again, model = codec.encode(message)
    assert codec.decode(again).message(model) is not None
    assert m.well_formed(message)
    return message


def take_payload(data: bytes, rows: int | None) -> Tensor:
    """Read a payload without checking its digest: the worst case, a member that lies."""
    model = payload.unpack(data, payload.Expect(P, rows=rows, reference_norm=1.0))
    assert model.shape == ((P,) if rows is None else (rows, P))
    assert model.dtype == torch.float32
    assert bool(torch.isfinite(model).all())
    assert float(model.norm(dim=-1).max()) <= payload.NORM_FACTOR * 1.001
    return model


def fuzz(count: int, seed: int) -> Counter[str]:
    """Mutate and take this many frames and payloads; returns what became of them."""
    rng, outcomes = random.Random(seed), Counter[str]()
    bank = BANK.clone()
    for turn in range(count):
        as_frame = turn % 3 != 0
        original, rows = (rng.choice(FRAMES), None) if as_frame else rng.choice(PAYLOADS)
        data = original
        if not as_frame and original[:4] == payload._MAGIC and rng.random() < 0.5:  # beneath the compression
            inner = zstandard.ZstdDecompressor().decompress(original)
            data = zstandard.ZstdCompressor().compress(rng.choice(BYTES)(inner, rng))
        else:
            data = rng.choice(FRAME_MUTATIONS if as_frame else MUTATIONS)(original, rng)
        try:
            if as_frame:
                take_frame(data)
            else:
                take_payload(data, rows)
            outcomes["taken"] += 1
        except Refused as refused:
            outcomes[refused.reason] += 1
        if not as_frame and data != original:
            with pytest.raises(Refused):  # what was announced is another digest: the bank is not touched
                bank[0] = payload.unpack(data, payload.Expect(P, digest=payload.name(original)))
    assert torch.equal(bank, BANK)
    assert set(outcomes) <= {"taken", *REASONS}
    return outcomes


def test_unmutated_everything_is_taken() -> None:
    kinds = {type(take_frame(frame)) for frame in FRAMES}
    assert kinds - {type(None)} == set(m.KINDS)
    for data, rows in PAYLOADS:
        take_payload(data, rows)


def test_mutated_frames_and_payloads_are_sound_or_refused() -> None:
    outcomes = fuzz(3000, seed=1)
    assert {"taken", "malformed", "kind", "field", "number", "encoding", "compression", "norm"} <= set(outcomes)


@pytest.mark.slow
def test_100_000_mutations() -> None:
    assert fuzz(100_000, seed=2).total() == 100_000
