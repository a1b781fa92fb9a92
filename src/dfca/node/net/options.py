"""What a user can set about a node's network, and the limits that hold against hostile or broken neighbours."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, fields

import torch

from dfca.base.errors import ConfigError

MB = 1_000_000


@dataclass(frozen=True)
class NetOptions:
    """Addresses, the graph and the limits of one node.

    host, port: where the node listens; port 0: any free one. neighbours: "auto", or device IDs. degree: links per node
    that "auto" aims at. insecure: plain text, on loopback only. chunk_bytes: the largest piece of a model in one gRPC
    message. cache_bytes, disk_bytes: encoded models that neighbours may still read, and partial models on the disk;
    buffer_bytes: of models that are being read, so much is collected in memory, the others on the disk.
    share, share_burst_s: the part of the event loop's time that the frames of one neighbour may take in the long run,
    and the seconds that they may take at once.
    dead_after_s: how long a member stays out of reach before "auto" links to others in its place.
    """

    host: str = "0.0.0.0"
    port: int = 7447
    neighbours: str | tuple[str, ...] = "auto"
    degree: int = 6
    insecure: bool = False
    discovery: bool = False

    heartbeat_s: float = 1.0
    least_silence_s: float = 2.5
    most_silence_s: float = 4.5
    dead_after_s: float = 6.0
    dial_s: float = 1.5
    most_dial_s: float = 5.0
    most_backoff_s: float = 30.0
    patience_s: float = 3.0

    chunk_bytes: int = 1 << 20
    least_chunk_bytes: int = 1 << 16
    least_read_s: float = 1.5
    most_read_s: float = 10.0
    read_attempts: int = 4
    cache_bytes: int = 512 * MB
    disk_bytes: int = 1024 * MB
    buffer_bytes: int = 64 * MB

    max_links: int = 64
    frames_per_s: float = 200.0
    frames_burst: int = 2000
    share: float = 0.1
    share_burst_s: float = 2.0
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
    """What the network must know of a swarm: its ID, the P floats of a model, and how models are encoded.

    compress: None for what pays with the encoding; tail: with int8, how many of the last floats stay exact. software:
    what neighbours are told, for people.
    """

    swarm_id: str
    size: int
    dtype: torch.dtype = torch.float32
    encoding: str = "float32"
    compress: bool | None = None
    tail: int = 0
    software: str = "dfca"


def is_loopback(host: str) -> bool:
    """Return whether a host is this machine: only addresses count, and the name localhost."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def split_address(address: str) -> tuple[str, int]:
    """Split HOST:PORT, where an IPv6 host is in brackets.

    >>> split_address("[::1]:7447")
    ('::1', 7447)
    """
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f'an address is HOST:PORT with a port from 1 to 65535, got "{address}"')
    if host.startswith("[") and host.endswith("]"):
        return host[1:-1], int(port)
    if ":" in host:
        raise ConfigError(f'an IPv6 address stands in brackets, as in [::1]:7447, got "{address}"')
    return host, int(port)


def join_address(host: str, port: int) -> str:
    """Join a host and a port, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
