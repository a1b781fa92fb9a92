"""Finds the addresses of members on the local network by mDNS (zeroconf), and announces this node's own.

An address only says where to dial: the device that answers must hold the member's key. A false announcement costs one
failed attempt.
"""

from __future__ import annotations

import asyncio
import hashlib
import socket
from collections.abc import Callable
from typing import Any

from dfca.base.errors import ConfigError
from dfca.node.addresses import interface_hosts, is_loopback, join_address

SERVICE = "_dfca._tcp.local."
MOST_ADDRESSES = 8
MOST_LOOKUPS = 32
LOOKUP_MS = 3000


class Discovery:
    """Announces one node and looks for others. on_found: called with the ID and addresses of a member of the swarm.

    Raises ConfigError if the library is missing.
    """

    def __init__(self, own: str, swarm: str, port: int, on_found: Callable[[str, tuple[str, ...]], None]) -> None:
        try:
            import zeroconf.asyncio
        except ImportError as error:
            raise ConfigError(
                "discovery needs one more library: pip install 'dfca[discovery]', or set discovery = false"
            ) from error
        self._zeroconf: Any = zeroconf
        self._own, self._swarm, self._port, self._on_found = own, swarm_tag(swarm), port, on_found
        self._service: Any = None
        self._browser: Any = None
        self._lookups: set[asyncio.Task[None]] = set()

    async def start(self, host: str) -> None:
        """Announce where this node listens, and start to look. host: its IP address; 0.0.0.0 and ::, all it has.

        Raises ConfigError if there is no network to announce on.
        """
        asyncio_part = self._zeroconf.asyncio
        all_hosts = [own for own in interface_hosts(socket.AF_INET) if not is_loopback(own)]
        chosen: Any = all_hosts if host in ("0.0.0.0", "::") else [host]
        try:
            self._service = asyncio_part.AsyncZeroconf(interfaces=chosen)
            info = asyncio_part.AsyncServiceInfo(
                SERVICE,
                f"{self._own}.{SERVICE}",
                port=self._port,
                properties={"swarm": self._swarm},
                server=f"{self._own}.local.",
                parsed_addresses=chosen,
            )
            await self._service.async_register_service(info, allow_name_change=False, cooperating_responders=True)
        except (OSError, self._zeroconf.Error) as error:
            await self.stop()
            raise ConfigError(
                f"cannot announce this node on the local network: {error}; set discovery = false"
            ) from error
        self._browser = asyncio_part.AsyncServiceBrowser(self._service.zeroconf, SERVICE, handlers=[self._changed])

    async def stop(self) -> None:
        """Withdraw the announcement and stop looking."""
        for task in list(self._lookups):
            task.cancel()
        await asyncio.gather(*self._lookups, return_exceptions=True)
        if self._browser is not None:
            await self._browser.async_cancel()
        if self._service is not None:
            await self._service.async_unregister_all_services()
            await self._service.async_close()
        self._browser = self._service = None

    def _changed(self, zeroconf: Any, service_type: str, name: str, state_change: Any) -> None:
        if state_change is self._zeroconf.ServiceStateChange.Removed or len(self._lookups) >= MOST_LOOKUPS:
            return
        if name != f"{self._own}.{SERVICE}":
            task = asyncio.ensure_future(self._look_up(name))
            self._lookups.add(task)
            task.add_done_callback(self._lookups.discard)

    async def _look_up(self, name: str) -> None:
        info = self._zeroconf.asyncio.AsyncServiceInfo(SERVICE, name)
        try:
            known = await info.async_request(self._service.zeroconf, LOOKUP_MS)
        except (OSError, self._zeroconf.Error):
            return
        if known and info.properties.get(b"swarm") == self._swarm.encode() and info.port:
            hosts = info.parsed_addresses()[:MOST_ADDRESSES]
            self._on_found(name.partition(".")[0], tuple(join_address(host, info.port) for host in hosts))


def swarm_tag(swarm: str) -> str:
    """Return what is announced of a swarm: it distinguishes swarms without revealing the ID."""
    return hashlib.sha256(b"dfca discovery " + swarm.encode()).hexdigest()[:16]
