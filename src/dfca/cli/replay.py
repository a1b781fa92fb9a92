"""`dfca replay`: carry out the trace of a run again and compare."""

from pathlib import Path
from typing import Annotated

import typer

from dfca.base.errors import RunError
from dfca.cli.arguments import Algorithms, Seeds, parse_names, parse_seeds
from dfca.cli.console import make_console
from dfca.report.wording import count

commands = typer.Typer()


@commands.command()
def replay(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder with traces.")],
    algorithms: Algorithms = None,
    seeds: Seeds = None,
) -> None:
    """Replay what a run in virtual time recorded (world.trace = true) and compare every number with the run's.

    Nothing is drawn and no clock runs: the records are carried out one by one.

    [bold]Example[/bold]

      dfca run stragglers --seeds 1 --set world.trace=true --out runs/traced

      dfca replay runs/traced
    """
    from dfca.base.renamed import refuse_earlier
    from dfca.runs.replay import replay_run

    names, numbers = parse_names(algorithms), parse_seeds(seeds)
    for name in names or ():
        refuse_earlier(name)
    numbers = list(range(numbers)) if isinstance(numbers, int) else numbers
    console = make_console()
    different, total = [], 0
    for result in replay_run(
        run, lambda trial: (not names or trial.algorithm in names) and (numbers is None or trial.seed in numbers)
    ):
        same = f"identical ({result.records:,} records, {count(result.rows, 'row')} of metrics)"
        console.print(f"{result.trial}: {result.difference or same}", highlight=False, markup=False, soft_wrap=True)
        different += [result] if result.difference else []
        total += 1
    if different:
        raise RunError(
            f"{len(different)} of {count(total, 'trial')} differ from their trace, first {different[0].trial}"
        )
    console.print(f"{count(total, 'replay')}, bit-identical to the run", highlight=False)
