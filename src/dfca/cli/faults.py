"""`dfca faults`: look for a world of faults in which a peer or node is not safe, or not alive afterwards."""

import secrets
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dfca.base.errors import ConfigError, RunError, unknown
from dfca.cli.console import make_console
from dfca.report.wording import count

if TYPE_CHECKING:
    from dfca.faults.node.world import NodeWorld
    from dfca.faults.world import FaultWorld

    AnyWorld = FaultWorld | NodeWorld

commands = typer.Typer()
LAYERS = ("peer", "node")
SHRINK_S = 60.0  # time spent on making a failing world smaller


@commands.command()
def faults(
    worlds: Annotated[int, typer.Option(metavar="N", min=1, help="How many worlds.")] = 200,
    seed: Annotated[int, typer.Option(metavar="S", help="Other worlds for every seed.")] = 0,
    fresh: Annotated[bool, typer.Option("--fresh", help="Draw a seed and print it, instead of --seed.")] = False,
    harsh: Annotated[
        bool, typer.Option("--harsh", help="More peers, longer delays and faults, and more kinds of them.")
    ] = False,
    minutes: Annotated[
        float | None, typer.Option(metavar="M", min=0, help="Begin no new world after M minutes.")
    ] = None,
    first: Annotated[int, typer.Option(metavar="K", min=0, help="The number of the first world.")] = 0,
    layer: Annotated[
        str, typer.Option(metavar="NAME", help="peer: the protocol; node: whole nodes with disk and network.")
    ] = "peer",
    workers: Annotated[int, typer.Option(metavar="W", min=1, help="Processes.")] = 1,
    world: Annotated[
        str | None, typer.Option(metavar="LINE", help="Repeat the world of this line instead, as printed before.")
    ] = None,
) -> None:
    """Run peers through random worlds: loss, partitions, crashes, late joiners, clocks that jump, garbage and lies.

    In every world all models must stay whole. Once the faults stop, the peers of a connected part must agree on their
    models in the time that the faults of this world allow, stay so, and fold the models of every neighbour. A world
    that fails is made smaller and printed as one line that repeats it.

    [bold]Examples[/bold]

      dfca faults --worlds 10000 --workers 2

      dfca faults --harsh --fresh --minutes 10

      dfca faults --layer node --worlds 1000 --workers 2

      dfca faults --first 231 --worlds 1

      dfca faults --world 'FaultWorld(231, peers=2, edges=((0, 1),), garbage=(1,))'
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from dfca.faults.world import describe

    if layer not in LAYERS:
        raise unknown("layer", layer, LAYERS)
    if layer == "node" and harsh:
        raise ConfigError("--harsh is for --layer peer; leave it out")
    if world is not None and (first or worlds != 200 or harsh or fresh):
        raise ConfigError("--world repeats one world; leave out --first, --worlds, --harsh and --fresh")
    if fresh and seed:
        raise ConfigError(f"--fresh draws the seed; leave out --seed {seed}")
    seed = secrets.randbelow(10**9) if fresh else seed
    console = make_console()
    if fresh:
        console.print(f"seed {seed}", highlight=False)
    numbers = range(first, first + worlds)
    drawn = [_read(world, layer)] if world else [_draw(number, seed, harsh, layer) for number in numbers]
    columns = (TextColumn("worlds"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    done, failed = 0, 0
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("worlds", total=len(drawn))
        for smallest, problem in _check_all(drawn, workers, minutes):
            done += 1
            progress.advance(task)
            if problem:
                failed += 1
                console.print(f"{problem}\n  {describe(smallest)}", highlight=False, markup=False, soft_wrap=True)
    if failed:
        raise RunError(f"{failed} of {count(done, 'world')} failed")
    console.print(f"{count(done, 'world')}, none failed", highlight=False)


def _draw(number: int, seed: int, harsh: bool, layer: str) -> "AnyWorld":
    from dfca.faults.node.world import draw_node_world
    from dfca.faults.world import draw_world

    return draw_node_world(number, seed) if layer == "node" else draw_world(number, seed, harsh)


def _read(line: str, layer: str) -> "AnyWorld":
    """Read a world; its line says of which layer it is."""
    from dfca.faults.node.world import read_node_world
    from dfca.faults.world import read_world

    is_node = layer == "node" or line.strip().startswith("NodeWorld(")
    return read_node_world(line) if is_node else read_world(line)


def _check_all(
    worlds: list["AnyWorld"], workers: int, minutes: float | None
) -> Iterator[tuple["AnyWorld", str | None]]:
    """Check worlds one after the other, or in several processes, until the time is over."""
    import time
    from multiprocessing import get_context

    end = None if minutes is None else time.monotonic() + 60 * minutes
    jobs = [(world, end) for world in worlds]
    if workers == 1:
        results = map(_check, jobs)
        yield from (result for result in results if result is not None)
        return
    with get_context("spawn").Pool(workers) as pool:
        yield from (result for result in pool.imap_unordered(_check, jobs, chunksize=4) if result is not None)


def _check(job: tuple["AnyWorld", float | None]) -> tuple["AnyWorld", str | None] | None:
    """Check a world, and make it smaller if it fails; None: too late to begin."""
    import time

    import torch

    from dfca.faults.check import check_world, shrink
    from dfca.faults.node.run import check_node_world, shrink_node_world
    from dfca.faults.node.world import NodeWorld

    torch.set_num_threads(1)  # the tensors are tiny
    world, end = job
    if end is not None and time.monotonic() >= end:
        return None
    check: Any
    smaller: Any
    check, smaller = (check_node_world, shrink_node_world) if isinstance(world, NodeWorld) else (check_world, shrink)
    problem = check(world)
    smallest = world if problem is None else smaller(world, SHRINK_S)
    return smallest, problem and (check(smallest) or problem)
