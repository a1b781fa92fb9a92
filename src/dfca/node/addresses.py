"""Where others reach this device."""

from __future__ import annotations

import ipaddress
import socket

from dfca.node.task.config import Config

_ANYWHERE = (("192.0.2.1", socket.AF_INET), ("2001:db8::1", socket.AF_INET6))
"""Addresses of documentation: asking the system how it would reach them sends nothing."""
MOST = 8
"""Addresses that a device announces."""


def own_addresses(config: Config, port: int) -> tuple[str, ...]:
    """List the addresses "host:port" by which others reach this device: as configured, else those of this machine."""
    network = config.network
    if network.advertise:
        return network.advertise
    if not is_unspecified(network.host):
        return (_joined(network.host, port),)
    hosts = [host for target, family in _ANYWHERE if (host := _source_for(target, family)) is not None]
    return tuple(_joined(host, port) for host in hosts or _interfaces() or ["127.0.0.1"])


def _interfaces() -> list[str]:
    """List the addresses of this machine's interfaces: for devices at a switch that leads nowhere, without a route."""
    import psutil

    families = {socket.AF_INET, socket.AF_INET6}
    found = [each.address for name in psutil.net_if_addrs().values() for each in name if each.family in families]
    return [host for host in found if _is_for_others(host)][:MOST]


def _source_for(target: str, family: socket.AddressFamily) -> str | None:
    """Return the address that this machine would send from."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((target, 9))
            host = str(probe.getsockname()[0])
    except OSError:
        return None
    return host if _is_for_others(host) else None


def _is_for_others(host: str) -> bool:
    address = ipaddress.ip_address(host.split("%")[0])
    return not (address.is_loopback or address.is_link_local or address.is_unspecified)


def is_unspecified(host: str) -> bool:
    """Return whether a host means every address of this machine."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        return False


def _joined(host: str, port: int) -> str:
    bare = host.strip("[]")
    return f"[{bare}]:{port}" if ":" in bare else f"{bare}:{port}"
