"""The measured table of docs/robustness.md, from the results of the preset `liars`; `make docs` calls it."""

from __future__ import annotations

from statistics import mean

from trials import Runs, load, of
from writing import differences, spread, table

GUARDS = ("none", "clip")
KINDS = ("flip-signs", "noise", "swap-labels", "stale", "self-vote")
SHARES = (0.1, 0.2)
LOSSES = {guard: f"`{guard}` minus no liars" for guard in ("none", "clip")}
BEARABLE = 3.0
"""Points that the honest may lose."""


def measured() -> str:
    """Write the accuracy of the honest, by algorithm, lie and guard, and what they lose beside a run without liars."""
    runs = load("liars")
    if not runs:
        return "not measured yet"
    rows, worst, asked = [], [], {}
    for algorithm in dict.fromkeys(run["algorithm"] for run in runs):
        mine = of(runs, algorithm=algorithm)
        honest = [spread(_accuracies(of(mine, liars__share=0.0, mixing__robust=guard))) for guard in GUARDS]
        rows.append([f"`{algorithm}`", "nobody", "0 %", *honest])
        plain = of(mine, liars__share=0.0, mixing__robust="none")
        for kind in KINDS:
            for share in SHARES:
                some = of(mine, liars__share=share, liars__kind=kind)
                cells = [spread(_accuracies(of(some, mixing__robust=guard))) for guard in GUARDS]
                rows.append([f"`{algorithm}`", kind, f"{100 * share:.0f} %", *cells])
                for guard in LOSSES:
                    asked[" ".join(rows[-1][:3]), LOSSES[guard]] = of(some, mixing__robust=guard), plain, "accuracy"
                if share == max(SHARES):
                    clip, none = (mean(_lost(mine, some, guard)) for guard in ("clip", "none"))
                    worst.append((clip, none, algorithm, kind))
    told, line = differences(asked)
    lines = [[*row, *(told.get((" ".join(row[:3]), column), "") for column in LOSSES.values())] for row in rows]
    head = ["algorithm", "lie", "liars", *(f"`{guard}`" for guard in GUARDS), *LOSSES.values()]
    return _verdict(worst) + "\n\n" + table(head, lines) + "\n\n" + line


def _verdict(worst: list[tuple[float, float, str, str]]) -> str:
    clip, none, algorithm, kind = max(worst)
    kept = sum(lost <= BEARABLE for lost, *_ in worst)
    _, most, other, lie = max(worst, key=lambda row: row[1])
    return (
        f"With 20 % liars and `clip` the honest lose at most {BEARABLE:g} points in {kept} of {len(worst)} rows; the "
        f"worst is `{algorithm}`, {kind}: {clip:.1f} points (without a guard {none:.1f}). Without a guard the worst is "
        f"`{other}`, {lie}: {most:.1f} points."
    )


def _lost(runs: Runs, lied_to: Runs, guard: str) -> list[float]:
    """Pair by seed: what a seed loses beside its run without liars and without a guard, in points."""
    plain = {run["seed"]: run["accuracy"] for run in of(runs, liars__share=0.0, mixing__robust="none")}
    return [100 * (plain[run["seed"]] - run["accuracy"]) for run in of(lied_to, mixing__robust=guard)]


def _accuracies(runs: Runs) -> list[float]:
    return [run["accuracy"] for run in runs]
