"""What a user can set about a node's network, and the limits that hold against hostile or broken neighbours."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property

import torch
from torch import Tensor

from dfca.base.errors import ConfigError
from dfca.node.addresses import is_loopback

MB = 1_000_000


@dataclass(frozen=True)
class NetOptions:
    """Addresses, the graph and the limits of one node."""

    host: str = "0.0.0.0"  # where the node listens
    port: int = 7447  # 0: any free one
    neighbours: str | tuple[str, ...] = "auto"  # or device IDs
    degree: int = 6  # links per node that "auto" aims at
    insecure: bool = False  # plain text, on loopback only
    discovery: bool = False  # by mDNS

    heartbeat_s: float = 1.0
    least_silence_s: float = 2.5
    most_silence_s: float = 4.5
    dead_after_s: float = 6.0  # out of reach for longer: "auto" links to others instead
    dial_s: float = 1.5
    most_dial_s: float = 5.0
    most_backoff_s: float = 30.0
    patience_s: float = 3.0

    chunk_bytes: int = 1 << 20  # the largest piece of a model in one gRPC message
    least_chunk_bytes: int = 1 << 16
    parts: bool = True  # models travel on links; False: they are read by calls of their own, as until 0.2
    least_read_s: float = 1.5
    most_read_s: float = 10.0
    read_attempts: int = 4
    cache_bytes: int = 512 * MB  # encoded models that neighbours may still read
    disk_bytes: int = 1024 * MB  # partial models on the disk
    buffer_bytes: int = 64 * MB  # partial models in memory

    links: int = 64
    frames_per_s: float = 200.0
    frames_burst: int = 2000
    share: float = 0.1  # of the event loop's time that the frames of one neighbour may take in the long run
    share_burst_s: float = 2.0  # and at once
    queued_frames: int = 1024
    queued_bytes: int = 16 * MB
    announced: int = 256
    pulls: int = 16
    pulls_per_member: int = 2
    least_progress_bytes: int = 1 << 14
    reads_per_member: int = 4
    penalty_s: float = 5.0
    most_penalty_s: float = 60.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, (int, float)) and value < 0:
                raise ConfigError(f"{field.name} of the network must not be negative, got {value}")
        if self.port > 65535:
            raise ConfigError(f"port must be at most 65535, got {self.port}")
        if self.degree < 2:
            raise ConfigError(
                f"degree must be at least 2 (a ring), got {self.degree}; name the neighbours for fewer links"
            )
        if self.insecure and not is_loopback(self.host):
            raise ConfigError(
                f'insecure = true sends plain text and is for loopback only, got host "{self.host}"; '
                'use host = "127.0.0.1" or drop insecure'
            )


@dataclass(frozen=True)
class Swarm:
    """What the network must know of a swarm."""

    swarm_id: str
    size: int  # P, the floats of a model
    dtype: torch.dtype = torch.float32
    encoding: str = "float32"
    compress: bool | None = None  # None: if it pays with the encoding
    tail: int = 0  # with int8, how many of the last floats stay exact
    software: str = "dfca"  # what neighbours are told, for people
    payload_bytes: int | None = None  # of an update, where the swarm has a codec
    kept: tuple[slice, ...] = ()  # columns of a model that stay at home

    def cut(self, model: Tensor) -> Tensor:
        """Return what is sent of models (..., P)."""
        return model[..., self._sent] if self.kept and model.is_floating_point() else model

    def fill(self, sent: Tensor) -> Tensor:
        """Return models (..., P) of what was sent of them, with zeros for the rest."""
        if not self.kept or not sent.is_floating_point():
            return sent
        model = sent.new_zeros(*sent.shape[:-1], self.size)
        model[..., self._sent] = sent
        return model

    @cached_property
    def sent_size(self) -> int:
        """Count the numbers that are sent of a model."""
        return int(self._sent.sum()) if self.kept else self.size

    @cached_property
    def _sent(self) -> Tensor:
        sent = torch.ones(self.size, dtype=torch.bool)
        for columns in self.kept:
            sent[columns] = False
        return sent
