"""`dfca report`: the tables, pages and figures of runs; `dfca cite`: what to cite."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from dfca.base.errors import ConfigError, unknown
from dfca.cli.arguments import parse_names
from dfca.cli.console import make_console

if TYPE_CHECKING:
    from rich.console import Console

    from dfca.report.formats import TableOptions
    from dfca.report.rows import RunReport
    from dfca.runs.store.reading import Run

commands = typer.Typer()


@commands.command()
def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN", help="Run folders, or files that [cyan]--save[/cyan] wrote.")
    ],
    format_: Annotated[
        str, typer.Option("--format", metavar="NAME", help="The tables as terminal, markdown, csv or latex.")
    ] = "terminal",
    save: Annotated[
        Path | None, typer.Option(metavar="FILE.json", help="Write the results into one small file to keep.")
    ] = None,
    together: Annotated[
        bool,
        typer.Option(
            "--together", help="One table over the trials of all these folders; refused where configs differ."
        ),
    ] = False,
    columns: Annotated[
        str | None, typer.Option(metavar="NAMES", help="Only these columns: accuracy,right-cluster,MB-per-client.")
    ] = None,
    caption: Annotated[
        str, typer.Option(metavar="TEXT", help="Of LaTeX tables, which become floats of one column, or of two.")
    ] = "",
    names: Annotated[
        str, typer.Option(metavar="own|paper", help="paper: DFCA-GI and FedAvg, as papers write.")
    ] = "own",
    figures: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write the figures as PNG, SVG and PDF into this folder.")
    ] = None,
    figure_width: Annotated[
        float | None,
        typer.Option(metavar="INCHES", help="Their width in print: 3.4 for one column of two, 7 for both."),
    ] = None,
    font_size: Annotated[
        float | None, typer.Option(metavar="POINTS", help="The size of their letters in print.")
    ] = None,
) -> None:
    """Print the tables of each run, beside the paper's numbers, and (re)write its report.html; also while it runs.

    [bold]Examples[/bold]

      dfca report runs/quickstart

      dfca report runs/quickstart --format latex --columns accuracy,right-cluster --caption "Ours" --names paper

      dfca report runs/quickstart --save results/quickstart.json

      dfca report runs/quickstart --figures figures --figure-width 3.4 --font-size 8
    """
    from dfca.report.formats import FORMATS, TableOptions
    from dfca.report.results import save_results
    from dfca.report.rows import RunReport
    from dfca.runs.reuse import join
    from dfca.runs.store.reading import understood

    if format_ not in ("terminal", *FORMATS):
        raise unknown("format", format_, ("terminal", *FORMATS))
    if names not in ("own", "paper"):
        raise unknown("value of --names", names, ("own", "paper"))
    if caption and format_ != "latex":
        raise ConfigError(f"--caption is of LaTeX tables, got --format {format_}; add --format latex")
    if figures is None and (figure_width is not None or font_size is not None):
        raise ConfigError("--figure-width and --font-size need --figures DIR, where the figures go")
    _check(runs, save, together, figures)
    options = TableOptions(parse_names(columns) or (), caption)
    console = make_console()
    loaded = iter([join(list(map(_load, runs)))]) if together else map(_load, runs)
    for path, run in zip(runs, loaded, strict=False):
        with understood(path):
            results = RunReport.of(run)
            if save is not None:
                save_results(results, save)
            if figures is not None:
                _save_figures(run, figures, figure_width, font_size, names == "paper")
            shown = results.with_paper_names() if names == "paper" else results
        if format_ != "terminal":
            with understood(path):
                text = FORMATS[format_](shown, options)
            print(text, end="" if together or path == runs[-1] else "\n")
            if path.is_dir() and (missing := _unfinished(run)):
                print(missing, file=sys.stderr)
            continue
        name, places = escape(run.experiment or path.name), runs if together else [path]
        console.print(f"[bold]{name}[/bold] [dim]{escape(' '.join(map(str, places)))}[/dim]")
        print_report(console, shown, options)
        if path.is_dir() and not together:
            _print_page(console, results)


@commands.command()
def cite() -> None:
    """Print the BibTeX entries of the paper and of this software.

    [bold]Example[/bold]

      dfca cite >> references.bib
    """
    from dfca.report.paper.citation import bibtex

    print(bibtex(), end="")


def print_run(console: "Console", run: "Run") -> None:
    """Print the tables and notes of a run and write its report.html."""
    from dfca.report.rows import RunReport
    from dfca.runs.store.reading import understood

    with understood(run.folder):
        report = RunReport.of(run)
    print_report(console, report)
    _print_page(console, report)


def print_report(console: "Console", report: "RunReport", options: "TableOptions | None" = None) -> None:
    """Print the tables and notes of a report."""
    from dfca.report.formats import PLAIN, all_notes, all_tables, narrow_note, terminal_tables
    from dfca.runs.store.reading import understood

    with understood(report.run.folder):
        tables = all_tables(report, console.width, options or PLAIN)
        for table in terminal_tables(tables, console.width):
            console.print()
            console.print(table)
        lines = [*all_notes(report, tables), *filter(None, [narrow_note(tables)])]
        console.print("\n".join(lines), style="dim", highlight=False, markup=False)


def _print_page(console: "Console", report: "RunReport") -> None:
    """Write report.html, and print where it is."""
    from dfca.report.page import write_report

    if missing := _unfinished(report.run):
        console.print(missing, highlight=False)
    console.print(f"\nreport: {write_report(report)}", highlight=False, soft_wrap=True)


def _unfinished(run: "Run") -> str:
    """Say how much of a run is missing; nothing of a finished one."""
    finished, asked = run.trial_counts
    if run.swept or finished >= asked:  # the notes of a sweep say it
        return ""
    return f"not finished: {finished} of {asked} runs are done; the same `dfca run` command continues"


def _check(runs: Sequence[Path], save: Path | None, together: bool, figures: Path | None) -> None:
    if save is not None and runs[0].is_file():
        raise ConfigError("--save takes a run folder, and this is a file of results already")
    if (save is not None or figures is not None) and len(runs) > 1 and not together:
        raise ConfigError("--save and --figures take one run; call it once for each, or --together for all")
    if together and any(path.is_file() for path in runs):
        raise ConfigError("--together takes run folders, not files of results")


def _load(path: Path) -> "Run":
    """Load a run folder, or a file of results."""
    from dfca.report.results import stored_run
    from dfca.runs.store.reading import load_run

    return stored_run(path) if path.is_file() else load_run(path)


def _save_figures(run: "Run", folder: Path, width: float | None, font: float | None, paper_names: bool) -> None:
    from dfca.report.drawing.svg import FONT, WIDTH, FigureSize
    from dfca.report.paper.figures import save_figures

    given = FigureSize(WIDTH if width is None else width, FONT if font is None else font)
    size = None if width is None and font is None else given
    written = save_figures(run, folder, size, paper_names)
    print(f"{len(written)} files in {folder}", file=sys.stderr)
