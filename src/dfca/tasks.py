"""What models learn, as a user says it: names of tasks, losses and metrics, paths "package.module:function", functions.

`learning.task` has the tasks themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dfca.base.errors import ConfigError
from dfca.base.imports import import_function, is_import
from dfca.core.learning.task import TASKS, Loss, OwnFunction, Task, build_task

if TYPE_CHECKING:
    from torch import Tensor

LossLike = str | Loss | None
MetricLike = str | Callable[["Tensor", "Tensor"], Any] | None


def make_task(
    name: str | None = None,
    loss: LossLike = None,
    metric: MetricLike = None,
    higher_is_better: bool | None = None,
    unit: str | None = None,
) -> Task:
    """Make a task: what targets models predict, the loss they are trained with and the metric they are scored by.

    Args:
        name: "classification", "regression", "multilabel", "tokens", or "custom" for targets of any kind. Default: the
            task that the loss or the metric belongs to, else "classification", or "custom" with a loss of your own.
        loss: A name that fits the task, the name of a task (its loss), "module:function", or a function of
            (outputs, targets) that returns one number per sample.
        metric: Likewise; a function returns one number.
        higher_is_better: Of a metric of your own; default: its attribute of this name, else True.
        unit: Of a metric of your own; default: its attribute of this name, else none.

    Returns:
        The task, for `simulate(task=...)` or `Split.of_clients(task=...)`.

    Raises:
        ConfigError: If a name does not exist, or names do not fit each other.

    Example:
        >>> import dfca
        >>> task = dfca.make_task("regression", loss="huber", metric="mae")
        >>> task.targets, task.metric.name
        ('numbers', 'MAE')
    """
    return build_task(name, _found("loss", loss), _found("metric", metric), higher_is_better, unit)


def choose_task(given: Task, task: str | Task | None, loss: LossLike = None, metric: MetricLike = None) -> Task:
    """Settle the task of a simulation: what is asked for, over that of the data.

    Raises ConfigError as `make_task` does.
    """
    if isinstance(task, Task):
        if loss is not None or metric is not None:
            raise ConfigError("a Task has its loss and metric; give their names with the name of a task instead")
        return task
    if task is None and loss is None and metric is None:
        return given
    named = any(isinstance(value, str) and value in TASKS for value in (loss, metric))
    if task is None and given.name in TASKS and not named:
        task = given.name
    return make_task(task, loss, metric)


def _found(kind: str, value: Any) -> Any:
    if isinstance(value, str) and is_import(value):
        return OwnFunction(import_function(value, f"task.{kind}"), value)
    return value
