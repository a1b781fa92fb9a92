"""Sections of the page that show evidence beyond accuracy: samples, confusion, the clusters' graphs, the lemmas."""

from __future__ import annotations

from dfca.runs.reading import Run


def samples(run: Run) -> str:
    """Show samples of each group."""
    from dfca.report.paper.figures import sample_drawing

    drawing = sample_drawing(run)
    return "" if drawing is None else f"<h2>What the clients hold</h2>{_shown(drawing)}"


def confusions(run: Run, heading: str = "<h2>Found clusters and true groups</h2>") -> str:
    """Show who ended where."""
    from dfca.report.paper.figures import confusion_drawing

    drawing = confusion_drawing(run)
    return "" if drawing is None else heading + _shown(drawing)


def graph_section(run: Run) -> str:
    """Show where the graphs of the clusters fall apart."""
    from dfca.report.paper.figures import graph_drawing

    drawing = graph_drawing(run.summary)
    if drawing is None:
        return ""
    return (
        '<h2>Where clusters fall apart</h2><p class="soft">A client hands on the model that it trained, so a model '
        "travels only among the clients of its cluster and to their neighbours. Where these are not connected among "
        "themselves, parts of one cluster train apart, however well the whole graph is connected.</p>"
        f'<div class="pair">{_shown(drawing)}</div>'
    )


def theory_section(run: Run) -> str:
    """Show the lemmas against the measurements."""
    from dfca.report.paper.figures import theory_drawings

    shown = [_shown(drawing) for drawing in theory_drawings(run.summary)]
    return f'<h2>Theory and measurement</h2><div class="pair">{"".join(shown)}</div>' if shown else ""


def _shown(drawing: object) -> str:
    from dfca.report import plots
    from dfca.report.page import figure
    from dfca.report.paper.figures import Drawing

    assert isinstance(drawing, Drawing)
    width = drawing.figure.get_figwidth()
    picture = figure(plots.to_svg(drawing.figure), drawing.caption)
    return picture.replace("<svg", f'<svg style="max-width:{5.2 * width:.0f}rem"', 1)
