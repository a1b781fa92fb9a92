"""Every error a user can meet. Each message states the value, the bound and what to do.

DfcaError
├── ConfigError      a value the user gave: unknown key, out of range, contradictory
├── ModelError       a module that cannot be flattened or does not fit the data
├── DataError        a data set that is missing, malformed or empty
│   └── ChecksumError    bytes that are not the ones expected
├── ShortOfMemory    models or samples that do not fit
└── RunError         a run folder, checkpoint or disk that cannot be used
    └── RankLost         another process of a distributed run is gone

DfcaWarning          what may be wrong; given by `warnings`, from Python
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches


class DfcaError(Exception):
    """Base class of the errors that a user can cause: catch it to catch them all.

    Attributes:
        status: The exit status of the command line, which prints the message in one line.

    Example:
        >>> import dfca
        >>> try:
        ...     dfca.make_task("clasification")
        ... except dfca.DfcaError as error:
        ...     print(type(error).__name__)
        ConfigError
    """

    status = 1


class ConfigError(DfcaError, ValueError):
    """A value the user gave is wrong."""

    status = 2


class DfcaWarning(UserWarning):
    """Category of warnings about what may be wrong: clients without neighbours, divergence.

    Example:
        >>> import warnings, dfca
        >>> warnings.simplefilter("error", dfca.DfcaWarning)  # stop instead
        >>> warnings.resetwarnings()
    """


class ModelError(DfcaError, ValueError):
    """A module cannot be used."""

    status = 2


class DataError(DfcaError):
    """A data set cannot be used."""


class ChecksumError(DataError):
    """Bytes are not the ones expected."""


class ShortOfMemory(DfcaError, MemoryError):
    """Models or samples do not fit into memory, or onto the disk."""


class RunError(DfcaError):
    """A run folder cannot be used."""


class RankLost(RunError):
    """Another process of a distributed run is gone; `explained` if it sent the reason before."""

    explained = False


SYNONYMS = {
    **dict.fromkeys(("lr", "eta", "step_size"), "learning_rate"),
    **dict.fromkeys(("k", "n_clusters", "num_clusters"), "clusters"),
    **dict.fromkeys(("num_rounds", "n_rounds", "global_rounds"), "rounds"),
    **dict.fromkeys(("num_clients", "n_clients", "nodes"), "clients"),
    **dict.fromkeys(("graph", "network"), "topology"),
    **dict.fromkeys(("local_epochs", "epoch", "num_epochs"), "epochs"),
    **dict.fromkeys(("optim", "optimiser", "opt"), "optimizer"),
    **dict.fromkeys(("seeds", "random_state"), "seed"),
    **dict.fromkeys(("bs", "batchsize"), "batch_size"),
    **dict.fromkeys(("wd", "l2"), "weight_decay"),
    "local_steps": "steps",
    "acc": "accuracy",
    "verbose": "progress",
}
"""What others call our options."""


def unknown(kind: str, value: object, known: Iterable[str]) -> ConfigError:
    """Make the error for a name that does not exist, with the near matches first and all names after.

    >>> str(unknown("dataset", "mnits", ["digits", "mnist"]))
    'unknown dataset "mnits"; did you mean "mnist"? Known: digits, mnist'
    """
    names = sorted(known)
    meant = SYNONYMS.get(str(value), "")
    near = [meant] if meant in names else sorted(get_close_matches(str(value), names, n=2, cutoff=0.6))
    hint = f"; did you mean {' or '.join(f'{name!r}' for name in near)}?".replace("'", '"') if near else "."
    return ConfigError(f'unknown {kind} "{value}"{hint} Known: {", ".join(names)}')


@contextmanager
def explain_batch_norm() -> Iterator[None]:
    """Turn torch's error of a batch norm that is given one sample into a sentence. Raises ModelError instead of it."""
    try:
        yield
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        raise ModelError(
            "batch norm cannot train on 1 sample, and a step of some client has 1; use a batch_size >= 2 that leaves "
            "no single sample over, or nn.GroupNorm in the place of batch norm"
        ) from error


def place_of(error: BaseException) -> str:
    """Say where in the user's own code an error was raised: " (model.py, line 12)"; nothing where it was not."""
    ours, standard = __file__.rpartition("base")[0], traceback.__file__.rpartition("traceback")[0]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not any(place in frame.filename for place in (ours, standard, "site-packages", "dist-packages", "<frozen")):
            return f" ({frame.filename}, line {frame.lineno})"
    return ""
