"""A node as one process: load and check everything, lock the folder, start the servers, run the peer.

    service = Service(NodeFolder.load(path), ServiceOptions(), make_transport)
    await service.run()                # until `stop`, a signal that calls it, or an error

The servers: the transport (neighbours), control (commands of this machine's user), metrics if configured, and pairing
while an invite is open.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from dfca.base.accountant import epsilon
from dfca.base.device import find_device
from dfca.base.errors import ConfigError, DataError, DfcaError
from dfca.node.addresses import is_unspecified, own_addresses
from dfca.node.disk.folder import NodeFolder
from dfca.node.disk.record import Recorder
from dfca.node.disk.saving import RETRY_S
from dfca.node.disk.store import DiskStore
from dfca.node.node import Node
from dfca.node.operate.control import ControlServer
from dfca.node.operate.logs import Log, NodeLog, open_log
from dfca.node.operate.members import describe_members, summarise
from dfca.node.operate.status import (
    describe_misfit,
    describe_neighbours,
    describe_work,
    guess_loss,
    name_misfit,
    save_status,
)
from dfca.node.task.dataset import DeviceData
from dfca.node.task.learner import evaluate
from dfca.node.trust.identity import peer_number, short
from dfca.node.work.guard import ModelGuard
from dfca.node.work.local_work import LocalWork, WorkSamples, give_back_memory
from dfca.node.work.pace import Idling, Pace, WriteBudget
from dfca.peer.machine import Memory
from dfca.peer.peer import Peer
from dfca.peer.records.work import Note

if TYPE_CHECKING:
    from dfca.node.net.transport import GrpcTransport

TICK_S = 1.0
STATUS_S = 15.0
ADDRESSES_S = 30.0
LEAST_ROUND_S = 0.05  # at most 20 rounds a second: each costs the neighbours a message and this node a write
LEAST_GAIN = 0.001  # of the loss of guessing: a better loss is lower by that, as classes are chosen right long before
LINKS_S = 10  # how long a new swarm waits for its links before the first election
END_S = 4.0  # how long the end may wait for the disk; the process ends within 10 s of a signal


COMMANDS = ("status", "members", "stop", "invite", "joined", "remove", "block")  # served by the methods `_on_...`


@dataclass(frozen=True)
class ServiceOptions:
    """What the command line decides."""

    log_format: Literal["human", "json"] | None = None
    log_stream: Any = None
    record: Path | None = None  # where the peer's inputs are recorded
    until_done: bool = False  # end after the last round instead of serving neighbours
    version: str = ""  # of this program, for the status
    log: Log | None = None  # instead of the terminal and node.log
    has_control: bool = True  # whether commands of this machine's user are served


class Service:
    """One node that runs in a folder. Nothing of it is opened before `run`."""

    def __init__(
        self,
        folder: NodeFolder,
        options: ServiceOptions,
        make_transport: Callable[[NodeFolder], GrpcTransport],
        build_work: Callable[[NodeFolder], LocalWork] | None = None,
    ) -> None:
        self.folder, self.options, self._make_transport = folder, options, make_transport
        self._build_work = build_work or make_work
        config, self._around = folder.config, folder.around
        self.log: Log = options.log or open_log(
            folder.path, options.log_format or config.log.format, config.log.level, options.log_stream
        )
        self.notes = NodeLog(self.log, self._name, now=self._around.steady)
        self._stop: asyncio.Event | None = None
        self._pairing: Any = None
        self._joined: list[dict[str, str]] = []
        self._began = self._around.wall()
        self._closers: list[Callable[[], Any]] = []
        self._problems: dict[str, str] = {}
        self._waits = ""
        self._guard: ModelGuard | None = None
        self._roster_after = -math.inf
        self._norm_of: tuple[int, float] = (-1, 0.0)
        facts, guess = folder.facts, guess_loss(folder.facts)
        # A swarm with a last round does all of them, and under "batch" neighbours would wait for a node that rests.
        rests = not facts.rounds and facts.aggregation == "sequential"
        least = 0.0 if facts.predicts_numbers else LEAST_GAIN * guess
        self.idling = Idling(config.training.rest_s if rests else 0.0, guess, least)
        self.port = 0
        self.addresses: tuple[str, ...] = ()
        self.store: DiskStore
        self.node: Node
        self.work: LocalWork
        self.transport: GrpcTransport

    # The life of a node.

    async def run(self) -> None:
        """Run until `stop`. Raises DfcaError if it cannot start or continue; everything is closed then."""
        self._stop = asyncio.Event()
        with self.folder.lock():
            try:
                await self._open()
                await self._serve()
            finally:
                await self._close()

    def stop(self) -> None:
        """End soon: abandon the round in progress, save everything else."""
        if self._stop is not None:
            self._stop.set()

    async def _open(self) -> None:
        folder, config = self.folder, self.folder.config
        torch.set_num_threads(config.training.threads)
        self.work = self._build_work(folder)
        store = self.store = folder.store()
        store.clean()
        saved = store.load()
        for warning in store.warnings:
            self.log.warning(warning)
        life = store.next_life(saved)
        self.transport = self._make_transport(folder)
        address = await self.transport.start()
        self._closers.append(self.transport.stop)
        self.port = int(address.rpartition(":")[2])
        wanted = tuple(sorted(peer_number(id) for id in self.transport.status()["neighbours"]))
        peer_options = folder.facts.peer_options(folder.identity.number, wanted, folder.codec, folder.layout)
        peer = Peer(peer_options, Memory(peer_options.size, peer_options.dtype), life, saved)
        for reason, count in peer.refused.items():
            self.log.warning(f"the saved models are passed over: {reason} ({count})")
        limit = config.limits.write_bytes_per_day
        budget = WriteBudget(limit, lambda: (store.written_bytes, store.saves), fresh=saved is None)
        pace = Pace(config.training.pause_s, LEAST_ROUND_S, RETRY_S, budget)
        threads = self._around.threads
        self.node = Node(peer, self.work, self.transport, store, None, self._note, pace, self.idling, threads)
        self._guard = getattr(self.work, "guard", None)
        if self._guard is not None:
            self._guard.lineage, self.node.guard = lambda: peer.lineage, self._guard
        if self.options.record is not None:
            recorder = Recorder(self.options.record, peer, saved)
            self.node.record = recorder
            self._closers.append(recorder.close)
        self.transport.on_neighbours = self.node.rewire
        self.transport.on_devices = self.node.limit_peers
        self.transport.reference_norm = self._norm
        self.transport.summarise = lambda: summarise(self.status())
        self._announce()
        if self.options.has_control:
            control = ControlServer(folder.path, {name: getattr(self, f"_on_{name}") for name in COMMANDS})
            await control.open()
            self._closers.append(control.close)
        if config.log.metrics_port is not None:
            from dfca.node.operate.metrics import serve_metrics

            self._closers.append(serve_metrics(config.log.metrics_port, self._status_for_thread()))
        self.log.info(
            f"node {config.name} ({short(folder.identity.id)}) of swarm {folder.facts.name} listens at "
            f"{', '.join(self.addresses)}; life {life}, {'round ' + str(peer.round) if saved else 'no models yet'}",
            event="start",
            id=folder.identity.id,
            incarnation=life,
        )

    async def _serve(self) -> None:
        assert self._stop is not None
        running = asyncio.create_task(self._run_node())
        stopping = asyncio.create_task(self._stop.wait())
        ticking = asyncio.create_task(self._tick())
        try:
            await asyncio.wait({running, stopping, ticking}, return_when=asyncio.FIRST_COMPLETED)
            if running.done() and not ticking.done():
                running.result()
                if not self.options.until_done:
                    await asyncio.wait({stopping, ticking}, return_when=asyncio.FIRST_COMPLETED)
            if ticking.done():  # it ends by an error only
                ticking.result()
        finally:
            for task in (running, stopping, ticking):
                task.cancel()
            await asyncio.gather(running, stopping, ticking, return_exceptions=True)

    async def _run_node(self) -> None:
        """Run the node. Without models, first wait until enough members run and the links are up."""
        wanted = self.folder.facts.starts_with
        fresh = self.node.machine.bank is None and wanted > 1
        if fresh:
            self.node.open()
            while (count := len(self._seen_running())) < wanted:
                waits = f"waits until {wanted} members run; so far {count}"
                if waits != self._waits:
                    self.log.info(waits, event="wait")
                self._waits = waits
                await asyncio.sleep(TICK_S / 4)
            self._waits = ""
            for _ in range(LINKS_S):
                links = self.transport.status()["neighbours"].values()
                if links and all(link["state"] == "up" for link in links):
                    break
                await asyncio.sleep(TICK_S)
        await self.node.run(late=not fresh)

    def _seen_running(self) -> set[str]:
        """Return the members that have announced an address or have a link with this node."""
        roster = self.folder.roster
        linked = {member.id for number in self.node.linked if (member := roster.by_number(number)) is not None}
        return linked.union(roster.announced())

    async def _close(self) -> None:
        """Close everything in reverse order, each within a time limit; save the state before the links go down."""
        if hasattr(self, "node"):
            with suppress(Exception):
                self._save_status(running=False)
            if not await self.node.finish(END_S):
                self.log.error(
                    f"the last state could not be saved: {self.node.saving.problem or 'the disk is too slow'}"
                )
        if self._pairing is not None:
            self._closers.append(self._pairing.close)
        for close in reversed(self._closers):
            try:
                result = close()
                if asyncio.iscoroutine(result):
                    await asyncio.wait_for(result, 2.0)
            except Exception as error:
                self.log.debug(f"while ending: {type(error).__name__}: {error}")
        with suppress(DfcaError):
            self.folder.save_roster()
        self.log.info("ended", event="end")
        self.log.close()

    async def _tick(self) -> None:
        """Look after what changes slowly: roster, addresses, problems. Raises if the node cannot continue."""
        status_at, addresses_at, looked_at = -math.inf, self._around.steady(), self._around.steady()
        while True:
            self._check_member()
            if self.node.failure is not None:
                raise self.node.failure
            if self._around.steady() >= self._roster_after:
                begin = self._around.steady()
                self._watch("roster", self.folder.save_roster)
                # The news of others come again after a crash: a large roster is written in a hundredth of the time.
                self._roster_after = self._around.steady() + 100 * (self._around.steady() - begin)
            self._report("disk", self.node.saving.problem)
            self._report("data", self.work.problem)
            self._check_fit()
            self._check_poison()
            now = self._around.steady()
            if now - addresses_at >= ADDRESSES_S:
                addresses_at = now
                self._watch("address", self._announce)
            if now - status_at >= max(STATUS_S, self.idling.rest_s):
                status_at = now
                self._watch("status", self._save_status)
            if self.idling.rest_s and 0 < self.folder.config.training.reread_s <= now - looked_at:
                looked_at = now
                if self.work.is_stale():
                    self.idling.wake()
            await asyncio.sleep(TICK_S)

    def _save_status(self, running: bool = True) -> None:
        save_status(self.folder.path, {**self.status(), "running": running}, self._around.disk)

    def _check_member(self) -> None:
        """End the node if its device was removed; its last status says so."""
        try:
            self.folder.check_member()
        except ConfigError as error:
            self._report("member", str(error))
            raise

    def _watch(self, what: str, act: Callable[[], None]) -> None:
        """Do something that may fail without ending the node."""
        try:
            act()
        except DfcaError as error:
            self._report(what, str(error))
        else:
            self._report(what, None)

    def _check_fit(self) -> None:
        """Check whether the swarm's models fit; a known problem whose loss changed is not logged again."""
        if "poison" in self._problems:
            return  # it is said already
        known, members = "fit" in self._problems, len(self.folder.roster.members())
        problem = describe_misfit(tuple(self.work.recent_losses), self.folder.facts, members, known)
        if known and problem is not None:
            self._problems["fit"] = problem
        else:
            self._report("fit", problem)

    def _note(self, note: Note) -> None:
        self.notes.note(note)
        if note.kind == "finish":
            own = None if self.work.report is None else self.work.report.own
            self.idling.learned(self.work.loss if own is None else own.loss)
        if self._guard is not None:
            self._guard.note(note)

    def _check_poison(self) -> None:
        """Name the neighbours whose models are left out, or say that it is this device that differs from all others.

        A known problem whose losses changed is not logged again.
        """
        if self._guard is None:
            return
        if figures := self._guard.refuses(self.node.machine.links):
            now = {"poison": name_misfit(self.folder.facts, figures)}
        else:
            now = self._guard.problems(self._name, self.folder.path)
        if figures:  # what was said of single neighbours and of the fit is not solved: it is said in one sentence
            self._problems = {
                what: text for what, text in self._problems.items() if not what.startswith(("poison ", "fit"))
            }
        for what in [what for what in self._problems if what.startswith("poison") and what not in now]:
            self._report(what, None)
        for what, problem in now.items():
            if what in self._problems:
                self._problems[what] = problem
            else:
                self._report(what, problem)

    def _report(self, what: str, problem: str | None) -> None:
        """Log a problem when it appears and when it is solved."""
        before = self._problems.get(what)
        if problem is None:
            if self._problems.pop(what, None) is not None:
                self.log.info(f"solved: {before}")
        elif problem != before:
            self._problems[what] = problem
            self.log.warning(problem)

    def _norm(self) -> float | None:
        """Compute the largest norm of a model of this node, once per round."""
        machine = self.node.machine
        if machine.bank is None:
            return None
        if self._norm_of[0] != machine.round:
            self._norm_of = (machine.round, float(machine.bank.norm(dim=1).max()))
        return self._norm_of[1]

    def _announce(self) -> None:
        self.addresses = own_addresses(self.folder.config, self.port)
        self.folder.roster.announce(self.folder.identity, self.addresses, self._around.wall())
        self.folder.save_roster()

    def _name(self, number: int) -> str:
        member = self.folder.roster.by_number(number)
        return str(number) if member is None else member.name

    # Status and commands.

    def status(self) -> dict[str, Any]:
        """Describe the node: see `operate.status`."""
        folder, node = self.folder, self.node
        names = {member.number: member.name for member in folder.roster.members().values()}
        net = self.transport.status()
        links = {peer_number(id): {"id": id, **link} for id, link in net["neighbours"].items()}
        refused = Counter({**node.machine.refused}) + Counter(net["refused"])
        refused.update({f"roster: {reason}": count for reason, count in folder.roster.refused.items()})
        if self._pairing is not None:
            refused.update({f"pairing: {reason}": count for reason, count in self._pairing.refused.items()})
        saves = {"count": self.store.saves, "bytes": self.store.written_bytes, "seconds": self.store.seconds}
        return {
            "running": True,
            "version": self.options.version,
            "time": datetime.fromtimestamp(self._around.wall(), UTC).isoformat(timespec="seconds"),
            "pid": os.getpid(),
            "up_s": self._around.wall() - self._began,
            "name": folder.config.name,
            "id": folder.identity.id,
            "swarm": folder.facts.swarm_id,
            "swarm_name": folder.facts.name,
            "addresses": list(self.addresses),
            "members": len(names),
            **describe_work(node, self.work, self.notes, names),
            **({"state": "waiting", "waits": self._waits} if self._waits else {}),
            "neighbours": describe_neighbours(node, links, names),
            "bytes_in": net["bytes_in"],
            "bytes_out": net["bytes_out"],
            "refused": dict(refused),
            "saves": saves,
            "returns": 0 if self._guard is None else self._guard.returns,
            "left_out": {} if self._guard is None else self._guard.left_out(self._name),
            "problems": list(self._problems.values()),
            "last_error": self.log.last_error,
        }

    def _status_for_thread(self) -> Callable[[], dict[str, Any]]:
        loop = asyncio.get_running_loop()

        async def ask() -> dict[str, Any]:
            return self.status()

        return lambda: asyncio.run_coroutine_threadsafe(ask(), loop).result(5.0)

    async def _on_status(self, request: dict[str, Any]) -> dict[str, Any]:
        return self.status()

    async def _on_members(self, request: dict[str, Any]) -> dict[str, Any]:
        net, folder = self.transport.status(), self.folder
        return {"members": describe_members(folder.roster, folder.identity.id, net["neighbours"], net["silent_s"])}

    async def _on_stop(self, request: dict[str, Any]) -> dict[str, Any]:
        self.stop()
        return {"name": self.folder.config.name, "pid": os.getpid(), "round": self.node.machine.round}

    async def _on_invite(self, request: dict[str, Any]) -> dict[str, Any]:
        from dfca.node.trust.invite import LIFETIME_S
        from dfca.node.trust.pairing import PairingServer, PairingSettings

        folder, network = self.folder, self.folder.config.network
        host = self.addresses[0].rpartition(":")[0].strip("[]")
        bind = "" if is_unspecified(network.host) else network.host
        settings = PairingSettings(host=host, bind=bind, may_introduce=bool(request.get("may_introduce")))
        if self._pairing is not None and self._pairing.settings != settings:
            await self._pairing.close()
            self._pairing = None
        if self._pairing is None:
            self._pairing = PairingServer(settings, self._note_joined, self._around.listen)
        lifetime = min(float(request.get("lifetime_s") or LIFETIME_S), 86_400.0)
        data = folder.facts.to_bytes()
        invite = await self._pairing.open(folder.identity, folder.roster, data, network.invite_port, lifetime)
        self.log.info(f"an invite is open for {lifetime:g} s at {invite.host} port {invite.port}", event="invite")
        return {"invite": str(invite), "lifetime_s": lifetime, "joined": len(self._joined)}

    def _note_joined(self, member: Any, code: str) -> None:
        self.folder.save_roster()
        self._joined.append({"name": member.name, "id": member.id, "code": code})
        self.log.info(
            f"{member.name} ({short(member.id)}) has joined; the code on both screens is {code}", event="joined"
        )

    async def _on_joined(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return who has joined since the last question, and whether an invite is still open."""
        since = max(0, int(request.get("since") or 0))
        return {"joined": self._joined[since:], "open": bool(self._pairing and self._pairing.invites)}

    async def _on_remove(self, request: dict[str, Any]) -> dict[str, Any]:
        return {"removed": remove_member(self.folder, str(request.get("member")))}

    async def _on_block(self, request: dict[str, Any]) -> dict[str, Any]:
        """Keep some members out for a time: for experiments."""
        names = request.get("members") or ()
        blocked = [member.id for name in names if (member := self.folder.roster.by_name(str(name))) is not None]
        self.transport.block(blocked, float(request.get("seconds") or 0.0))
        return {"blocked": len(blocked)}


def make_work(folder: NodeFolder) -> LocalWork:
    """Read the data of a device and build its model. Raises DfcaError if they do not fit."""
    config, facts = folder.config, folder.facts
    device = find_device(config.training.device, "training.device", 'set "cpu" or "auto"')
    model = folder.model
    data = DeviceData(config, folder.path, facts)
    seen = time.monotonic()

    def samples() -> WorkSamples:
        here = data.samples.to(device)
        train, held_out = here.train, here.held_out
        if not len(train[1]):
            raise DataError(f"{config.data.path} has no samples to train with")
        client = facts.client(folder.identity.number, 0, train, model)
        aside = None if facts.rounds else held_out  # without a last round, held-out samples are never released
        return WorkSamples(client, len(held_out[1]), lambda bank: evaluate(model, bank, train, held_out), aside)

    def refresh() -> WorkSamples | None:
        nonlocal seen
        every = config.training.reread_s
        if not every or time.monotonic() - seen < every:
            return None
        seen = time.monotonic()
        if data.refresh():
            return samples()
        if data.problem is not None:
            raise DataError(data.problem)
        return None

    if facts.privacy is not None:
        epsilon(facts.privacy.noise, 1, facts.privacy.delta)  # the accountant takes seconds to load: not in a status
    guard = None
    if facts.privacy is None:  # what it goes back to would depend on exact scores
        around = folder.around
        guard = ModelGuard(guess_loss(facts), folder.path, around.steady, around.disk, folder.layout)
    work = LocalWork(samples(), refresh, guard=guard, is_stale=data.is_stale)
    give_back_memory()
    return work


def remove_member(folder: NodeFolder, name: str) -> str:
    """Remove a member by name or ID, for ever; the roster is saved. Returns its name."""
    member = folder.roster.by_name(name)
    if member is None:
        known = ", ".join(sorted(other.name for other in folder.roster.members().values()))
        raise ConfigError(f'"{name}" is not a member of the swarm; members: {known}')
    folder.roster.remove(folder.identity, member.id)
    folder.save_roster()
    return member.name
