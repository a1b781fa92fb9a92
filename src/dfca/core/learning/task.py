"""What models learn: a loss per sample, by which they are trained and chosen, and a metric, by which they are shown.

    task            targets y                loss of a sample                                 metric
    classification  (n,) integers            -log softmax(z)_y                                accuracy
    regression      (n,) or (n, *shape)      mean of (z - y)^2                                RMSE
    multilabel      (n, labels) of 0 and 1   mean of -y log s(z) - (1 - y) log(1 - s(z))      F1
    tokens          (n, T) integers, -100    mean of -log softmax(z_t)_(y_t) over the         token accuracy
                    where there is none      tokens that there are
    custom          anything                 a function of the user                           mean loss, or a function

z are the outputs of the model, s(z) = 1 / (1 + e^-z). F_client is the mean loss of a client's samples.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import log, prod
from typing import TYPE_CHECKING, Any, Literal

from dfca.base.errors import ConfigError, ModelError, place_of, unknown

if TYPE_CHECKING:  # an experiment is read and checked without torch, so functions import it themselves
    import torch
    from torch import Tensor

Targets = Literal["classes", "numbers", "labels", "tokens", "any"]
Loss = Callable[["Tensor", "Tensor"], "Tensor"]
"""Outputs (n, ...) and targets (n, ...) -> the loss of each sample (n,)."""
NO_TOKEN = -100
"""The target of a token that does not count (padding), as in torch."""


@dataclass(frozen=True)
class Metric:
    """How models are scored: `score` maps outputs (C, n, ...) and targets (C, n, ...) of C clients to (C,).

    name: for people; key: of the column in tables and files; percent: a share of 1 that is shown in percent.
    """

    name: str
    key: str
    score: Callable[[Tensor, Tensor], Tensor]
    higher_is_better: bool = True
    percent: bool = False
    unit: str = ""

    def facts(self) -> dict[str, Any]:
        """Describe the metric for files and reports."""
        return {
            "name": self.name,
            "key": self.key,
            "higher_is_better": self.higher_is_better,
            "percent": self.percent,
            "unit": self.unit,
        }

    def reached(self, value: float, target: float) -> bool:
        """Return whether a value is at least as good as a target."""
        return value >= target if self.higher_is_better else value <= target


@dataclass(frozen=True)
class Task:
    """What models learn. `make_task` makes one by name.

    Attributes:
        name: "classification", "regression", "multilabel", "tokens" or "custom".
        targets: The kind of targets: "classes", "numbers", "labels", "tokens" or "any".
        loss: Maps outputs (n, ...) and targets (n, ...) to the loss of each sample (n,).
        metric: How models are scored.
        residual: dL/dz from z (..., n, outputs), which is overwritten, and `encode`d targets, for networks of linear
            layers (`learning.dense`). None: torch computes the gradients.

    Example:
        >>> import dfca, torch
        >>> task = dfca.make_task("regression")
        >>> task.loss(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0]))
        tensor([0., 4.])
    """

    name: str
    targets: Targets
    loss: Loss
    metric: Metric
    residual: Callable[[Tensor, Tensor], Tensor] | None = None

    def mean_loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Compute F_client, the mean loss of a client's samples.

        Args:
            outputs: Of one model, (n, ...).
            y: Targets, (n, ...).

        Returns:
            A tensor of one number.
        """
        from torch.nn.functional import cross_entropy

        return cross_entropy(outputs, y) if self.loss is class_loss else self.loss(outputs, y).mean()

    def encode(self, y: Tensor, lead: int, width: int, dtype: torch.dtype) -> Tensor:
        """Write targets as the outputs that `residual` compares with.

        Args:
            y: Targets.
            lead: The number of leading dimensions: clients and samples.
            width: The number of outputs.
            dtype: Of the result.

        Returns:
            The targets, (..., n, width); classes become one-hot.
        """
        if self.targets != "classes":
            return y.reshape(*y.shape[:lead], width).to(dtype)
        import torch

        return torch.zeros(*y.shape, width, dtype=dtype, device=y.device).scatter_(-1, y[..., None], 1.0)

    def outputs(self, y: Tensor, classes: int) -> int:
        """Count the numbers that a model gives for a sample, or for each token.

        Args:
            y: Targets, (n, ...).
            classes: The number of classes, or of tokens in the vocabulary.

        Returns:
            The number of outputs.
        """
        return classes if self.targets in ("classes", "tokens") else prod(y.shape[1:])

    def guess(self, y: Tensor, classes: int) -> float | None:
        """Compute the loss of guessing without looking at the sample.

        Args:
            y: Targets, (n, ...).
            classes: The number of classes, or of tokens in the vocabulary.

        Returns:
            The loss; None where it is unknown.
        """
        if self.targets in ("classes", "tokens"):
            return log(max(2, classes))
        if self.loss is label_loss:
            return log(2)
        if self.loss is squared_loss:
            return float((y.double() - y.double().mean(dim=0)).square().mean())
        return None

    def check(self, outputs: Tensor, y: Tensor, classes: int) -> None:
        """Check that a model fits the targets, on some samples.

        Args:
            outputs: Of the model, (n, ...).
            y: Targets, (n, ...).
            classes: The number of classes, or of tokens in the vocabulary.

        Raises:
            ModelError: If the outputs have another shape than the targets need.
            ConfigError: If a loss of your own fails, or does not return one number per sample.
        """
        got, n = tuple(outputs.shape), len(y)
        if self.targets == "classes" and (outputs.dim() != 2 or outputs.shape[1] < classes):
            labels = f"{classes} classes (labels in 0..{classes - 1})"
            few = "" if classes <= 2 * outputs.shape[-1] else "; are labels numbered 0, 1, 2, ... without gaps?"
            raise ModelError(f"the model must give (n, {classes}) outputs for {labels}, got {got}{few}")
        if self.targets in ("numbers", "labels") and (len(outputs) != n or prod(got[1:]) != prod(y.shape[1:])):
            many = prod(y.shape[1:])
            what = f"{many} {'value' if self.targets == 'numbers' else 'label'}{'' if many == 1 else 's'}"
            raise ModelError(f"the model must give {(n, *y.shape[1:])} outputs for {what} per sample, got {got}")
        if self.targets == "tokens" and (got[:-1] != tuple(y.shape) or got[-1] < classes):
            raise ModelError(
                f"the model must give one number per token of the vocabulary, {(*y.shape, classes)}, got {got}"
            )
        _check_loss(self.loss, outputs, y)


def _check_loss(loss: Loss, outputs: Tensor, y: Tensor) -> None:
    from torch import Tensor

    try:
        values = loss(outputs, y)
    except Exception as error:
        if isinstance(loss, OwnFunction):
            raise ConfigError(
                f"loss {loss.path} failed with {type(error).__name__}: {error}{place_of(error)}; it is called as "
                f"loss(outputs, targets), here with shapes {tuple(outputs.shape)} and {tuple(y.shape)}"
            ) from error
        raise ModelError(f"the outputs do not fit the targets: {error}") from error
    if not isinstance(values, Tensor) or values.shape != (len(y),):
        got = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise ConfigError(
            f"a loss must return one number per sample, ({len(y)},) for {len(y)} samples, got {got}; "
            'take the mean over all dimensions but the first (reduction="none")'
        )


def class_loss(outputs: Tensor, y: Tensor) -> Tensor:
    """Compute the cross entropy: (n, classes), (n,) -> (n,)."""
    from torch.nn.functional import cross_entropy

    return cross_entropy(outputs, y, reduction="none")


def squared_loss(outputs: Tensor, y: Tensor) -> Tensor:
    """Compute the mean squared error of each sample: (n, ...), (n, ...) -> (n,)."""
    return (outputs.reshape(y.shape) - y).square().reshape(len(y), -1).mean(dim=1)


def absolute_loss(outputs: Tensor, y: Tensor) -> Tensor:
    """Compute the mean absolute error of each sample: (n, ...), (n, ...) -> (n,)."""
    return (outputs.reshape(y.shape) - y).abs().reshape(len(y), -1).mean(dim=1)


def huber_loss(outputs: Tensor, y: Tensor) -> Tensor:
    """Compute Huber's loss of each sample, squares within 1 and straight lines beyond: (n, ...), (n, ...) -> (n,)."""
    from torch.nn import functional

    values = functional.huber_loss(outputs.reshape(y.shape), y, reduction="none")
    return values.reshape(len(y), -1).mean(dim=1)


def label_loss(outputs: Tensor, y: Tensor) -> Tensor:
    """Compute the mean binary cross entropy of each sample: (n, labels) twice -> (n,)."""
    from torch.nn.functional import binary_cross_entropy_with_logits

    values = binary_cross_entropy_with_logits(outputs.reshape(y.shape), y.to(outputs.dtype), reduction="none")
    return values.reshape(len(y), -1).mean(dim=1)


def token_loss(outputs: Tensor, y: Tensor) -> Tensor:
    """Compute the mean cross entropy of each sample's tokens: (n, T, vocabulary), (n, T) -> (n,), 0 without any."""
    from torch.nn.functional import cross_entropy

    values = cross_entropy(outputs.flatten(0, 1), y.flatten(), reduction="none", ignore_index=NO_TOKEN).view(y.shape)
    return values.sum(dim=1) / (y != NO_TOKEN).sum(dim=1).clamp_min(1)


def softmax_residual(z: Tensor, target: Tensor) -> Tensor:
    """Compute dL/dz of the cross entropy: softmax(z) - onehot(y)."""
    return z.softmax(dim=-1).sub_(target)


def squared_residual(z: Tensor, target: Tensor) -> Tensor:
    """Compute dL/dz of the mean squared error: 2 (z - y) / outputs."""
    return (z - target).mul_(2 / target.shape[-1])


def label_residual(z: Tensor, target: Tensor) -> Tensor:
    """Compute dL/dz of the mean binary cross entropy: (s(z) - y) / labels."""
    return z.sigmoid().sub_(target).div_(target.shape[-1])


def accuracy(outputs: Tensor, y: Tensor) -> Tensor:
    """Compute the share of samples, or tokens, whose largest output is the right one; padding does not count."""
    counts = (y != NO_TOKEN).flatten(1)
    right = (outputs.argmax(dim=-1) == y).flatten(1) & counts
    return right.sum(dim=1).cpu().double() / counts.sum(dim=1).clamp_min(1).cpu().double()


def _errors(outputs: Tensor, y: Tensor) -> Tensor:
    return (outputs.reshape(y.shape) - y).flatten(1).cpu().double()


def mean_squared_error(outputs: Tensor, y: Tensor) -> Tensor:
    """Compute the mean of (z - y)^2."""
    return _errors(outputs, y).square().mean(dim=1)


def root_mean_squared_error(outputs: Tensor, y: Tensor) -> Tensor:
    """Compute the root of the mean of (z - y)^2."""
    return mean_squared_error(outputs, y).sqrt()


def mean_absolute_error(outputs: Tensor, y: Tensor) -> Tensor:
    """Compute the mean of |z - y|."""
    return _errors(outputs, y).abs().mean(dim=1)


def r_squared(outputs: Tensor, y: Tensor) -> Tensor:
    """Compute 1 - sum (z - y)^2 / sum (y - mean y)^2; of constant targets 1 where they are met, else 0."""
    import torch

    wrong = _errors(outputs, y).square().sum(dim=1)
    spread = (y - y.mean(dim=1, keepdim=True)).flatten(1).cpu().double().square().sum(dim=1)
    return torch.where(spread > 0, 1 - wrong / spread.where(spread > 0, torch.ones_like(spread)), (wrong == 0).double())


def f1(outputs: Tensor, y: Tensor) -> Tensor:
    """Compute 2 TP / (2 TP + FP + FN) over all labels, those with a positive output being predicted; 1 without any."""
    import torch

    said, true = (outputs.reshape(y.shape) > 0).flatten(1), (y > 0.5).flatten(1)
    both = 2 * (said & true).sum(dim=1).cpu().double()
    all_ = (said.sum(dim=1) + true.sum(dim=1)).cpu().double()
    return torch.where(all_ > 0, both / all_.clamp_min(1), torch.ones_like(all_))


def exact_match(outputs: Tensor, y: Tensor) -> Tensor:
    """Compute the share of samples whose labels are all right."""
    right = (outputs.reshape(y.shape) > 0) == (y > 0.5)
    return right.flatten(2).all(dim=2).cpu().double().mean(dim=1)


def perplexity(outputs: Tensor, y: Tensor) -> Tensor:
    """Compute exp(mean cross entropy over all tokens)."""
    from torch.nn.functional import cross_entropy

    values = cross_entropy(outputs.flatten(0, -2), y.flatten(), reduction="none", ignore_index=NO_TOKEN)
    counts = (y != NO_TOKEN).flatten(1).sum(dim=1).clamp_min(1)
    return (values.view(len(y), -1).cpu().double().sum(dim=1) / counts.cpu()).exp()


@dataclass(frozen=True)
class MeanLoss:
    """The mean of a loss as a metric."""

    loss: Loss

    def __call__(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Score C clients: (C,)."""
        import torch

        return torch.stack([self.loss(z, mine).mean() for z, mine in zip(outputs, y, strict=True)]).cpu().double()


@dataclass(frozen=True)
class OwnFunction:
    """A function of the user; path: where it comes from."""

    function: Callable[[Tensor, Tensor], Any]
    path: str

    def __call__(self, outputs: Tensor, y: Tensor) -> Any:
        """Call it."""
        return self.function(outputs, y)


@dataclass(frozen=True)
class OwnMetric:
    """A metric of the user, called as metric(outputs, targets) for one client after the other."""

    function: Callable[[Tensor, Tensor], Any]
    path: str

    def __call__(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Score C clients: (C,). Raises ConfigError where it fails, or returns anything but a number."""
        import torch

        return torch.tensor([self._one(z, mine) for z, mine in zip(outputs, y, strict=True)], dtype=torch.float64)

    def _one(self, outputs: Tensor, y: Tensor) -> float:
        try:
            return float(self.function(outputs, y))
        except Exception as error:
            raise ConfigError(
                f"metric {self.path} failed with {type(error).__name__}: {error}{place_of(error)}; it is called as "
                f"metric(outputs, targets), here with shapes {tuple(outputs.shape)} and {tuple(y.shape)}, and returns "
                "one number"
            ) from error


ACCURACY = Metric("accuracy", "accuracy", accuracy, percent=True)
CLASSIFICATION = Task("classification", "classes", class_loss, ACCURACY, softmax_residual)
TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        CLASSIFICATION,
        Task("regression", "numbers", squared_loss, Metric("RMSE", "rmse", root_mean_squared_error, False),
             squared_residual),
        Task("multilabel", "labels", label_loss, Metric("F1", "f1", f1, percent=True), label_residual),
        Task("tokens", "tokens", token_loss, Metric("token accuracy", "token_accuracy", accuracy, percent=True)),
    )
}  # fmt: skip
LOSSES: dict[str, tuple[Targets, Loss, Callable[[Tensor, Tensor], Tensor] | None]] = {
    "cross-entropy": ("classes", class_loss, softmax_residual),
    "mse": ("numbers", squared_loss, squared_residual),
    "mae": ("numbers", absolute_loss, None),
    "huber": ("numbers", huber_loss, None),
    "bce": ("labels", label_loss, label_residual),
    "token-cross-entropy": ("tokens", token_loss, None),
}
METRICS: dict[str, tuple[Targets, Metric]] = {
    "accuracy": ("classes", ACCURACY),
    "rmse": ("numbers", TASKS["regression"].metric),
    "mse": ("numbers", Metric("MSE", "mse", mean_squared_error, False)),
    "mae": ("numbers", Metric("MAE", "mae", mean_absolute_error, False)),
    "r2": ("numbers", Metric("R2", "r2", r_squared)),
    "f1": ("labels", TASKS["multilabel"].metric),
    "exact-match": ("labels", Metric("exact match", "exact_match", exact_match, percent=True)),
    "token-accuracy": ("tokens", TASKS["tokens"].metric),
    "perplexity": ("tokens", Metric("perplexity", "perplexity", perplexity, False)),
}
RESERVED = (
    *("accuracy", "train_loss", "round", "rounds", "seed", "algorithm", "models", "seconds", "metric", "digest"),
    *("clusters", "finished", "failed", "lines", "time_s", "assignments", "changed", "election", "point", "bytes_sent"),
    *("cluster_accuracy", "live_clusters", "mixing_drift", "messages", "scalars", "away_clients", "staleness"),
)
"""Columns that a metric of the user may not take."""


def build_task(
    name: str | None = None,
    loss: str | Loss | None = None,
    metric: str | Callable[[Tensor, Tensor], Any] | None = None,
    higher_is_better: bool | None = None,
    unit: str | None = None,
) -> Task:
    """Make a task from names and functions, as `dfca.tasks.make_task` says.

    Raises ConfigError for names that do not exist or do not fit each other.
    """
    base = _base_task(name, loss, metric)
    task = base
    if loss is not None and not _is_task(loss):
        task = _with_loss(base, loss)
    if metric is not None and not _is_task(metric):
        task = replace(task, metric=_make_metric(task, metric, higher_is_better))
    if unit is not None:
        task = replace(task, metric=replace(task.metric, unit=unit))
    if higher_is_better is not None and not isinstance(task.metric.score, OwnMetric):
        raise ConfigError(
            f"higher_is_better is for a metric of your own; {task.metric.name} knows its direction, leave it out"
        )
    return task


def _is_task(value: Any) -> bool:
    return isinstance(value, str) and value in TASKS


def _base_task(name: str | None, loss: Any, metric: Any) -> Task:
    """Find the task that names mean, before its loss and metric are replaced."""
    if name is not None and name not in TASKS and name != "custom":
        raise unknown("task", name, (*TASKS, "custom"))
    owners = {task.targets: task for task in TASKS.values()}
    named = [_owner(kind, value, table, owners) for kind, value, table in _tables(loss, metric)]
    owned = [task for task in named if task is not None]
    if name is None:
        name = owned[0].name if owned else "custom" if loss is not None else "classification"
    for task in owned:
        if task.name != name and name != "custom":
            raise ConfigError(
                f'the task is "{name}", and its loss or metric is one of "{task.name}"; take both from one task'
            )
    if name != "custom":
        return TASKS[name]
    if loss is None:
        raise ConfigError('task "custom" needs a loss: "package.module:function", called as loss(outputs, targets)')
    return Task("custom", "any", class_loss, Metric("loss", "loss", MeanLoss(class_loss), False))


def _tables(loss: Any, metric: Any) -> tuple[tuple[str, Any, dict[str, Any]], ...]:
    return (("loss", loss, LOSSES), ("metric", metric, METRICS))


def _owner(kind: str, value: Any, table: dict[str, Any], owners: dict[Targets, Task]) -> Task | None:
    """Return the task that a named loss or metric belongs to; None for a path, a function, or "loss" as a metric."""
    if not isinstance(value, str) or (kind == "metric" and value == "loss"):
        return None
    if value in TASKS:
        return TASKS[value]
    if value not in table:
        known = (*table, *(("loss",) if kind == "metric" else ()), *TASKS)
        raise ConfigError(f'{unknown(kind, value, known)}; or give "package.module:function"')
    return owners[table[value][0]]


def _with_loss(task: Task, loss: str | Loss) -> Task:
    if isinstance(loss, str) and loss in LOSSES:
        _, function, residual = LOSSES[loss]
    else:
        function, residual = OwnFunction(*_own("loss", loss)), None
    metric = task.metric
    if isinstance(metric.score, MeanLoss):
        metric = replace(metric, score=MeanLoss(function))
    return replace(task, loss=function, residual=residual, metric=metric)


def _make_metric(task: Task, metric: Any, higher_is_better: bool | None) -> Metric:
    if metric == "loss":
        return Metric("loss", "loss", MeanLoss(task.loss), False)
    if isinstance(metric, str) and metric in METRICS:
        return METRICS[metric][1]
    function, path = _own("metric", metric)
    name = getattr(function, "__name__", path.rpartition(":")[2])
    if not name.isidentifier() or name in RESERVED or name.startswith("all_models_"):
        raise ConfigError(f"metric {path}: the name {name!r} cannot name a column of the metrics; call it otherwise")
    higher = getattr(function, "higher_is_better", True) if higher_is_better is None else higher_is_better
    unit = str(getattr(function, "unit", ""))
    return Metric(name.replace("_", " "), name, OwnMetric(function, path), bool(higher), unit=unit)


def _own(kind: str, value: Any) -> tuple[Callable[[Tensor, Tensor], Any], str]:
    if isinstance(value, OwnFunction):
        return value.function, value.path
    if not callable(value):
        raise ConfigError(f"{kind} must be a name, a path or a function, got {value!r}")
    return value, f"{getattr(value, '__module__', '')}:{getattr(value, '__name__', type(value).__name__)}"
