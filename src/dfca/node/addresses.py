"""Where others reach this device."""

from __future__ import annotations

import ipaddress
import socket

from dfca.node.task.config import Config

_ANYWHERE = (("192.0.2.1", socket.AF_INET), ("2001:db8::1", socket.AF_INET6))
"""Addresses of documentation: asking the system how it would reach them sends nothing."""


def own_addresses(config: Config, port: int) -> tuple[str, ...]:
    """List the addresses "host:port" by which others reach this device: as configured, else those of this machine."""
    network = config.network
    if network.advertise:
        return network.advertise
    if not is_unspecified(network.host):
        return (_joined(network.host, port),)
    hosts = [host for target, family in _ANYWHERE if (host := _source_for(target, family)) is not None]
    return tuple(_joined(host, port) for host in hosts) or (_joined("127.0.0.1", port),)


def _source_for(target: str, family: socket.AddressFamily) -> str | None:
    """Return the address that this machine would send from."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((target, 9))
            host = str(probe.getsockname()[0])
    except OSError:
        return None
    address = ipaddress.ip_address(host.split("%")[0])
    return None if address.is_loopback or address.is_link_local or address.is_unspecified else host


def is_unspecified(host: str) -> bool:
    """Return whether a host means every address of this machine."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        return False


def _joined(host: str, port: int) -> str:
    bare = host.strip("[]")
    return f"[{bare}]:{port}" if ":" in bare else f"{bare}:{port}"
