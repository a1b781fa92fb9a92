"""`dfca node doctor`: independent checks of everything that a node needs; a failure comes with its cure."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from dfca.base.errors import DfcaError
from dfca.base.files import NO_ROOM
from dfca.node.disk.folder import ROSTER, NodeFolder, load_facts
from dfca.node.operate.control import NotRunning, call
from dfca.node.operate.status import counted
from dfca.node.task.config import NodeConfig
from dfca.node.task.facts import Facts
from dfca.node.trust.identity import Identity
from dfca.node.trust.roster import Roster

CLOCK_S = 30.0  # how far off a clock may be
EXPIRES_DAYS = 60
SAVES_KEPT = 4  # banks that must fit on the disk: two generations, the one being written, and partial models
MOST_MEMBERS = 64
WALLED = ": it is behind a NAT or a firewall, and dials itself"
APART = (
    "if it is behind a NAT or a firewall as this device is, the two do not link: their models travel through members "
    "that both reach; else: is it running, and is its port open?"
)


@dataclass(frozen=True)
class Check:
    """The result of one check."""

    name: str
    outcome: Literal["ok", "warning", "failure"]
    text: str
    cure: str = ""  # what to do if something is wrong


def examine(path: Path) -> Iterator[Check]:
    """Make all checks of a node's folder."""
    config = yield from _attempt("settings", lambda: NodeConfig.load(path), "node.toml can be used")
    identity = yield from _attempt("key", lambda: Identity.load(path), "key and certificate belong together")
    facts = yield from _attempt("facts", lambda: load_facts(path), "the swarm's facts can be used")
    roster = yield from _attempt("roster", lambda: Roster.load(path / ROSTER), "every signature holds")
    if identity is not None:
        yield _check_certificate(identity)
    yield from _check_disk(path, facts)
    status = _ask_status(path)
    running = status is not None
    if running:
        yield Check("node", "ok", "runs")
    else:
        yield Check("node", "warning", "does not run", f"start it: dfca node run {path}")
    for problem in (status or {}).get("problems", ()):
        text, _, cure = problem.partition("; ")
        yield Check("problem", "warning", text, cure)
    if config is not None and facts is not None:
        yield _check_data(path, config, facts)
        yield from _check_ports(config, running)
        yield from _check_saved(path, facts)
    if config is not None and identity is not None and facts is not None and roster is not None:
        folder = NodeFolder(path, config, identity, facts, roster)
        try:
            folder.check_member()
        except DfcaError as error:
            yield _failure("membership", error)
            return
        yield from asyncio.run(_check_members(folder, status))


def _attempt(name: str, act: Any, text: str) -> Iterator[Check] | Any:
    """Call `act`, which may raise DfcaError; return its result, or None."""
    try:
        result = act()
    except DfcaError as error:
        yield _failure(name, error)
        return None
    yield Check(name, "ok", text)
    return result


def _failure(name: str, error: DfcaError) -> Check:
    """Split a sentence into what is wrong and what to do."""
    text, _, cure = str(error).partition("; ")
    return Check(name, "failure", text, cure)


def _check_certificate(identity: Identity) -> Check:
    from cryptography import x509

    end = x509.load_pem_x509_certificate(identity.certificate).not_valid_after_utc
    days = (end - datetime.now(UTC)).days
    if days < EXPIRES_DAYS:
        cure = "make a new device in an empty folder and pair it in time, or set the clock if it is wrong"
        return Check("certificate", "warning", f"expires on {end:%Y-%m-%d}, in {days} days", cure)
    return Check("certificate", "ok", f"valid until {end:%Y-%m-%d}")


def _check_disk(path: Path, facts: Facts | None) -> Iterator[Check]:
    trial = path / f".doctor.{os.getpid()}.tmp"
    try:
        trial.write_bytes(b"x")
        trial.unlink()
        free = shutil.disk_usage(path).free
    except OSError as error:
        cure = "free some space: the node continues by itself" if error.errno in NO_ROOM else "make the folder writable"
        yield Check("disk", "failure", f"cannot write in {path}: {error.strerror}", cure)
        return
    clusters = facts.clusters or facts.election.most if facts is not None else 1
    needed = SAVES_KEPT * clusters * 4 * (facts.model.size if facts is not None else 0) + 50 * 2**20
    if free < needed:
        text = f"{free / 1e6:.0f} MB free in {path}, up to {needed / 1e6:.0f} MB needed"
        yield Check("disk", "failure", text, "free some space, or move the node's folder to another disk")
    else:
        yield Check("disk", "ok", f"writable, {free / 1e9:.1f} GB free")


def _check_data(path: Path, config: NodeConfig, facts: Facts) -> Check:
    from dfca.node.task.dataset import load
    from dfca.node.task.learner import build, trusted_codec

    try:
        build(facts, config.training.factory, config.training.weights)
        trusted_codec(facts, config.training.codec)
        samples = load(config, path, facts)
    except DfcaError as error:
        text, _, cure = str(error).partition(": ")
        return Check("data", "failure", text, cure or "see data in node.toml")
    train, held_out = len(samples.train[1]), len(samples.held_out[1])
    if not held_out:
        return Check("data", "warning", f"{train} samples, none held out", "set data.held_out, to see an accuracy")
    return Check("data", "ok", f"{train} samples to train with, {held_out} held out")


def _check_ports(config: NodeConfig, running: bool) -> Iterator[Check]:
    network = config.network
    ports = (
        ("port", network.port, network.host, running),
        ("invite_port", network.invite_port, network.host, False),
        ("metrics_port", config.log.metrics_port, "127.0.0.1", running),
    )
    for key, port, host, listening in ports:
        if port:
            yield _check_listening(key, port, host) if listening else _check_free(key, port, host)


def _check_listening(key: str, port: int, host: str) -> Check:
    try:
        bare = host.strip("[]")
        with socket.create_connection(({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(bare, bare), port), timeout=2.0):
            return Check(key, "ok", f"listens on {port}")
    except OSError as error:
        text = f"does not answer on {host} port {port}: {error.strerror or error}"
        return Check(key, "failure", text, "end the node and start it again; see node.log")


def _check_free(key: str, port: int, host: str) -> Check:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((host.strip("[]"), port))
        except OSError as error:
            text = f"cannot listen on {host} port {port}: {error.strerror}"
            return Check(key, "failure", text, f"set another {key} in node.toml, or end the program that has it")
    return Check(key, "ok", f"{port} is free")


def _check_saved(path: Path, facts: Facts) -> Iterator[Check]:
    from dfca.node.disk.store import DiskStore

    store = DiskStore(path / "state")
    try:
        saved = store.load()
    except DfcaError as error:
        yield _failure("models", error)
        return
    for warning in store.warnings:
        cure = "the other generation is used; if this comes again, check the disk (dmesg, smartctl)"
        yield Check("models", "warning", warning, cure)
    if saved is None or saved.bank is None:
        yield Check("models", "ok", "none yet")
    elif saved.bank.shape[1] != facts.model.size:
        text = f"the saved models have {saved.bank.shape[1]} floats, the swarm's {facts.model.size}"
        yield Check("models", "failure", text, "restore the folder state/ of this device, or remove it: it joins anew")
    else:
        yield Check("models", "ok", f"{counted(len(saved.bank), 'model')} of round {saved.round}")


def _ask_status(path: Path) -> dict[str, Any] | None:
    """Return the status of the node: empty if it runs but does not answer, None if it does not run."""
    try:
        return call(path, "status", timeout_s=5.0)
    except NotRunning:
        return None
    except DfcaError:
        return {}


async def _check_members(folder: NodeFolder, status: dict[str, Any] | None) -> list[Check]:
    """Dial every member; ask those that answer for the time, and to dial back. status: of a node that runs."""
    others = [member for member in folder.roster.members().values() if member.id != folder.identity.id]
    if not others:
        return [Check("members", "warning", "none but this device", f"invite one: dfca node invite {folder.path}")]
    neighbours, running = (status or {}).get("neighbours", ()), status is not None
    linked = {neighbour.get("id") for neighbour in neighbours if neighbour["state"] == "up"}
    dials = (_check_member(folder, member, running, member.id in linked) for member in others[:MOST_MEMBERS])
    checks = list(chain.from_iterable(await asyncio.gather(*dials)))
    if not any(check.text.endswith(WALLED) for check in checks if check.name == "reach back"):
        return checks
    failed = ("reach", "failure")
    return [
        replace(check, outcome="warning", cure=APART) if (check.name, check.outcome) == failed else check
        for check in checks
    ]


async def _check_member(folder: NodeFolder, member: Any, running: bool, linked: bool) -> list[Check]:
    from dfca.node.net.probe import probe

    insecure = folder.config.network.insecure
    if not member.addresses:
        text, cure = f"no address of {member.name} is known", "start it once: it announces its own"
        return [Check("reach", "warning", text, cure)]
    dials = (probe(folder.identity, member, address, insecure, False) for address in member.addresses[:4])
    results = await asyncio.gather(*dials)
    answered = [probed for probed in results if not probed.error]
    if not answered:
        tried = ", ".join(f"{probed.address}: {probed.error}" for probed in results)
        if linked:
            return [Check("reach", "ok", f"{member.name} does not answer ({tried}){WALLED}")]
        cure = f"is {member.name} running, with this device in its roster? is its port open in every firewall between?"
        return [Check("reach", "failure", f"{member.name} does not answer ({tried})", cure)]
    best = min(answered, key=lambda probed: probed.rtt_s)
    checks = [Check("reach", "ok", f"{member.name} answers at {best.address} in {1000 * best.rtt_s:.0f} ms")]
    checks.append(_check_clock(member.name, best.offset_s))
    if running:
        back = await probe(folder.identity, member, best.address, insecure, True)
        checks.append(_check_back(member.name, back, linked))
    return checks


def _check_clock(name: str, offset_s: float) -> Check:
    if abs(offset_s) <= CLOCK_S:
        return Check("clock", "ok", f"that of {name} differs by {abs(offset_s):.1f} s")
    way, here = "ahead of" if offset_s < 0 else "behind", time.strftime("%Y-%m-%d %H:%M:%S")
    text = f"this device's clock is {abs(offset_s):.0f} s {way} that of {name} ({here} here)"
    return Check("clock", "failure", text, "set the clock of the one that is wrong: timedatectl set-ntp true")


def _check_back(name: str, back: Any, linked: bool) -> Check:
    if back.error:
        return Check("reach back", "warning", f"{name} did not say whether it reaches this device: {back.error}")
    if not back.back:
        return Check("reach back", "warning", f"{name} knows no address of this device", "wait until they are linked")
    if any(not error for _, error in back.back):
        good = next(address for address, error in back.back if not error)
        return Check("reach back", "ok", f"{name} reaches this device at {good}")
    tried = ", ".join(f"{address}: {error}" for address, error in back.back)
    if linked:
        return Check("reach back", "ok", f"{name} does not reach this device ({tried}){WALLED}")
    cure = "open the port in this device's firewall, or set network.advertise to an address that others reach"
    return Check("reach back", "failure", f"{name} does not reach this device ({tried})", cure)
