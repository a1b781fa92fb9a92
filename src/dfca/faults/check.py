"""Check a world, and take away what its failure does not need."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any, TypeVar

import torch

from dfca.core.exchange import Rules
from dfca.faults.run import FaultRun
from dfca.faults.tiny import SIZE, Violation
from dfca.faults.world import FaultWorld, without_last
from dfca.peer.machine import Memory, drive
from dfca.peer.peer import Peer

World = TypeVar("World")


def check_world(world: FaultWorld) -> str | None:
    """Carry a world out; return what is wrong, None if nothing is."""
    watched = world.number % world.peers if world.number % 5 == 0 else None
    run = FaultRun(world, watched)
    try:
        run.run()
        if watched is not None and not run.server:
            replay(run, watched)
    except Violation as violation:
        return str(violation)
    return None


def replay(run: FaultRun, i: int) -> None:
    """Drive the inputs of a peer's last life again: the same bits."""
    peer, (_, options, life, saved) = run.peers[i], run.inputs[0]
    bare = Rules(**{field.name: getattr(options.rules, field.name) for field in fields(Rules)})
    twin = Peer(replace(options, rules=bare), Memory(SIZE, torch.float64), life, saved)
    try:
        list(drive(twin, [(now, what, *arguments) for what, arguments, now in run.inputs[1:]]))
    except IndexError:
        raise Violation(f"the replay of peer {i} asks for less work") from None
    same = peer.bank is not None and twin.bank is not None and torch.equal(peer.bank, twin.bank)
    if not same or peer.round != twin.round or getattr(peer, "lineage", None) != twin.lineage:
        raise Violation(f"the replay of peer {i} gives other models")


_KEPT = ("number", "algorithm", "aggregation", "clusters", "groups", "merges")
"""What makes another world of it; peers and edges go together."""


def shrink(world: FaultWorld, limit_s: float = 60.0) -> FaultWorld:
    """Take away what the failure of a world does not need, for as long as there is something, and time."""
    return shrink_by(world, check_world, _smaller, limit_s)


def shrink_by(
    world: World, check: Callable[[World], str | None], smaller_ones: Callable[[World], Iterator[World]], limit_s: float
) -> World:
    """Take the first smaller world that fails too, again and again."""
    end, smaller = time.monotonic() + limit_s, True
    while smaller:
        smaller = False
        for less in smaller_ones(world):
            if time.monotonic() > end:
                return world
            if check(less):
                world, smaller = less, True
                break
    return world


def _smaller(world: FaultWorld) -> Iterator[FaultWorld]:
    if world.peers > 2 and world.algorithm != "ifca":
        yield without_last(world, "peers")
    yield from simpler(world, (*_KEPT, "peers", "edges"))


def simpler(world: World, kept: tuple[str, ...]) -> Iterator[World]:
    """List worlds of which one field has its default, or one entry less."""
    bare = type(world)(world.number)  # type: ignore[call-arg, attr-defined]
    for name in (field.name for field in fields(world)):  # type: ignore[arg-type]
        value, zero = getattr(world, name), getattr(bare, name)
        if name in kept or value == zero:
            continue
        yield replace(world, **{name: zero})  # type: ignore[type-var]
        if isinstance(value, tuple) and len(value) > 1:
            fewer: Iterator[Any] = (value[:at] + value[at + 1 :] for at in range(len(value)))
            yield from (replace(world, **{name: less}) for less in fewer)  # type: ignore[type-var]
