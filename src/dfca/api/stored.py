"""Read a run folder from Python: `load_run` gives its config, metrics, assignments and models."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor, nn

from dfca import algorithms
from dfca.api.arguments import check_client
from dfca.api.exporting import Exportable, Format, check_format, holders
from dfca.api.showing import as_html, as_text, printed
from dfca.base.errors import ConfigError, DfcaError, RunError, unknown
from dfca.base.imports import look_in
from dfca.base.renamed import refuse_earlier
from dfca.core.learning.params import FlatModel, load_constants_
from dfca.data.registry import SOURCES
from dfca.experiment.sweep import label_of
from dfca.model_options import ModelOptions, make_factory
from dfca.report.rows import RunReport
from dfca.report.tables import TextTable
from dfca.runs.store.models import ARCHITECTURE, FOLDER, StoredModels
from dfca.runs.store.reading import Run
from dfca.runs.store.reading import load_run as read_run
from dfca.runs.store.rows import TrialRow
from dfca.sim.metrics_table import EvaluationRow, JsonObject, PointValues, StoredRow, flat_numbers

if TYPE_CHECKING:
    import pandas as pd


def load_run(folder: str | Path) -> StoredRun:
    """Read a run folder of `dfca run` or `dfca swarm`, finished or not.

    Args:
        folder: The run folder.

    Returns:
        Its config, metrics and models.

    Raises:
        RunError: If it is not a run folder, or a file in it is missing or damaged.

    Example:
        >>> import dfca
        >>> dfca.load_run("runs/quickstart").folder.name
        'quickstart'
    """
    return StoredRun(read_run(folder))


@dataclass(frozen=True, repr=False)
class StoredRun:
    """The contents of a run folder. Its tables are pandas DataFrames, made on first use.

    Attributes:
        run: The files as they were read.

    Example:
        >>> import dfca
        >>> run = dfca.load_run("runs/quickstart")
        >>> run.algorithms, list(run.metrics.columns[:3])
        (['dfca-auto', ...], ['algorithm', 'seed', 'round'])
    """

    run: Run

    @property
    def folder(self) -> Path:
        """The path of the folder."""
        return self.run.folder

    @property
    def config(self) -> JsonObject:
        """The complete config; of a sweep its base, with the tables of the sweep."""
        return self.run.config

    @property
    def algorithms(self) -> list[str]:
        """The algorithms that have begun."""
        return self.run.algorithms

    @property
    def seeds(self) -> list[int]:
        """The seeds that were asked for."""
        return self.run.seeds

    @cached_property
    def metrics(self) -> pd.DataFrame:
        """Every evaluated round of every trial: algorithm, seed, the keys that a sweep varies, round, accuracy, ..."""
        return _frame(self.run.metrics)

    @cached_property
    def results(self) -> pd.DataFrame:
        """A row per trial: its last scores, what it sent, how long it took, whether it is finished."""
        return _frame(self.run.trials)

    @cached_property
    def assignments(self) -> pd.DataFrame:
        """The last cluster of each client of each trial, and its true one (None where it is not known)."""
        last = {line.key(swept=True): line for line in self.run.metrics}
        rows = []
        for line in last.values():
            true = self._true_clusters(line)
            head = {"algorithm": line.algorithm, "seed": line.seed, **line.point, "round": line.round}
            for client, cluster in enumerate(line.assignments):
                own = None if true is None else true[client]
                rows.append({**head, "client": client, "cluster": cluster, "true_cluster": own})
        import pandas as pd

        return pd.DataFrame(rows)

    def bank(
        self, client: int, algorithm: str | None = None, seed: int | None = None, point: PointValues | None = None
    ) -> Tensor:
        """Read all models of a client; the run must have been made with --save-models.

        Args:
            client: The number of the client.
            algorithm: Which trial; None: the first.
            seed: Which trial; None: the first.
            point: Which point of a sweep, by the values of its keys; None: the first.

        Returns:
            The models, (k, P).

        Raises:
            RunError: If the run has no models.
            ConfigError: If there is no such client or trial.
        """
        return self._models(self._row(algorithm, seed, point)).bank(client)

    def model(
        self,
        client: int,
        cluster: int | None = None,
        algorithm: str | None = None,
        seed: int | None = None,
        point: PointValues | None = None,
    ) -> nn.Module:
        """Make a module, ready to deploy, from one of a client's models. `model.factory` is imported and runs.

        Args:
            client: The number of the client.
            cluster: Which of its models; None: the one that fits it best.
            algorithm: Which trial; None: the first.
            seed: Which trial; None: the first.
            point: Which point of a sweep, by the values of its keys; None: the first.

        Returns:
            A new module.

        Raises:
            RunError: If the run has no models.
            ConfigError: If there is no such client, cluster or trial.
        """
        row = self._row(algorithm, seed, point)
        stored = self._models(row)
        if cluster is None:
            own = self._last_line(row).assignments
            cluster = int(own[check_client(client, len(own))])
        vector = stored.vector(client, cluster)
        return self._flat(stored).to_module(vector)

    def export(
        self,
        folder: str | Path,
        format: Format = "safetensors",
        client: int | None = None,
        cluster: int | None = None,
        algorithm: str | None = None,
        seed: int | None = None,
        point: PointValues | None = None,
    ) -> list[Path]:
        """Write models as files, as `Result.export` does.

        Args:
            folder: Where the files go.
            format: "safetensors", with the tensor names of the state dict, or "onnx".
            client: Whose model; None: for every cluster in use, the copy of the first client that uses it.
            cluster: Which model of the client; None: the one that fits it best.
            algorithm: Which trial; None: the first.
            seed: Which trial; None: the first.
            point: Which point of a sweep, by the values of its keys; None: the first.

        Returns:
            The paths of the files.

        Raises:
            RunError: If the run has no models.
            ConfigError: If there is no such format, client, cluster or trial.
        """
        check_format(format)
        row = self._row(algorithm, seed, point)
        stored = self._models(row)
        flat, line = self._flat(stored), self._last_line(row)
        own, known = line.plain_scores, self._facts(stored)
        written = []
        for holder, j in holders(line.assignments, client, cluster):
            deployed = line.assignments[holder] == j and len(own) > holder and not _is_personal(row.algorithm)
            facts = {
                "algorithm": row.algorithm,
                "seed": row.seed,
                "cluster": j,
                "client": holder,
                "by_client": client is not None,
                line.metric: own[holder] if deployed else None,
                "round": line.round,
                "classes": int(known["classes"]),
                "model": known["model"],
                "point": label_of(row.point) if row.point else None,
                "experiment": self.run.experiment or None,
            }
            vector = stored.vector(holder, j)
            written.append(Exportable(flat, vector, facts, known["shape"]).write(Path(folder), format))
        return written

    def __repr__(self) -> str:
        finished, asked = self.run.trial_counts
        name = self.run.experiment or self.folder.name
        head = f"StoredRun({name}, {self.folder}: {finished} of {asked} trials finished)"
        return "\n".join([head, *map(as_text, self._tables())])

    def _repr_html_(self) -> str:
        finished, asked = self.run.trial_counts
        title = f"{self.run.experiment or self.folder.name}: {finished} of {asked} trials finished"
        return as_html(title, self._tables(), (str(self.folder),))

    def _tables(self) -> list[TextTable]:
        return printed(RunReport.of(self.run))

    def _row(self, algorithm: str | None, seed: int | None, point: PointValues | None) -> TrialRow:
        """Find the row of a trial; the first of those that fit."""
        rows = self.run.trials
        if not rows:
            raise RunError(f"{self.folder} has no trial yet; wait for the first evaluation")
        if algorithm is not None and algorithm not in self.algorithms:
            refuse_earlier(algorithm)
            raise unknown("algorithm of this run", algorithm, self.algorithms)
        wanted = dict(point or {})
        for row in rows:
            if algorithm not in (None, row.algorithm) or seed not in (None, row.seed):
                continue
            if all(row.point.get(name) == value for name, value in wanted.items()):
                return row
        known = "; ".join(
            f"{row.algorithm}, seed {row.seed}" + (f", {label_of(row.point)}" if row.point else "") for row in rows[:8]
        )
        asked = [algorithm or "", "" if seed is None else f"seed {seed}", label_of(wanted) if wanted else ""]
        more = f" and {len(rows) - 8} more" if len(rows) > 8 else ""
        raise ConfigError(f"{self.folder} has no trial of {', '.join(filter(None, asked))}; it has {known}{more}")

    def _models(self, row: TrialRow) -> StoredModels:
        name = algorithms.base_of(row.algorithm)
        shared = name in algorithms.ALGORITHMS and algorithms.get(name).exchange == "server"
        return StoredModels.open(self.run.file_of(row, FOLDER, ".safetensors"), shared)

    def _flat(self, stored: StoredModels) -> FlatModel:
        if (place := self.run.head.get("modules")) and Path(place).is_dir():
            look_in(place)
        facts = self._facts(stored)
        options = ModelOptions.model_validate(facts["model"])
        if facts["shape"] is None:
            raise RunError(f"{stored.path} is of a model of several inputs; read its named tensors by safetensors")
        module = make_factory(options, tuple(facts["shape"]), int(facts["classes"]), facts.get("crop"))()
        load_constants_(module, stored.constants())
        flat = FlatModel(module, carried={name for name, _ in facts.get("parameters", ())})
        made = [[name, list(size)] for name, size in zip(flat.names, flat.shapes, strict=True)]
        if facts.get("parameters", made) != made:
            raise RunError(
                f"{stored.path} holds another model than its config makes now ({facts['parameters'][0]} against "
                f"{made[0]}); has model.factory changed? Its tensors are named: read them by safetensors"
            )
        return flat

    def _facts(self, stored: StoredModels) -> JsonObject:
        """Return what a file says of its models; of version 0.2, which says nothing, what the config does."""
        if stored.facts:
            return stored.facts
        name = (self.config.get("data") or {}).get("name", "digits")
        if name not in SOURCES:
            raise RunError(f"the models of {self.folder} do not say what samples they take; run it again")
        model = self.config.get("model") or {}
        return {
            "model": {key: value for key, value in model.items() if key in ARCHITECTURE | {"standardise"}},
            "shape": list(SOURCES[name].shape),
            "classes": SOURCES[name].classes,
        }

    def _last_line(self, row: TrialRow) -> EvaluationRow:
        swept = self.run.swept
        lines = [line for line in self.run.metrics if line.key(swept) == row.key(swept)]
        if not lines:
            raise RunError(f"{self.folder} has no metrics of {row.algorithm}, seed {row.seed}; run it again")
        return lines[-1]

    def _true_clusters(self, line: EvaluationRow) -> list[int] | None:
        name = f"{label_of(line.point)}/{line.seed}" if "point" in line else str(line.seed)
        graph = self.run.topology.get(name)
        return None if graph is None else graph.get("clusters")


def _frame(rows: Iterable[StoredRow]) -> pd.DataFrame:
    """Make a table of the numbers of rows, with a column for each key that a sweep varies."""
    import pandas as pd

    head = ("point", "digest", "algorithm", "seed")
    return pd.DataFrame(
        [
            {"algorithm": row.algorithm, "seed": row.seed, **row.point}
            | flat_numbers({key: value for key, value in row.items() if key not in head})
            for row in rows
        ]
    )


def _is_personal(algorithm: str) -> bool:
    """Return whether clients deploy another model than one of their bank, so that its score is not theirs."""
    try:
        return algorithms.get(algorithms.base_of(algorithm)).personal is not None
    except DfcaError:
        return False
