"""A network inside one process and a virtual clock: the transport for tests, ours and yours.

    network = MemoryNetwork(edges)
    node = Node(peer, worker, network.transport(3))

`cut` and `heal` break and restore links; `lose` drops updates. Under `VirtualTimeLoop` time jumps from one timer to the
next: an hour of waiting takes no time, and every run is the same.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Iterable
from typing import Any

from dfca.node.transport import Transport, TransportInputs
from dfca.peer.records.messages import Update


class MemoryNetwork:
    """Links between nodes of one event loop. lose(sender, receiver): whether an update between them is lost."""

    def __init__(
        self, edges: Iterable[tuple[int, int]], lose: Callable[[int, int], bool] = lambda sender, receiver: False
    ) -> None:
        self.edges = {frozenset(edge) for edge in edges}
        self.lose = lose
        self._nodes: dict[int, TransportInputs] = {}
        self._epochs: dict[frozenset[int], int] = {}
        self._cut: set[frozenset[int]] = set()
        self._pending = 0  # messages sent and not handled yet
        self._serial = 0
        self._waiting: dict[int, Callable[[], None]] = {}
        self._swept = False

    def transport(self, node: int) -> Transport:
        """Make the transport of a node."""
        return _MemoryTransport(self, node)

    def cut(self, one: int, other: int) -> None:
        """Break a link."""
        link = frozenset((one, other))
        if link not in self._cut:
            self._cut.add(link)
            self._disconnect(link)

    def heal(self, one: int, other: int) -> None:
        """Restore a link."""
        link = frozenset((one, other))
        self._cut.discard(link)
        self._connect(link)

    def _links_of(self, node: int) -> list[frozenset[int]]:
        return [link for link in sorted(self.edges, key=sorted) if node in link]

    def _deliver(self, sender: int, receiver: int, epoch: int, message: Any) -> None:
        self._pending -= 1
        if self._epochs.get(frozenset((sender, receiver))) == epoch and receiver in self._nodes:
            self._nodes[receiver].received(sender, message)
        self._plan_sweep()

    def _plan_sweep(self) -> None:
        if self._waiting and not self._pending and not self._swept:
            self._swept = True
            asyncio.get_running_loop().call_soon(self._sweep)

    def _sweep(self) -> None:
        self._swept = False
        if self._pending:
            return
        waiting, self._waiting = self._waiting, {}
        for _, call in sorted(waiting.items(), key=lambda pair: pair[0]):
            call()

    def _connect(self, link: frozenset[int]) -> None:
        if link in self._cut or link in self._epochs or not all(node in self._nodes for node in link):
            return
        self._serial += 1
        self._epochs[link] = self._serial
        for node in sorted(link):
            (other,) = link - {node}
            self._nodes[node].connected(other)

    def _disconnect(self, link: frozenset[int], but: int | None = None) -> None:
        if self._epochs.pop(link, None) is None:
            return
        for node in sorted(link):
            (other,) = link - {node}
            if node != but and node in self._nodes:
                self._nodes[node].disconnected(other)


class _MemoryTransport:
    """The links of one node in a `MemoryNetwork`."""

    def __init__(self, network: MemoryNetwork, node: int) -> None:
        self._network, self._node = network, node

    def open(self, node: TransportInputs) -> None:
        network = self._network
        network._nodes[self._node] = node
        for link in network._links_of(self._node):
            network._connect(link)

    def send(self, neighbour: int, message: Any) -> None:
        network, sender = self._network, self._node
        epoch = network._epochs.get(frozenset((sender, neighbour)))
        if epoch is None or (isinstance(message, Update) and network.lose(sender, neighbour)):
            return
        network._pending += 1
        asyncio.get_running_loop().call_soon(network._deliver, sender, neighbour, epoch, message)

    def when_quiet(self, call: Callable[[], None]) -> None:
        self._network._waiting[self._node] = call
        self._network._plan_sweep()

    def close(self) -> None:
        network = self._network
        for link in network._links_of(self._node):
            network._disconnect(link, but=self._node)
        network._nodes.pop(self._node, None)
        network._waiting.pop(self._node, None)


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop whose time jumps to the next timer when it is idle."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(_JumpingSelector(self))

    def time(self) -> float:
        """Return the virtual time."""
        return self.now

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """Run a call; one that no executor is named for takes no time."""
        if executor is not None:
            return super().run_in_executor(executor, func, *args)
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future


class _JumpingSelector(selectors.DefaultSelector):
    def __init__(self, loop: VirtualTimeLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("all nodes are stuck: no message, work or timer is pending")
        self._loop.now += max(0.0, timeout)
        return super().select(0)
