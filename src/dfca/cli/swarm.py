"""`dfca swarm`: an experiment on real nodes of this machine."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dfca.base.errors import ConfigError
from dfca.cli.arguments import parse_names
from dfca.cli.console import make_console
from dfca.cli.report import print_run

if TYPE_CHECKING:
    from rich.table import Table

    from dfca.swarm.run import Progress

commands = typer.Typer()
ROWS = 24  # nodes in the live table
STATES = {"done": "green", "training": "cyan", "waiting": "cyan", "down": "red", "starting": "yellow"}


@commands.command()
def swarm(
    experiment: Annotated[str, typer.Argument(metavar="EXPERIMENT", help="A preset or the path of a TOML file.")],
    nodes: Annotated[int, typer.Option(metavar="N", min=2, help="How many nodes.")] = 8,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A new folder.", show_default="runs/swarm-NAME")
    ] = None,
    algorithm: Annotated[str | None, typer.Option(metavar="NAME", help="Which one.", show_default="the first")] = None,
    seed: Annotated[int | None, typer.Option(metavar="S", min=0, help="Which one.", show_default="the first")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change one key.")] = None,
    transport: Annotated[
        str, typer.Option(metavar="grpc|memory", help="Processes with mutual TLS, or tasks of one process.")
    ] = "grpc",
    kill_every: Annotated[float | None, typer.Option(metavar="S", help="Kill -9 a node every S seconds.")] = None,
    cut: Annotated[
        float | None, typer.Option(metavar="S", help="Cut half of the links every S seconds, for half the time.")
    ] = None,
    limit: Annotated[float | None, typer.Option(metavar="S", help="Give up after S seconds.")] = None,
) -> None:
    """Run an experiment on real nodes: N processes on this machine, paired by invites, each with its client's samples.

    The nodes run until all have done their rounds. Killed nodes are started again from their disk. The run folder has
    what a simulation's has, so that both can be compared and reported; DIR/nodes/ holds the folder of each node.

    [bold]Examples[/bold]

      dfca swarm quickstart --nodes 16

      dfca swarm quickstart --nodes 16 --kill-every 5 --cut 20 --out runs/rough
    """
    from rich.live import Live

    from dfca.experiment.load import load_experiment

    for name, value in (("--kill-every", kill_every), ("--cut", cut), ("--limit", limit)):
        if value is not None and not value > 0:
            raise ConfigError(f"{name} must be > 0 seconds, got {value:g}")
    if transport not in ("grpc", "memory"):
        raise ConfigError(f'--transport must be grpc or memory, got "{transport}"')
    chosen = load_experiment(
        experiment,
        None,
        [f"clients={nodes}", *(set_ or ())],
        parse_names(algorithm),
        None if seed is None else [seed],
    )
    # After the experiment is checked: these load torch.
    from dfca.runs.store.reading import load_run
    from dfca.swarm.run import FaultOptions, SwarmOptions, run_swarm

    faults = FaultOptions(kill_every, cut, chosen.config.seeds[0])
    options = SwarmOptions(nodes, transport, faults, limit)  # type: ignore[arg-type]
    folder = out or Path("runs") / f"swarm-{chosen.name}"
    console = make_console()
    console.print(f"{nodes} nodes, {chosen.config.algorithms[0]}, {chosen.config.rounds} rounds, in {folder}")
    with Live(console=console, refresh_per_second=2, transient=True) as live:
        run_swarm(chosen, folder, options, show=lambda progress: live.update(make_table(progress)))
    print_run(console, load_run(folder))


def make_table(progress: "Progress") -> "Table":
    """Make the live table: one row per node."""
    from rich.table import Table

    from dfca.node.operate.status import format_traffic

    row = progress.row or {}
    parts = [f"{progress.elapsed_s:.0f} s"]
    if row:
        parts += [f"accuracy {100 * row['accuracy']:.1f} %", f"{row['live_clusters']} clusters in use"]
    parts += [f"{progress.kills} kills" if progress.kills else "", f"{progress.cuts} cuts" if progress.cuts else ""]
    table = Table(title=", ".join(part for part in parts if part), title_justify="left", box=None)
    for name in ("node", "state", "round", "models", "cluster", "held-out %", "links", "sent", "lives", "last error"):
        table.add_column(name, justify="left" if name in ("node", "state", "last error") else "right")
    for i, node in enumerate(progress.nodes[:ROWS]):
        accuracy = "" if node.accuracy is None else f"{100 * node.accuracy:.1f}"
        cluster = "" if node.cluster is None else str(node.cluster)
        colour = STATES.get(node.state, "yellow")
        state = f"[{colour}]{node.state}[/{colour}]"
        table.add_row(
            *(f"{i:02d}", state, f"{node.round}/{progress.rounds}", str(node.clusters), cluster, accuracy),
            *(str(node.links), format_traffic(node.sent_bytes), str(node.lives), node.error[:60]),
        )
    if len(progress.nodes) > ROWS:
        table.caption = f"and {len(progress.nodes) - ROWS} more"
    return table
