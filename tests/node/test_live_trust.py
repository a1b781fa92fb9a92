"""Trust at running nodes: invites that are used, old or of another version, removed devices, wrong clocks."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from net_world import FAST, SIZE, SWARM, make_device, until
from node_processes import dfca, grpc_service
from node_swarm import make_swarm, memory_service
from toy import free_port

from dfca.base.errors import ConfigError, DfcaError
from dfca.node.disk.folder import NodeFolder
from dfca.node.memory import MemoryNetwork
from dfca.node.net.options import Swarm
from dfca.node.operate.control import call
from dfca.node.operate.status import read_status
from dfca.node.trust import identity as identity_module
from dfca.node.trust import pairing
from dfca.node.trust.identity import Identity
from dfca.node.trust.invite import Invite
from dfca.node.trust.joining import join
from dfca.node.trust.roster import Roster


@contextmanager
def one_sentence(pattern: str) -> Iterator[None]:
    with pytest.raises(DfcaError, match=pattern) as caught:
        yield
    assert "\n" not in str(caught.value)


def test_old_invites_of_a_live_node_are_refused_each_with_its_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder,) = make_swarm(tmp_path, (0,))
    path = folder.path
    text = (path / "node.toml").read_text()
    (path / "node.toml").write_text(re.sub(r"invite_port = 0", f"invite_port = {free_port(1)}", text))
    devices = [Identity.create(tmp_path / f"device{i}") for i in range(3)]

    async def scenario() -> None:
        service = memory_service(MemoryNetwork(()), NodeFolder.load(path))
        running = asyncio.create_task(service.run())
        await until(lambda: (path / "control.json").exists())

        async def invite(lifetime_s: float = 60) -> Invite:
            return Invite.parse((await asyncio.to_thread(call, path, "invite", lifetime_s=lifetime_s))["invite"])

        async def enter(line: str | Invite, device: Identity) -> None:
            await join(line, device, "device", [], lambda facts: None)

        used, late = await invite(), await invite(lifetime_s=0.3)
        await enter(used, devices[0])
        await until(lambda: len(service._pairing.invites) == 0)
        with one_sentence("no invite is open at .* it may be used or expired: make a new one"):
            await enter(used, devices[1])
        valid = await invite()
        with one_sentence("refused this device: used; the invite was used before: every device needs one of its own"):
            await enter(replace(valid, secret=used.secret), devices[1])
        with one_sentence("refused this device: expired; the invite is too old: make a new one"):
            await enter(replace(valid, secret=late.secret), devices[1])
        with one_sentence("an invite is one line of the form dfca1:HOST:PORT/ID/SECRET, got"):
            await enter(str(valid).replace("dfca1:", "dfca0:"), devices[1])
        with monkeypatch.context() as old:
            old.setattr(pairing, "PROTOCOL", 0)
            with one_sentence("pairs by version '0' of the protocol, this device by 1; install the same dfca"):
                await enter(valid, devices[1])
        await asyncio.to_thread(call, path, "remove", member=devices[0].id)
        with one_sentence("refused this device: removed; that is final: make a new device in an empty folder"):
            await enter(valid, devices[0])
        status = await asyncio.to_thread(call, path, "status")
        assert status["members"] == 1
        for reason in ("used", "expired", "removed"):
            assert status["refused"][f"pairing: {reason}"] == 1
        await enter(valid, devices[1])  # all this has not burnt it
        service.stop()
        await running

    asyncio.run(scenario())


@pytest.mark.parametrize("away", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_removed_node_stops_with_a_sentence_and_its_status_says_so(tmp_path: Path, away: bool) -> None:
    first, second = (folder.path for folder in make_swarm(tmp_path, (0, 0), free_port(2)))

    async def scenario() -> None:
        one, running = await grpc_service(first)
        two, also = await grpc_service(second)
        await until(lambda: bool(one.node.machine.links and two.node.machine.links))
        if away:
            two.stop()
            await also
        await asyncio.to_thread(call, first, "remove", member="node1")
        if away:
            two, also = await grpc_service(second)
        with one_sentence(r"this device \(\w{7}\) was removed from the swarm node0; that is final"):
            await asyncio.wait_for(also, 20)
        one.stop()
        await running

    asyncio.run(scenario())
    last = read_status(second)
    assert not last["running"]
    assert "was removed from the swarm" in last["problems"][0]
    shown = dfca("status", second)
    assert "was removed from the swarm" in " ".join(shown.output.split())
    again = dfca("run", second)
    assert again.exit_code == ConfigError.status
    assert "was removed from the swarm" in " ".join(again.output.split())
    assert "Traceback" not in again.output


@pytest.mark.parametrize(
    ("clock", "sentence"),
    [
        (datetime(1980, 1, 1, tzinfo=UTC), "clock shows 1980-01-01, before the certificate in"),
        (datetime.now(UTC) + timedelta(days=4000), "set the clock if it is wrong, else make a new device"),
    ],
)
def test_a_clock_that_is_off_or_an_expired_certificate_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: datetime, sentence: str
) -> None:
    (folder,) = make_swarm(tmp_path, (0,))

    class Clock(datetime):
        @classmethod
        def now(cls, tz: object = None) -> datetime:  # type: ignore[override]
            return clock

    monkeypatch.setattr(identity_module, "datetime", Clock)
    result = dfca("run", folder.path)
    assert result.exit_code != 0
    assert sentence in " ".join(result.output.split())
    assert "Traceback" not in result.output


def test_a_neighbour_whose_certificate_expired_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not linked, in either direction, and the others say why."""
    good = Identity.create(tmp_path / "good")
    monkeypatch.setattr(identity_module, "VALID", timedelta(days=-1))
    monkeypatch.setattr(identity_module, "NEWEST_KNOWN", datetime(2021, 1, 1, tzinfo=UTC))
    monkeypatch.setattr(identity_module, "_check_dates", lambda certificate, folder: None)
    old = Identity.create(tmp_path / "old")
    roster = Roster.found(good, SWARM, "good")
    roster.introduce(good, old.certificate, "old")

    async def run() -> None:
        devices = [
            make_device(identity, roster.copy(), tmp_path / name, FAST, Swarm(SWARM, SIZE))
            for identity, name in ((good, "a"), (old, "b"))
        ]
        for device in devices:
            device.roster.announce(device.identity, [await device.transport.start()])
        for device in devices:
            device.roster.merge(devices[0].roster.records() + devices[1].roster.records())
            device.transport.open(device.node)
        status = devices[0].transport.status
        await until(lambda: "its certificate expired on" in status()["neighbours"][old.id]["last_error"])
        await asyncio.sleep(1.0)
        assert devices[0].node.up() == devices[1].node.up() == set()
        for device in devices:
            await device.transport.stop()

    asyncio.run(run())
