"""Makes the tables of docs/scale.md: what a roster of N members costs (measured), and fleets and cells (calculated).

python docs/measure_scale.py [N ...]        # 1000 10000
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec

from dfca.node.net.graph import SwarmGraph
from dfca.node.trust.identity import Identity
from dfca.node.trust.records import to_bytes
from dfca.node.trust.roster import Roster

SWARM = "s" * 52
RECORDS = 256
"""Records of one frame."""
CELL, CONTACTS = 100, 40
"""Devices of a cell; contacts that a device of a fleet keeps."""
SESSION_S, WAVE_S = 86_400.0, 10.0
"""How long a device is there before it leaves; how long a wave takes."""


def timed(act: Callable[..., Any], *arguments: Any) -> float:
    """Return the processor time of a call: other programs on this machine do not count."""
    begin = time.process_time()
    act(*arguments)
    return time.process_time() - begin


def identity(number: int) -> Identity:
    return Identity.of_key(ec.derive_private_key(7_654_321 * (number + 1), ec.SECP256R1()), Path("/nowhere"))


def make_swarm(count: int) -> tuple[list[Identity], list[bytes]]:
    """Make a swarm of members that have announced their addresses; returns their keys and the records."""
    from dfca.node.trust.records import Contact, Introduction, sign_record

    people = [identity(i) for i in range(count)]
    root = Roster.found(people[0], SWARM, "d0")
    introductions = (
        Introduction(person.id, f"d{i}", person.certificate, (), False, True, people[0].id, 0)
        for i, person in enumerate(people[1:], 1)
    )
    signed = [sign_record(record, people[0], SWARM) for record in introductions]
    contacts = [
        sign_record(Contact(person.id, (f"10.0.{i // 250}.{i % 250}:7447",), 1), person, SWARM)
        for i, person in enumerate(people)
    ]
    return people, [to_bytes(record) for record in (*root.records(), *signed, *contacts)]


def measure(count: int) -> dict[str, float]:
    """Measure what a roster of `count` members costs."""
    people, received = make_swarm(count)
    roster = Roster(SWARM, people[0].id)
    frames = [received[i : i + RECORDS] for i in range(0, len(received), RECORDS)]
    joined = timed(lambda: [roster.merge(frame) for frame in frames])
    graph = SwarmGraph(people[1].id, 6)
    graph.links(roster.members(), ())
    changes, graphs, tellings = [], [], []
    for number, changed in enumerate(people[2:22]):
        before = roster.serial
        changes.append(timed(roster.announce, changed, [f"10.9.9.{number}:7447"], 2 + number))
        graphs.append(timed(lambda: graph.links(roster.members(), ())))
        tellings.append(timed(lambda before=before: [to_bytes(record) for record in roster.since(before)]))
    new = [identity(count + number) for number in range(10)]
    joins = [timed(roster.introduce, people[0], person.certificate, f"n{person.id[:6]}") for person in new]
    links = graph.links(roster.members(), ())
    deaths = timed(graph.links, roster.members(), links)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "roster.json"
        saved = timed(roster.save, path)
        loaded = timed(Roster.load, path)
    return {
        "members": count,
        "bytes per member": sum(map(len, received)) / count,
        "a joining device verifies all, s": joined,
        "a changed address, ms": 1e3 * median(changes),
        "a new member, ms": 1e3 * median(joins),
        "telling a link, ms": 1e3 * median(tellings),
        "the graph after a change, ms": 1e3 * median(graphs),
        "the graph after a death, ms": 1e3 * deaths,
        "the roster to disk, s": saved,
        "the roster from disk, s": loaded,
    }


def table(rows: list[dict[str, float]]) -> str:
    names = [name for name in rows[0] if name != "members"]
    head = "| | " + " | ".join(f"{row['members']:,.0f} members" for row in rows) + " |"
    lines = [head, "|---|" + "---|" * len(rows)]
    lines += ["| " + " | ".join([name, *(_number(row[name]) for row in rows)]) + " |" for name in names]
    return "\n".join(lines)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2g}"


def planned(per_member: float, verify_s: float) -> str:
    """Calculate full rosters, fleets and cells, by the measured bytes and seconds of one member."""
    lines = [
        "| devices | full roster | | fleet | | cells | | a wave ends undisturbed | |",
        "|---|---|---|---|---|---|---|---|---|",
        "| | MB | s to join | kB | s to join | kB | s to join | one swarm | cells |",
    ]
    for power in range(3, 7):
        n = 10**power
        removed = 0.01 * n  # a hundredth was removed, 32 bytes each
        fleet = CONTACTS * per_member + 32 * removed
        cells = math.ceil(n / CELL)
        levels = max(1, math.ceil(math.log(n, CELL)))
        cell = levels * CELL * per_member
        one, nested = (math.exp(-0.4 * size * WAVE_S / SESSION_S) for size in (n, CELL))
        lines.append(
            f"| {n:,} | {n * per_member / 1e6:.1f} | {n * verify_s:.1f} | {fleet / 1e3:,.0f} | "
            f"{CONTACTS * verify_s:.3f} | {cell / 1e3:,.0f} ({cells:,} cells, {levels} levels) | "
            f"{levels * CELL * verify_s:.2f} | {one:.0%} | {nested:.1%} |"
        )
    return "\n".join(lines)


def main() -> None:
    rows = [measure(int(count)) for count in sys.argv[1:] or ("1000", "10000")]
    print(table(rows))
    last = rows[-1]
    print()
    print(planned(last["bytes per member"], last["a joining device verifies all, s"] / last["members"]))


if __name__ == "__main__":
    main()
