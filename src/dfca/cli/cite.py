"""`dfca cite`: what to cite."""

import typer

commands = typer.Typer()


@commands.command()
def cite() -> None:
    """Print the BibTeX entries of the paper and of this software.

    [bold]Example[/bold]

      dfca cite >> references.bib
    """
    from dfca.report.paper.citation import bibtex

    print(bibtex(), end="")
