"""Options that several commands have, and the parsers of their values."""

from typing import Annotated, Literal

import typer

from dfca.base.errors import ConfigError

Algorithms = Annotated[
    str | None,
    typer.Option(
        metavar="A,B", help="Only these, such as [cyan]dfca-gi,ifca[/cyan]; your own: [cyan]my_module:mine[/cyan]."
    ),
]
Seeds = Annotated[
    str | None, typer.Option(metavar="N", help="How many seeds ([cyan]5[/cyan]), or which ([cyan]3,4[/cyan]).")
]
Threads = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        help="CPU threads to use.",
        show_default="as many as are free and useful, chosen once per run",
    ),
]


def parse_names(text: str | None) -> list[str] | None:
    """Parse a list of names; None where the option was not given."""
    return None if text is None else [name.strip() for name in text.split(",") if name.strip()]


def parse_seeds(text: str | None) -> int | list[int] | None:
    """Parse a number of seeds, or a list of seeds; None where the option was not given.

    Raises ConfigError for anything else.
    """
    if text is None:
        return None
    try:
        numbers = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise ConfigError(f'--seeds must be a number or a list such as 3,4, got "{text}"') from None
    return numbers if "," in text else numbers[0] if numbers else None


def parse_workers(text: str) -> int | Literal["auto"]:
    """Parse a number of worker processes, or "auto". Raises ConfigError for anything else."""
    if text == "auto":
        return "auto"
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f'--workers must be >= 1 or "auto", got "{text}"')
    return int(text)


def use_threads(threads: int | None) -> None:
    """Set the number of torch's threads: as given, else this rank's share of the cores; else a run chooses.

    Raises ConfigError for more threads than cores.
    """
    import os

    from dfca.runs.threads import ask_for_threads
    from dfca.sim.rounds.ranks import threads_of_rank

    cores = os.cpu_count() or 1
    if threads is not None and threads > cores:
        raise ConfigError(f"--threads must be <= {cores}, the cores of this machine, got {threads}")
    threads = threads or threads_of_rank()
    if threads is not None:
        ask_for_threads(threads)
