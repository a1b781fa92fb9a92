"""Valid frames of every kind of message, and mutations of their bytes."""

from __future__ import annotations

import random
from typing import Any

import torch

from dfca.core.rules.election import Tally
from dfca.core.rules.merging import Merge, Poll, Survey
from dfca.core.rules.relay import Offer
from dfca.core.state import Message
from dfca.node.wire import codec, payload
from dfca.node.wire import wire_pb2 as pb
from dfca.peer.records import messages as m
from dfca.peer.records.lineage import Entry

P = 70
MODEL = torch.linspace(-1, 1, P)
BANK = torch.stack([MODEL, MODEL / 2])
LINEAGE = (
    Entry(9, 1, 2**62, 3, 2**47, (0, 1)),
    Entry(9, 2, 5, 6, 7, (2,)),
    Entry(9, 0, 5, 6, 0, (0, 1, 2), (Merge(0, 1, 0.25, -0.5),), (2,), True),
)
KEY = m.Key(1, 2, -3, 2**60, 5)
OFFER = Offer(3, 4, -2)
SENT = Message(2**61, 1, 7, 3, MODEL, OFFER, 4)
LOG = (m.Turn(None, False), m.Turn(5, True, 1))
TALLY = Tally(5, 2, 100, (2**70, -5), (3, 4), (1, 1), (50, 0), (-1, 2), (2, 3), (0, 1), (0, 9), (0, 2), (0, 3))
VALID = [
    m.Hello(1, 2, 2, LINEAGE),
    m.Update(SENT, 1, LINEAGE, 0.25, (1, -1), ((0, OFFER),)),
    m.Nothing(3, LINEAGE, (1, 2), ((1, OFFER),)),
    m.CopyRequest(1, LINEAGE),
    m.Copy(SENT, LINEAGE),
    m.BankRequest((0, 1)),
    m.BankCopy(SENT, 3, 2, LINEAGE),
    m.Declined(1),
    m.Probe(KEY, LINEAGE, m.Call((1,), 2, (0,), True)),
    m.Count(KEY, 4, 3, LOG, Poll((0, 3), (3, 1), (100, 2**40), (1, 0), (3, 0), (0, -7, 2**70, 0))),
    m.Refuse(KEY),
    m.Open(KEY, 4, LOG),
    m.Centre(KEY, 0, 5, MODEL),
    m.Bid(KEY, 1, -1.5, 3),
    m.Stand(KEY, 1, 3),
    m.Candidate(KEY, 1, 3, 0.5, MODEL),
    m.Votes(KEY, 1, TALLY),
    m.Decision(KEY, 1, LOG[1], False),
    m.Question(KEY, (2, 1), (3, -1)),
    m.Answer(KEY, Survey((0, 3), (1, 1), (0, 2**70) * 6, (5, -5))),
    m.Result(KEY, LINEAGE[2]),
    m.Alarm(2**60, 3, True, LINEAGE),
    m.Curves(30, 1, 2, 3, tuple(0.5 * value for value in range(18)), LINEAGE),
    m.Served(4, BANK),
    m.Report(4, SENT),
]
PAYLOADS = [
    (payload.pack(model, encoding, compress), model.shape[0] if model.dim() == 2 else None)
    for model in (MODEL, BANK, torch.zeros(P))
    for encoding in ("float32", "bf16", "int8")
    for compress in (False, True)
]


def valid_frames(messages: list[Any]) -> list[bytes]:
    """Make frames of every kind, around every message."""
    frames = [
        pb.Frame(hello=pb.LinkHello(protocol=1, swarm="s", model_size=P, dtype=pb.FLOAT32, epoch=3)),
        pb.Frame(heartbeat=pb.Heartbeat(number=2, echo=1, held_us=100)),
        pb.Frame(roster_digest=pb.RosterDigest(digest="abc")),
        pb.Frame(roster_records=pb.RosterRecords(records=[b"one", b"two"])),
        pb.Frame(withdraw=pb.Withdraw(number=2)),
        pb.Frame(close=pb.Close(reason="version", text="1")),
    ]
    for number, message in enumerate(messages, start=1):
        data, model = codec.encode(message)
        if model is None:
            frames.append(pb.Frame(message=data))
        else:
            packed = payload.pack(model)
            name, rows = bytes.fromhex(payload.name(packed)), len(model) if model.dim() == 2 else 0
            told = pb.Announce(number=number, message=data, name=name, size=len(packed), encoding=1, rows=rows)
            frames.append(pb.Frame(announce=told))
    return [frame.SerializeToString() for frame in frames]


FRAMES = valid_frames(VALID)


# Mutations.


def flip(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8))):
        place = rng.randrange(len(changed) * 8)
        changed[place // 8] ^= 1 << place % 8
    return bytes(changed)


def truncate(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data))]


def duplicate(data: bytes, rng: random.Random) -> bytes:
    a, b = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    return data[:b] + data[a:b] * rng.choice((1, 1, 50)) + data[b:]


def lie(data: bytes, rng: random.Random) -> bytes:
    """Put an extreme number where a length, a number or a size may stand."""
    place = rng.randrange(len(data))
    what = rng.choice((b"\xff" * 9 + b"\x01", b"\xff\xff\xff\xff\x0f", b"\x80" * 12, b"\x00" * 8, b"\xff" * 8, b"\x7f"))
    return data[:place] + what + data[place + len(what) :]


def remove(data: bytes, rng: random.Random) -> bytes:
    a, b = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    return data[:a] + data[b:]


def splice(data: bytes, rng: random.Random) -> bytes:
    other = rng.choice(FRAMES)
    return data[: rng.randrange(len(data) + 1)] + other[rng.randrange(len(other)) :]


def noise(data: bytes, rng: random.Random) -> bytes:
    """Make random fields with random wire types: a protobuf of nothing in particular."""
    fields = b""
    for _ in range(rng.randrange(1, 8)):
        tag = rng.randrange(1, 24) << 3 | rng.choice((0, 1, 2, 5))
        body = rng.randbytes(rng.randrange(12))
        fields += bytes([tag & 127]) + (bytes([len(body)]) if tag & 7 == 2 else b"") + body
    return fields


def inside(data: bytes, rng: random.Random) -> bytes:
    """Change the message inside a frame, and keep the frame whole."""
    frame = pb.Frame.FromString(rng.choice(FRAMES))
    within = frame.announce if frame.HasField("announce") else frame
    if within.message:
        within.message = rng.choice(BYTES)(within.message, rng)
    return frame.SerializeToString()


NUMBERS = (0, 1, -1, 2, 4095, 4096, 2**31, 2**53, 2**53 + 1, -(2**53), 2**63 - 1, -(2**63))
FLOATS = (0.0, -0.0, 1.5, -1.0, 1e308, float("inf"), float("-inf"), float("nan"))


def fill(message: Any, rng: random.Random) -> None:
    """Give a protobuf message random fields of the right types, many of them extreme or missing."""
    for field in message.DESCRIPTOR.fields:
        several = hasattr(getattr(message, field.name), "extend")
        count = rng.choice((0, 1, 2, 5)) if several else rng.random() < 0.9
        for _ in range(int(count)):
            if field.message_type is not None:
                part = getattr(message, field.name).add() if several else getattr(message, field.name)
                part.SetInParent()
                fill(part, rng)
                continue
            value = {
                field.TYPE_DOUBLE: rng.choice(FLOATS),
                field.TYPE_BOOL: rng.random() < 0.5,
                field.TYPE_BYTES: rng.randbytes(rng.choice((0, 1, 16, 17))),
            }.get(field.type, rng.choice(NUMBERS[:5]) if rng.random() < 0.8 else rng.choice(NUMBERS))
            if several:
                getattr(message, field.name).append(value)
            else:
                setattr(message, field.name, value)


def wild(data: bytes, rng: random.Random) -> bytes:
    """Make a message of a random kind with random values."""
    message = pb.PeerMessage()
    part = getattr(message, rng.choice(message.DESCRIPTOR.fields).name)
    part.SetInParent()
    fill(part, rng)
    inner = message.SerializeToString()
    large = pb.Announce(number=1, message=inner, name=bytes(32), size=9, encoding=1, rows=rng.choice((0, 2)))
    return (pb.Frame(announce=large) if rng.random() < 0.5 else pb.Frame(message=inner)).SerializeToString()


BYTES = (flip, flip, truncate, duplicate, lie, remove)
MUTATIONS = (*BYTES, splice, noise)
FRAME_MUTATIONS = (*MUTATIONS, *[inside] * 4, *[wild] * 4)


# The way in.
