"""`dfca watch`: a live page of a run, a sweep, a swarm or nodes."""

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dfca.base.errors import ConfigError
from dfca.cli.console import make_console

if TYPE_CHECKING:
    from dfca.watch.run_source import Source

commands = typer.Typer()


@commands.command()
def watch(
    run: Annotated[Path | None, typer.Argument(metavar="RUN", help="A run folder; of a sweep or a swarm too.")] = None,
    node: Annotated[
        list[Path] | None, typer.Option(metavar="FOLDER", help="The folder of a node, instead of RUN; repeatable.")
    ] = None,
    port: Annotated[
        int, typer.Option(metavar="P", min=0, max=65535, help="The port on 127.0.0.1; 0: any that is free.")
    ] = 0,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the page in a browser.")] = True,
    terminal: Annotated[bool, typer.Option("--terminal", help="A live table here instead of a page.")] = False,
) -> None:
    """Watch a running or finished run on a local page, which needs no network.

    It shows the graph coloured by cluster, switches as they happen, accuracies, traffic, staleness, who is away, and an
    alarm where a cluster is lost. It only reads: a run neither waits for it nor notices it.

    [bold]Examples[/bold]

      dfca watch runs/quickstart

      dfca watch runs/quickstart --no-browser --port 8765

      dfca watch runs/quickstart --terminal

      dfca watch --node my-node
    """
    source = _source(run, node or [])
    console = make_console()
    if sys.stdout.isatty():
        with suppress(OSError, AttributeError):
            os.nice(10)  # the run has priority
    if terminal:
        from dfca.watch.terminal import show

        with suppress(KeyboardInterrupt):
            show(source, console, once=not console.is_terminal)
        return
    _serve(source, port, browser)


def _source(run: Path | None, nodes: list[Path]) -> "Source":
    from dfca.watch.node_source import NodesPage
    from dfca.watch.run_source import RunSource

    if (run is None) == (not nodes):
        raise ConfigError("give one run folder, or --node with the folder of a node: dfca watch RUN")
    if run is not None and not (run / "node.toml").exists():
        return RunSource(run)
    nodes = nodes if run is None else [run]
    for folder in nodes:
        if not (folder / "node.toml").exists():
            raise ConfigError(f"{folder} is not the folder of a node (it has no node.toml); `dfca node init` makes one")
    return NodesPage(nodes)


def _serve(source: "Source", port: int, browser: bool) -> None:
    """Serve the page until Ctrl-C."""
    import webbrowser

    from dfca.watch.hub import Hub
    from dfca.watch.server import PageServer

    with PageServer(Hub(source), port) as server:
        print(f"watching at {server.url} (Ctrl-C ends it; the run continues)", flush=True)
        if browser and not webbrowser.open(server.url):
            print("no browser was found: open the address, or use --terminal", file=sys.stderr)
        with suppress(KeyboardInterrupt):
            server.serve_forever(poll_interval=0.5)
