"""Several results side by side: algorithms with mean and spread over seeds, and their differences, paired by seed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from dfca.api.result import Result
from dfca.api.showing import Shown, as_html, as_text, printed, run_of
from dfca.base.errors import ConfigError
from dfca.base.paired import Compared
from dfca.report.rows import RunReport
from dfca.report.tables import notes

if TYPE_CHECKING:
    import pandas as pd


class Comparison(Shown):
    """The results of several algorithms and seeds, in their order.

    `comparison["ifca"]` is the result of the first seed, `comparison["ifca", 1]` that of seed 1.

    Attributes:
        results: The results.

    Example:
        >>> import dfca
        >>> split = dfca.make_split(dfca.DataOptions(samples_per_client=20), clients=6, clusters=2, seed=0)
        >>> comparison = dfca.simulate(
        ...     lambda: dfca.mlp((1, 8, 8), 10, 8), split, ["ifca", "local"], seed=[0, 1], rounds=2
        ... )
        >>> comparison.algorithms, comparison.seeds, comparison["local", 1].seed
        (['ifca', 'local'], [0, 1], 1)
    """

    def __init__(self, results: Sequence[Result]) -> None:
        self.results = tuple(results)

    @property
    def algorithms(self) -> list[str]:
        """The names of the algorithms."""
        return list(dict.fromkeys(result.algorithm for result in self.results))

    @property
    def seeds(self) -> list[int]:
        """The seeds."""
        return list(dict.fromkeys(result.seed for result in self.results))

    def __getitem__(self, key: str | tuple[str, int]) -> Result:
        name, seed = (key, self.seeds[0]) if isinstance(key, str) else key
        for result in self.results:
            if (result.algorithm, result.seed) == (name, seed):
                return result
        raise ConfigError(
            f"no result of {name!r} with seed {seed}; there are {', '.join(self.algorithms)} with seeds "
            f"{', '.join(map(str, self.seeds))}"
        )

    def __iter__(self) -> Iterator[Result]:
        return iter(self.results)

    def __len__(self) -> int:
        return len(self.results)

    @property
    def metrics(self) -> pd.DataFrame:
        """All rows of all results, with the columns algorithm and seed first."""
        import pandas as pd

        frames = []
        for result in self.results:
            frame = result.metrics.copy()
            frame.insert(0, "seed", result.seed)
            frame.insert(0, "algorithm", result.algorithm)
            frames.append(frame)
        return pd.concat(frames, ignore_index=True)

    @property
    def reference(self) -> str | None:
        """What the others are compared with: dfca-auto where it is there, else the best; None for one algorithm."""
        return self._report.rows[0].reference

    @property
    def differences(self) -> dict[str, Compared]:
        """How each algorithm differs from `reference`: paired by seed, with an interval for all of them together."""
        return {row.algorithm: row.compared for row in self._report.rows if row.compared is not None}

    @property
    def _results(self) -> Sequence[Result]:
        return self.results

    @cached_property
    def _report(self) -> RunReport:
        return RunReport.of(run_of(self.results))

    def to_pandas(self) -> pd.DataFrame:
        """Make the comparison: a row per algorithm, the mean and sample standard deviation over seeds.

        Returns:
            A DataFrame whose columns are pairs, ("accuracy", "mean") and ("accuracy", "std"), so that
            `comparison.to_pandas()["accuracy"]` is a table too. ("difference", ...) is the difference of the score to
            `reference` ("to"), paired by seed: "mean", the interval "low" to "high" (95 % for all rows together), its
            own "p", the number of "seeds", and the "verdict": whether the interval contains 0.
        """
        import pandas as pd

        last = self.metrics.groupby(["algorithm", "seed"], sort=False).tail(1)
        names = [name for name in self._measures() if name in last]
        last = last.assign(megabytes_per_client=[result.megabytes_per_client for result in self.results])
        made = last.groupby("algorithm", sort=False)[[*names, "megabytes_per_client"]].agg(["mean", "std"])
        reference, differences = self.reference, self.differences
        if not differences:
            return made
        rows = {name: _columns(reference, differences.get(name)) for name in made.index}
        return pd.concat([made, pd.DataFrame.from_dict(rows, orient="index")], axis=1)

    def __repr__(self) -> str:
        tables = printed(self._report)
        return "\n".join([*map(as_text, tables), *notes(self._report, tables), *self._interrupted()])

    def _repr_html_(self) -> str:
        seeds, tables = len(self.seeds), printed(self._report)
        title = f"{len(self.algorithms)} algorithms, {seeds} seed{'' if seeds == 1 else 's'}"
        return as_html(title, tables, [*notes(self._report, tables), *self._interrupted()])

    def _interrupted(self) -> list[str]:
        """Say what an interrupted call lacks."""
        there = {(result.algorithm, result.seed) for result in self.results}
        ended = [
            f"{result.algorithm}, seed {result.seed}, ends after round {result.evaluations[-1].round}"
            for result in self.results
            if result.partial
        ]
        absent = [
            f"no result of {name}, seed {seed}"
            for seed in self.seeds
            for name in self.algorithms
            if (name, seed) not in there
        ]
        return [f"interrupted: {'; '.join([*ended, *absent])}"] if ended or absent else []

    def _measures(self) -> list[str]:
        key = self.results[0].evaluations.metric
        return [key, f"all_models_{key}", "cluster_accuracy", "live_clusters", "bytes_sent"]


def _columns(reference: str | None, compared: Compared | None) -> dict[tuple[str, str], Any]:
    mean, half, p, seeds = (None,) * 4 if compared is None else compared.difference
    low, high = (None, None) if mean is None or half is None else (mean - half, mean + half)
    values = {"to": reference, "mean": mean, "low": low, "high": high, "p": p, "seeds": seeds}
    values["verdict"] = None if compared is None else compared.verdict
    return {("difference", name): value for name, value in values.items()}
