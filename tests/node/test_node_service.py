"""Whole nodes in one process: over memory, and over gRPC on loopback with real pairing."""

from __future__ import annotations

import asyncio
import io
import json
import re
import socket
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from node_processes import grpc_service
from node_swarm import make_swarm, memory_service, until, write_samples
from toy import free_port

from dfca.base.errors import ConfigError, DataError, DfcaError
from dfca.node.disk.folder import InUse, NodeFolder
from dfca.node.disk.save_file import STATE, last_save
from dfca.node.memory import MemoryNetwork
from dfca.node.operate.commands import init_node, join_node, load_model, parse_settings, predict_file
from dfca.node.operate.control import call, stop_node
from dfca.node.operate.doctor import examine
from dfca.node.operate.members import describe_members, members_table, read_members
from dfca.node.operate.status import describe_misfit, read_status, status_table
from dfca.node.run import make_transport
from dfca.node.service import Service, ServiceOptions
from dfca.node.task.founding import Founding, JoinPlan


def rounds(service: Service) -> int:
    return service.node.machine.round if hasattr(service, "node") else 0


def test_three_services_train_score_save_and_continue_after_a_restart(tmp_path: Path) -> None:
    folders = make_swarm(tmp_path, (0, 0, 0))

    async def life(number: int, least: int) -> list[dict[str, Any]]:
        network = MemoryNetwork(())
        services = [memory_service(network, NodeFolder.load(folder.path)) for folder in folders]
        running = [asyncio.create_task(service.run()) for service in services]
        await until(lambda: all(rounds(service) >= least and service.work.report for service in services))
        statuses = [service.status() for service in services]
        with pytest.raises(InUse, match="runs already; stop it first"):
            await memory_service(network, NodeFolder.load(folders[0].path)).run()
        for service in services:
            service.stop()
        await asyncio.gather(*running)
        return statuses

    first = asyncio.run(life(0, 8))
    assert [status["incarnation"] for status in first] == [0, 0, 0]
    assert all(status["accuracy"] > 0.7 for status in first)
    assert all(status["clusters"] >= 1 and status["members"] == 3 for status in first)
    assert all(status["folds"] > 0 for status in first)
    assert all(status["refused"]["model"] == 1 for status in first)
    saved = [folder.store().load() for folder in folders]
    banks = [save.bank for save in saved if save is not None and save.bank is not None]
    assert len(banks) == 3
    last = [save.round for save in saved if save is not None]
    again = asyncio.run(life(1, max(last) + 2))
    assert [status["incarnation"] for status in again] == [1, 1, 1]
    assert all(status["clusters"] >= len(bank) for status, bank in zip(again, banks, strict=True))
    stopped = read_status(folders[0].path)
    assert stopped["running"] is False
    assert stopped["round"] >= max(last) + 2
    text, model = predict_file(folders[0].path, str(tmp_path / "0.csv"))
    assert text.splitlines()[0] == "row,class,probability"
    assert len(text.splitlines()) == 121
    assert model.round >= max(last)
    with pytest.raises(DataError, match=r"none\.csv does not exist; give a file of samples to predict"):
        predict_file(folders[0].path, str(tmp_path / "none.csv"))


def test_a_device_is_invited_joins_takes_the_models_and_is_removed(tmp_path: Path) -> None:
    port = free_port(6)
    a, b = tmp_path / "kitchen", tmp_path / "garage"
    settings = {"network": {"host": "127.0.0.1", "port": port, "invite_port": port + 1}}
    agreed = {"local": {"steps": 2}, "election": {"warmup_steps": 10}}
    init_node(
        a, Founding(write_samples(tmp_path / "a.csv", 0, 1), "activity", settings=settings, hidden=(8,), agreed=agreed)
    )
    data = write_samples(tmp_path / "b.csv", 0, 2)
    other = {"network": {"host": "127.0.0.1", "port": port + 2, "invite_port": port + 3}}

    async def scenario() -> None:
        first, running = await grpc_service(a, record=tmp_path / "record")
        answer = await asyncio.to_thread(call, a, "invite")
        made = await asyncio.to_thread(join_node, b, answer["invite"], JoinPlan(data, settings=other))
        seen = await asyncio.to_thread(call, a, "joined", since=answer["joined"])
        assert seen["joined"] == [{"name": "garage", "id": made.identity.id, "code": made.code}]
        assert re.fullmatch(r"[A-Z2-7]{6}", made.code)
        assert not seen["open"]
        with pytest.raises(DfcaError, match=r"no invite is open|used before"):
            await asyncio.to_thread(join_node, tmp_path / "c", answer["invite"], JoinPlan(data, settings=other))
        assert not (tmp_path / "c").exists()  # nothing is left of it
        second, also = await grpc_service(b)
        await until(lambda: second.notes.counts["join"] > 0 and second.notes.counts["fold"] > 3)
        status = await asyncio.to_thread(read_status, a)
        assert [(neighbour["name"], neighbour["state"]) for neighbour in status["neighbours"]] == [("garage", "up")]
        assert status["bytes_in"] > 0
        members = (await asyncio.to_thread(read_members, a))["members"]
        assert [(member["name"], member["link"]) for member in members] == [
            ("garage", "up"),
            ("kitchen", "this device"),
        ]
        assert members[0]["silent_s"] < 60
        checks = await asyncio.to_thread(lambda: list(examine(a)))
        assert [check for check in checks if check.outcome == "failure"] == []
        texts = {check.name: check.text for check in checks}
        assert "garage answers at" in texts["reach"]
        assert f"garage reaches this device at 127.0.0.1:{port}" in texts["reach back"]
        assert "differs by 0." in texts["clock"]
        assert (await asyncio.to_thread(call, a, "remove", member="garage"))["removed"] == "garage"
        await until(lambda: first.status()["members"] == 1 and not first.node.machine.links)
        after = first.status()
        assert after["neighbours"] == []
        assert [after[key] >= status[key] > 0 for key in ("bytes_in", "bytes_out")] == [True, True]
        with pytest.raises(ConfigError, match="was removed from this swarm"):
            first.folder.roster.introduce(first.folder.identity, made.identity.certificate, "garage")
        assert "has joined; the code on both screens is" in first.options.log_stream.getvalue()
        second.stop()
        ended = await asyncio.to_thread(stop_node, a)
        assert (ended["name"], ended["round"]) == ("kitchen", (last_save(a / STATE) or {})["round"])
        with NodeFolder.load(a).lock():
            pass
        await running
        with suppress(ConfigError):  # on a busy machine it hears of its removal before it stops
            await also

    asyncio.run(scenario())
    assert (tmp_path / "record").stat().st_size > 1000


def test_a_port_in_use_is_said_in_a_sentence_and_nothing_is_left_open(tmp_path: Path) -> None:
    port = free_port(2)
    (folder,) = make_swarm(tmp_path, (0,), port)
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        other.listen()

        async def scenario() -> None:
            service = Service(folder, ServiceOptions(log_stream=io.StringIO()), make_transport)
            with pytest.raises(ConfigError, match=rf"cannot listen on 127\.0\.0\.1:{port}: the port is in use"):
                await service.run()

        asyncio.run(scenario())
        checks = {check.name: check for check in examine(folder.path)}
    assert checks["port"].outcome == "failure"
    assert "set another port in node.toml" in checks["port"].cure
    assert not (folder.path / "control.json").exists()
    with folder.lock():
        pass


def test_a_device_that_does_not_belong_any_more_is_told_so(tmp_path: Path) -> None:
    first, second = make_swarm(tmp_path, (0, 0))
    first.roster.remove(first.identity, second.identity.id)
    second.roster.merge(first.roster.records())
    second.save_roster()
    with pytest.raises(ConfigError, match="was removed from the swarm node0; that is final: make a new one"):
        NodeFolder.load(second.path)
    (first.path / "facts.json").write_bytes(first.facts.changed(seed=7).to_bytes())
    with pytest.raises(DataError, match="are of two swarms"):
        NodeFolder.load(first.path)


def test_a_service_ends_where_its_device_is_removed_while_it_runs(tmp_path: Path) -> None:
    first, second = make_swarm(tmp_path, (0, 0))

    async def scenario() -> None:
        service = memory_service(MemoryNetwork(()), second)
        running = asyncio.create_task(service.run())
        await until(lambda: (second.path / "control.json").exists())
        first.roster.remove(first.identity, second.identity.id)
        second.roster.merge(first.roster.records())
        with pytest.raises(ConfigError, match="was removed from the swarm"):
            await running

    asyncio.run(scenario())


def test_the_doctor_names_each_failure_and_its_cure(tmp_path: Path) -> None:
    (folder,) = make_swarm(tmp_path, (0,))
    (tmp_path / "0.csv").write_text("a,b,activity\n1,2,walk\n3,4,rest\n")
    (folder.path / "key.pem").chmod(0o644)
    checks = {check.name: check for check in examine(folder.path)}
    assert checks["key"].outcome == "failure"
    assert "chmod 600" in checks["key"].cure
    assert checks["data"].outcome == "failure"
    assert 'column "c" is missing' in checks["data"].text + checks["data"].cure
    assert checks["node"].cure == f"start it: dfca node run {folder.path}"
    assert checks["settings"].outcome == "ok"


def test_a_device_whose_data_does_not_fit_does_not_join(tmp_path: Path) -> None:
    port = free_port(3)
    a = tmp_path / "a"
    settings = {"network": {"host": "127.0.0.1", "port": port, "invite_port": port + 1}}
    init_node(a, Founding(write_samples(tmp_path / "a.csv", 0, 1), "activity", settings=settings, hidden=(4,)))
    (tmp_path / "b.csv").write_text("a,b,speed,activity\n1,2,3,walk\n3,4,5,rest\n")

    async def scenario() -> None:
        service, running = await grpc_service(a)
        answer = await asyncio.to_thread(call, a, "invite")
        with pytest.raises(DataError, match='column "c" is missing'):
            await asyncio.to_thread(join_node, tmp_path / "b", answer["invite"], JoinPlan(str(tmp_path / "b.csv")))
        assert service.status()["members"] == 1
        assert service.status()["refused"] == {"pairing: declined": 1}
        service.stop()
        await running

    asyncio.run(scenario())
    assert not (tmp_path / "b").exists()
    with pytest.raises(DfcaError, match=r"has no models yet|does not exist|there is no node"):
        load_model(tmp_path / "b")


def test_a_status_is_a_table_for_people(tmp_path: Path) -> None:
    from rich.console import Console

    (folder,) = make_swarm(tmp_path, (0,))

    async def scenario() -> dict[str, Any]:
        service = memory_service(MemoryNetwork(()), folder)
        running = asyncio.create_task(service.run())
        await until(lambda: rounds(service) >= 3)
        status = service.status()
        service.stop()
        await running
        return status

    status = asyncio.run(scenario())
    json.dumps(status, allow_nan=False)
    text = io.StringIO()
    Console(file=text, width=120).print(status_table(status))
    assert "node0" in text.getvalue()
    assert "held-out samples" in text.getvalue()


def test_all_members_are_listed_as_a_node_knows_them(tmp_path: Path) -> None:
    from rich.console import Console

    first, second, *_ = make_swarm(tmp_path, (0, 0, 0, 0))
    ids = {member.name: member.id for member in first.roster.members().values()}
    second.roster.announce(second.identity, ["192.0.2.7:7447"])
    first.roster.merge(second.roster.records())
    links, silent = {ids["node2"]: {"state": "down"}}, {ids["node2"]: 7300.0}
    members = describe_members(first.roster, first.identity.id, links, silent)
    assert [(member["name"], member["link"]) for member in members] == [
        ("node0", "this device"),
        ("node1", "none"),
        ("node2", "down"),
        ("node3", "none"),
    ]
    assert [member["may_introduce"] for member in members] == [True, False, False, False]
    shown = io.StringIO()
    Console(file=shown, width=150).print(members_table({"running": True, "members": members}))
    rows = [" ".join(line.split()) for line in shown.getvalue().splitlines()]
    said = (members[1]["announced"] or "")[:16].replace("T", " ")
    assert rows[0] == "member ID link last heard addresses may invite"
    assert rows[1] == f"node0 {ids['node0'][:7]} this device yes"
    assert rows[2] == f"node1 {ids['node1'][:7]} none published its address {said} UTC 192.0.2.7:7447"
    assert rows[3] == f"node2 {ids['node2'][:7]} down 2 h ago"
    assert rows[4] == f"node3 {ids['node3'][:7]} none never"
    first.save_roster()
    stopped = read_members(first.path)
    assert stopped["running"] is False
    assert [member["announced"] for member in stopped["members"]] == [member["announced"] for member in members]
    shown = io.StringIO()
    Console(file=shown, width=150).print(members_table(stopped))
    assert "the node does not run: it has no links" in shown.getvalue()
    assert "down" not in shown.getvalue()


def test_the_status_of_a_node_that_does_not_run_is_about_the_past() -> None:
    from rich.console import Console

    link = {"name": "garage", "state": "up", "round": 7, "silent_s": 0.0}
    status: dict[str, Any] = {"name": "attic", "time": "noon", "problems": ["it was removed"], "neighbours": [link]}
    status["last_error"] = {"text": "it was removed", "time": "noon"}
    texts = []
    for running in (True, False):
        text = io.StringIO()
        Console(file=text, width=120).print(status_table(status | {"running": running}))
        texts.append(" ".join(text.getvalue().split()))
    assert "garage up 7 0.0 s ago" in texts[0]
    assert "does not run; this is its state of noon" in texts[1]
    assert "garage was up 7 0 B" in texts[1]
    assert texts[1].count("it was removed") == 1
    text, time = io.StringIO(), (datetime.now(UTC) - timedelta(hours=3)).isoformat(timespec="seconds")
    saved = {"round": 412, "time": time}
    Console(file=text, width=120).print(status_table(status | {"running": False, "time": time, "saved": saved}))
    assert f"this is its state of {time} (3 h ago)" in text.getvalue()
    assert f"round 412, of {time} (3 h ago): the next start continues from it" in text.getvalue()


def test_settings_on_the_command_line() -> None:
    assert parse_settings(["a.b=1", "a.c=x y", 'd=["p"]'], "--set") == {"a": {"b": 1, "c": "x y"}, "d": ["p"]}
    for wrong in ("nothing", "=1", "a-b=1"):
        with pytest.raises(ConfigError, match=r"--set takes KEY=VALUE, such as network\.port=7500"):
            parse_settings([wrong], "--set")


def test_a_recorded_service_replays_from_its_save(tmp_path: Path) -> None:
    from dfca.node.disk.record import digest_of_save, first_difference, read_recording
    from dfca.peer.machine import Memory, drive
    from dfca.peer.peer import Peer

    (folder,) = make_swarm(tmp_path, (0,))

    async def life(least: int) -> None:
        service = memory_service(MemoryNetwork(()), NodeFolder.load(folder.path), record=tmp_path / "record")
        running = asyncio.create_task(service.run())
        await until(lambda: rounds(service) >= least)
        service.stop()
        await running

    asyncio.run(life(3))
    asyncio.run(life(8))
    recording = read_recording(tmp_path / "record")
    assert recording.saved is not None
    assert recording.incarnation == 1
    peer = Peer(
        recording.options,
        Memory(recording.options.size, recording.options.dtype),
        recording.incarnation,
        recording.saved,
    )
    list(drive(peer, recording.inputs))
    last = folder.store().load()
    assert last is not None
    assert digest_of_save(peer.save()) == digest_of_save(last)
    assert torch.equal(peer.bank, last.bank)  # type: ignore[arg-type]
    assert len(recording.checks) >= 3
    fresh = Peer(
        recording.options,
        Memory(recording.options.size, recording.options.dtype),
        recording.incarnation,
        recording.saved,
    )
    assert first_difference(recording, fresh) is None
    other = Peer(
        recording.options,
        Memory(recording.options.size, recording.options.dtype),
        recording.incarnation + 1,
        recording.saved,
    )
    assert first_difference(recording, other) == min(recording.checks)


def test_a_full_disk_is_a_problem_of_the_status_and_training_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from urllib.request import urlopen

    from dfca.node.disk.store import CannotSave, DiskStore

    port = free_port(1)
    (folder,) = make_swarm(tmp_path, (0,))
    text = (folder.path / "node.toml").read_text()
    (folder.path / "node.toml").write_text(text.replace("# metrics_port = ", f"metrics_port = {port}"))
    folder = NodeFolder.load(folder.path)
    assert folder.config.log.metrics_port == port

    def refuse(self: DiskStore, saved: Any) -> None:
        raise CannotSave("no space left for the models; free some space")

    async def scenario() -> None:
        service = memory_service(MemoryNetwork(()), folder)
        with monkeypatch.context() as patch:
            patch.setattr(DiskStore, "save", refuse)
            running = asyncio.create_task(service.run())
            await until(lambda: rounds(service) >= 3 and bool(service._problems))
            before = service.status()
            assert before["problems"] == ["no space left for the models; free some space"]
            assert before["last_error"]["text"] == "no space left for the models; free some space"

            def scrape() -> str:
                with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
                    return answer.read().decode()

            assert "dfca_problems 1.0" in await asyncio.to_thread(scrape)
        service.node.saving._retry_s = 0.01
        service.stop()
        await running

    asyncio.run(scenario())
    saved = folder.store().load()
    assert saved is None or saved.round >= 3


def test_a_device_that_no_model_fits_is_told_so(tmp_path: Path) -> None:
    facts = make_swarm(tmp_path, (0,))[0].facts  # two classes: guessing has a loss of 0.69
    lone = describe_misfit([2.0] * 9 + [0.1], facts, members=3)  # before the last one nothing had come from others
    assert lone is not None
    assert lone.startswith("no model of the swarm fits this device's data (loss 2; guessing has 0.69)")
    assert "opens one for at least 2 devices; add a second such device, or found the swarm anew with --clusters" in lone
    given = describe_misfit([2.0] * 10, facts.changed(clusters=2), members=3)
    assert given is not None
    assert "are its labels and units those of the others?" in given
    assert describe_misfit([2.0] * 4 + [0.3] * 6, facts, members=3) is None  # it has learned something
    assert describe_misfit([2.0] * 9, facts, members=3) is None  # too early to say
    assert describe_misfit([2.0] * 10, facts, members=1) is None  # nobody else
    assert describe_misfit([0.5] * 10, facts, members=3) is None
    assert describe_misfit([0.5] * 10, facts, members=3, known=True) is not None  # not yet solved
    assert describe_misfit([0.4] * 10, facts, members=3, known=True) is None


def test_a_lone_device_among_others_is_told_so_and_they_are_not(tmp_path: Path) -> None:
    """The labels of the last device are those of the others, swapped, and there is one model for all.

    With 20 steps a round, it fits the device again in a round before which no other model has come: they wait for each
    other here.
    """
    agreed = {"local": {"steps": 20}, "clusters": 1, "aggregation": "batch"}
    folders = make_swarm(tmp_path, (0, 0, 0, 1), agreed=agreed)

    async def scenario() -> None:
        network = MemoryNetwork(())
        services = [memory_service(network, folder) for folder in folders]
        running = [asyncio.create_task(service.run()) for service in services]
        said, lone = "no model of the swarm fits this device's data", services[-1]
        await until(lambda: "poison" in lone._problems)
        logged: list[str] = []
        lone.log.info = lambda text, **values: logged.append(text)
        lone._problems |= {"poison 0": "models of node0 are left out", "fit": said}  # as it may have been told before
        await until(lambda: {*lone._problems}.isdisjoint(("poison 0", "fit")))
        await until(lambda: all(rounds(service) >= 10 for service in services))
        problems = [service.status()["problems"] for service in services]
        assert problems[:-1] == [[], [], []]
        assert [text.partition(" (loss ")[0] for text in problems[-1]] == [said]
        assert [text for text in logged if text.startswith("solved")] == []  # it is said in other words
        for service in services:
            service.stop()
        await asyncio.gather(*running)

    asyncio.run(scenario())


def test_services_that_start_together_see_each_other_run_by_their_links(tmp_path: Path) -> None:
    """A network in memory spreads no rosters: links alone must show who runs."""
    folders = make_swarm(tmp_path, (0, 0, 0), agreed={"rounds": 1, "starts_with": 3})

    async def scenario() -> list[int]:
        network = MemoryNetwork(())
        services = [memory_service(network, folder, until_done=True) for folder in folders]
        await asyncio.wait_for(asyncio.gather(*(service.run() for service in services)), 60)
        return [service.node.machine.round for service in services]

    assert asyncio.run(scenario()) == [1, 1, 1]


def test_a_swarm_as_it_is_founded_surveys_its_clusters_and_every_node_ends(tmp_path: Path) -> None:
    """Whole services with what users get: clusters are merged on the way, and personal steps are taken at the end."""
    agreed = {"rounds": 80, "starts_with": 6, "merging": {}, "local": {"steps": 20}}
    folders = make_swarm(tmp_path, (0, 0, 0, 1, 1, 1), agreed=agreed)

    async def scenario() -> list[Service]:
        network = MemoryNetwork(())
        services = [memory_service(network, folder, until_done=True) for folder in folders]
        await asyncio.wait_for(asyncio.gather(*(service.run() for service in services)), 120)
        return services

    services = asyncio.run(scenario())
    statuses = [service.status() for service in services]
    assert [status["state"] for status in statuses] == ["done"] * 6
    assert [status["round"] for status in statuses] == [80] * 6
    assert len({service.node.machine.lineage for service in services}) == 1  # type: ignore[attr-defined]
    assert [status["clusters"] for status in statuses] == [2] * 6
    clusters = [status["cluster"] for status in statuses]
    assert clusters[0] != clusters[3]
    assert clusters == [clusters[0]] * 3 + [clusters[3]] * 3
    assert all(status["accuracy"] > 0.8 for status in statuses)
    assert all(service.notes.counts["survey"] > 0 for service in services)
    assert all(service.notes.counts["measured"] == 1 for service in services)


def test_problems_of_a_running_node_reach_the_doctor(tmp_path: Path) -> None:
    (folder,) = make_swarm(tmp_path, (0,))

    async def scenario() -> list[Any]:
        service = memory_service(MemoryNetwork(()), folder)
        running = asyncio.create_task(service.run())
        await until(lambda: (folder.path / "control.json").exists())
        service._problems["test"] = "no model fits; add a second such device"  # a name that the ticks leave alone
        problems = await asyncio.to_thread(lambda: [check for check in examine(folder.path) if check.name == "problem"])
        service.stop()
        await running
        return problems

    (problem,) = asyncio.run(scenario())
    assert (problem.outcome, problem.text, problem.cure) == ("warning", "no model fits", "add a second such device")
