"""Hosts and addresses "host:port", and those at which others reach this device."""

from __future__ import annotations

import ipaddress
import socket
from typing import TYPE_CHECKING

from dfca.base.errors import ConfigError

if TYPE_CHECKING:
    from dfca.node.task.config import NodeConfig

_TARGETS = (("192.0.2.1", socket.AF_INET), ("2001:db8::1", socket.AF_INET6))
"""Addresses for documentation: asking the system how it would reach them sends nothing."""
MOST = 8  # addresses that a device announces


def own_addresses(config: NodeConfig, port: int) -> tuple[str, ...]:
    """List the addresses at which others reach this device: as configured, else those of this machine."""
    network = config.network
    if network.advertise:
        return network.advertise
    hosts = [network.host] if not is_unspecified(network.host) else outgoing_hosts()
    if not hosts:  # a network without a route
        hosts = [host for host in interface_hosts(socket.AF_INET, socket.AF_INET6) if _is_for_others(host)][:MOST]
    hosts = hosts or ["127.0.0.1"]
    return tuple(join_address(host, port) for host in hosts)


def outgoing_hosts() -> list[str]:
    """List the addresses that this machine sends from, IPv4 before IPv6; empty without a route."""
    hosts = []
    for target, family in _TARGETS:
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((target, 9))
                hosts.append(str(probe.getsockname()[0]))
        except OSError:
            continue
    return [host for host in hosts if _is_for_others(host)]


def interface_hosts(*families: socket.AddressFamily) -> list[str]:
    """List the addresses of this machine's interfaces."""
    import psutil

    interfaces = psutil.net_if_addrs().values()
    return [entry.address for interface in interfaces for entry in interface if entry.family in families]


def _is_for_others(host: str) -> bool:
    address = ipaddress.ip_address(host.split("%")[0])
    return not (address.is_loopback or address.is_link_local or address.is_unspecified)


def is_unspecified(host: str) -> bool:
    """Return whether a host means every address of this machine."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        return False


def is_loopback(host: str) -> bool:
    """Return whether a host is this machine: an address of the loopback, or the name localhost."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
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
    bare = host.strip("[]")
    return f"[{bare}]:{port}" if ":" in bare else f"{bare}:{port}"
