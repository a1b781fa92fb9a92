"""Write the golden files of today's version into a new folder: `python tests/golden/make.py`.

The folder is named after the version ("0.2"); one that exists is never written to: files of a released version stay as
that version wrote them. To change what is stored, raise the version or name another folder: `make.py 0.2b`. Between two
versions, `make.py next` stores the numbers alone that differ from the newest one's, in next.json.

    runs/           run folders, finished and interrupted, by rounds and in virtual time
    digests.json    the digests of all points of all presets
    facts/          facts of swarms, and their IDs
    saves/          saves of a peer, both generations, and what they hold as JSON
    node/           the whole folder of a node; its key was made for this file and is used nowhere else
    peers/          the whole state of small swarms in several phases, and how they end
    wire.json       messages, frames and payloads as bytes
    bits.json       the numbers of tiny runs in float64
"""

from __future__ import annotations

import gzip
import json
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import golden_cases as cases
import torch

import dfca
from dfca.core.rules.election import Tally
from dfca.core.rules.merging import EXCESSES, Merge, Poll, Survey
from dfca.core.rules.relay import Offer
from dfca.core.state import Message
from dfca.node.disk.store import DiskStore
from dfca.node.operate.commands import init_node, predict_file
from dfca.node.task.founding import Founding
from dfca.node.wire import codec, payload
from dfca.node.wire import wire_pb2 as pb
from dfca.peer.records import messages as m
from dfca.peer.records.lineage import Entry
from dfca.runs.runner import run
from dfca.runs.signals import Interrupted
from dfca.runs.sink import NullSink

KEPT = ("node.toml", "facts.json", "key.pem", "certificate.pem", "roster.json", "status.json", "state")
PHASES = {
    "elected": {
        "warming": 3,
        "bidding": 12,
        "joining": 46,
        "again": 90,
        "surveying": 131,
        "judging": 134,
        "training": 150,
    },
    "drawn": {"waiting": 20, "joining": 26, "relaying": 40},
    "drifting": {"drifted": 60, "by-election": 80, "afterwards": 200},
    "endless": {"measured": 150},
}
"""The ticks after which the swarms are stored."""


def write(path: Path, content: Any) -> None:
    """Write JSON, a line per entry of the outermost table."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in content.items()]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


# Runs.


class StopAt(NullSink):
    """Press Ctrl-C after a round."""

    def __init__(self, round: int) -> None:
        self.round = round

    def finish_round(self, trial: Any, round: int, metrics: Any, time_s: float = 0.0) -> None:
        """See `NullSink`."""
        if round == self.round:
            signal.raise_signal(signal.SIGINT)


def make_runs(out: Path, scratch: Path) -> None:
    """Run every experiment to its end, and once more to a checkpoint in the middle."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name, stop in cases.STOPS.items():
        experiment = cases.experiment_of(name)
        run(experiment, scratch / name)
        try:
            run(experiment, scratch / f"{name}-interrupted", StopAt(stop))
        except Interrupted as interrupted:
            print(interrupted)
        for kind in (name, f"{name}-interrupted"):
            shutil.copytree(scratch / kind, out / kind, ignore=shutil.ignore_patterns(".lock"))
            place = out / kind / "environment.json"
            known = json.loads(place.read_text())
            place.write_text(json.dumps({**known, "commit": None, "platform": "Linux"}, indent=1) + "\n")


# Saves and nodes.


def make_saves(out: Path) -> None:
    """Save a peer of the swarm in two rounds, one that has warmed up, and one with everything that a save can hold."""
    swarm, save_at = cases.Swarm("elected"), {}
    for tick in (8, 140, 215):
        save_at[tick] = swarm.run(tick).peers[1].save()  # type: ignore[union-attr]
    last, drifting = save_at[215], cases.Swarm("drifting")
    drifted = [drifting.run(tick).peers[0].save() for tick in (72, 200)]  # type: ignore[union-attr]
    merge = Entry(9, 2, 2**62 + 7, 1, 2**47 + 1, (0, 1), (Merge(0, 1, 0.25, -0.5),), (2,), True)
    full = replace(last, lineage=(*last.lineage, merge), own=last.bank[0].clone(), incarnation=4, voted=False)
    for name, saves in {
        "trained": (save_at[140], last),
        "warmed-up": (save_at[8],),
        "drifted": drifted,
        "full": (last, full),
    }.items():
        store = DiskStore(out / name)
        for saved in saves:
            store.save(saved)
        write(out / f"{name}.json", {path: cases.plain(save) for path, save in zip(_turns(), saves, strict=False)})


def _turns() -> Iterator[str]:
    """Name the files that a store writes, in turn."""
    yield from ("peer.1.safetensors", "peer.0.safetensors")


def make_node(out: Path, scratch: Path) -> None:
    """Found a swarm, let its only member train, and keep its folder."""
    made, csv = scratch / "node", scratch / "node.csv"
    cases.write_samples(csv)
    settings = {
        "network": {"host": "127.0.0.1", "port": 0, "invite_port": 0},
        "training": {"pause_s": 0.0, "reread_s": 0.0},
    }
    agreed = {"local": {"steps": 2}, "election": {"warmup_steps": 5}, "merging": None, "personal": 0}
    init_node(made, Founding(str(csv), "activity", name="golden", settings=settings, hidden=(4,), agreed=agreed))
    settled = (made / "node.toml").read_text().replace(str(csv), "samples.csv")
    (made / "node.toml").write_text(settled)
    shutil.copy(csv, made / "samples.csv")
    cases.run_node(made, 4)
    out.mkdir()
    for name in (*KEPT, "samples.csv"):
        copy = shutil.copytree if (made / name).is_dir() else shutil.copy
        copy(made / name, out / name)
    text, model = predict_file(made, str(csv))
    write(out.with_name("node.json"), {"predictions": text.splitlines(), "round": model.round})


# Peers.


def make_peers(out: Path) -> None:
    """Store the swarms in several phases, and how they end."""
    out.mkdir()
    ends: dict[str, Any] = {}
    for name, phases in PHASES.items():
        swarm = cases.Swarm(name)
        for phase, tick in phases.items():
            stored = {"phases": swarm.run(tick).phases(), **swarm.pack()}
            data = json.dumps(stored, separators=(",", ":")).encode()
            (out / f"{name}.{phase}.json.gz").write_bytes(gzip.compress(data, mtime=0))
        ends[name] = swarm.run().outcome()
    write(out / "ends.json", ends)


# The wire.


def wire_messages() -> list[Any]:
    """Make at least one message of every kind."""
    key, model = m.Key(3, 2, -12345678901234, 7, 1), torch.tensor([0.5, -1.25, 3e-7])
    lineage = (
        Entry(5, 1, 2**62 + 7, 0, 2**47 + 1, (0, 1, 2)),
        Entry(5, 0, 4, 1, 0, (0, 1), (Merge(0, 1, 0.25, -0.125),), (2,), True),
    )
    sent = Message(4, 1, 17, 3, model, None, 12)
    copied = replace(sent, offer=Offer(4, 16, -2))
    tally = Tally(5, 2, 80, *[(2**70 + n, -n) if n in (0, 1, 4, 5) else (n, n + 1) for n in range(10)])
    survey = Survey((0, 2), (3, 0), tuple(range(-8, EXCESSES * 2 - 8)), (2**80, -5))
    call, turns = m.Call((1,), 4, (2,), False), (m.Turn(9, True, 0), m.Turn(None, False))
    return [
        m.Hello(2, 17, 3, lineage),
        m.Hello(0, 0, 0),
        m.Update(sent, 2, lineage, 1.5, (17, 16, -1), ((1, Offer(4, 16, 3)),)),
        m.Update(sent, 1),
        m.Nothing(17, lineage, (17, 16), ((0, Offer(4, 16, 3)),)),
        m.CopyRequest(1, lineage),
        m.Copy(copied, lineage),
        m.BankRequest(None),
        m.BankRequest((0, 2)),
        m.BankCopy(copied, 17, 3, lineage),
        m.Declined(None),
        m.Declined(0),
        m.Alarm(-7, 2**40, True, lineage),
        m.Curves(32, 1, 3, 2, tuple(n / 8 for n in range(18)), lineage),
        m.Served(9, torch.arange(6.0).view(2, 3)),
        m.Report(9, sent),
        m.Report(9, None),
        m.Probe(key, lineage, call),
        m.Probe(key, ()),
        m.Count(key, 9, 5, turns, Poll((0, 2), (5, 4), (100, 2**40), (0, 1), (3, 0), (0, -7, 2**80, 0))),
        m.Refuse(key),
        m.Open(key, 9, turns, 7),
        m.Open(key, 9, (), None),
        m.Centre(key, 0, 7, model),
        m.Bid(key, 1, -0.5, 3),
        m.Bid(key, 1, 0.0, None),
        m.Stand(key, 1, 3),
        m.Candidate(key, 1, 3, 0.75, model),
        m.Votes(key, 1, tally),
        m.Decision(key, 1, turns[0], True),
        m.Question(key, (4, 5), (2, 0)),
        m.Answer(key, survey),
        m.Result(key, lineage[1]),
    ]


def wire_frames() -> list[pb.Frame]:
    """Make a frame of every kind."""
    body = codec.encode(m.Declined(3))[0]
    hello = pb.LinkHello(protocol=1, swarm="s" * 52, model_size=10, dtype=pb.FLOAT32, epoch=7, software="dfca 0.2.0")
    announce = pb.Announce(number=1, message=body, name=bytes(range(32)), size=5, encoding=pb.ENCODING_BF16, rows=2)
    return [
        pb.Frame(hello=hello),
        pb.Frame(heartbeat=pb.Heartbeat(number=1)),
        pb.Frame(roster_digest=pb.RosterDigest(digest="d")),
        pb.Frame(roster_records=pb.RosterRecords(records=[b"record"])),
        pb.Frame(message=body),
        pb.Frame(announce=announce),
        pb.Frame(withdraw=pb.Withdraw(number=1)),
        pb.Frame(unavailable=pb.Unavailable(number=1, reason="size")),
        pb.Frame(received=pb.Received(number=1)),
        pb.Frame(close=pb.Close(reason="version", text="1 is not 2")),
    ]


def make_wire() -> dict[str, Any]:
    """Encode messages, frames, and one bank in every encoding."""
    messages = []
    for message in wire_messages():
        data, model = codec.encode(message)
        messages.append([type(message).__name__, data.hex(), None if model is None else model.tolist()])
    assert {name for name, *_ in messages} == {kind.__name__ for kind in m.KINDS}
    frames = [[frame.WhichOneof("kind"), frame.SerializeToString(deterministic=True).hex()] for frame in wire_frames()]
    bank = torch.arange(64.0).view(2, 32) / 8 - 3
    payloads = []
    for encoding in payload.ENCODINGS:
        for compress in (False, True):
            data = payload.pack(bank, encoding, compress)
            dtype = torch.float64 if encoding == "float64" else torch.float32
            expect = payload.Expect(32, dtype, 2, encoding)
            payloads.append([encoding, compress, data.hex(), payload.unpack(data, expect).tolist()])
    return {"messages": messages, "frames": frames, "bank": bank.tolist(), "payloads": payloads}


def make_next() -> None:
    """Store the numbers that differ from those of the newest version."""
    newest = cases.VERSIONS[-1]
    bits = {case: cases.bits_of(*rest) for case, *rest in cases.bit_cases()}
    ends = {name: cases.Swarm(name).run().outcome() for name in cases.SWARMS}
    before = [json.loads((newest / name).read_text()) for name in ("bits.json", "peers/ends.json")]
    bits, ends = (
        {key: value for key, value in now.items() if key in old and cases.differences(old[key], value, 1e-12)}
        for old, now in zip(before, (bits, ends), strict=True)
    )
    write(cases.NEXT, {"bits": bits, "ends": ends})
    print(f"{cases.NEXT.name}: {', '.join([*bits, *ends])}")


def main() -> None:
    """Write everything."""
    if sys.argv[1:] == ["next"]:
        torch.set_num_threads(1)
        make_next()
        return
    version = sys.argv[1] if len(sys.argv) > 1 else ".".join(dfca.__version__.split(".")[:2])
    out = cases.HERE / version
    if out.exists():
        sys.exit(f"{out} exists and is never written to; give another name: make.py NAME")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        new = scratch / "new"
        new.mkdir()
        make_runs(new / "runs", scratch)
        write(new / "digests.json", cases.digests())
        facts = cases.facts_of(scratch)
        (new / "facts").mkdir()
        for kind, agreed in facts.items():
            (new / "facts" / f"{kind}.json").write_bytes(agreed.to_bytes())
        write(new / "facts.json", {kind: agreed.swarm_id for kind, agreed in facts.items()})
        make_saves(new / "saves")
        make_node(new / "node", scratch)
        make_peers(new / "peers")
        write(new / "wire.json", make_wire())
        write(new / "bits.json", {case: cases.bits_of(*rest) for case, *rest in cases.bit_cases()})
        shutil.copytree(new, out)


if __name__ == "__main__":
    main()
