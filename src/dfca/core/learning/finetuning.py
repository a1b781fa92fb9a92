"""Fine-tuning of the model that a client deploys: epochs of small batches on its own samples, for its own use."""

from __future__ import annotations

from dataclasses import dataclass

from dfca.base.errors import ConfigError
from dfca.core.method import LocalOptions

STAGE_EPOCHS = 5  # momentum is reset after each stage
DECAY_STAGES = 3  # the learning rate decays after this many stages


@dataclass(frozen=True)
class FineTuning:
    """How a deployed model is fine-tuned: in stages of 5 epochs, each of which begins with fresh momentum.

    The learning rate is `rate` times that of training, and `decay` times as large after every third stage. A batch has
    at most `batch_size` samples: an epoch of n samples is ceil(n / batch_size) steps on batches of equal size.
    """

    epochs: int = 0
    batch_size: int = 50
    rate: float = 0.5
    momentum: float = 0.5
    decay: float = 0.8

    def __post_init__(self) -> None:
        for name, fewest in (("epochs", 0), ("batch_size", 1)):
            value = getattr(self, name)
            if type(value) is not int or value < fewest:
                raise ConfigError(f"{name} of fine-tuning must be an integer >= {fewest}, got {value!r}")
        if not 0 < self.rate <= 10:
            raise ConfigError(f"rate of fine-tuning must be in (0, 10], got {self.rate!r}")
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"momentum of fine-tuning must be in [0, 1), got {self.momentum!r}")
        if not 0 < self.decay <= 1:
            raise ConfigError(f"decay of fine-tuning must be in (0, 1], got {self.decay!r}")

    def stages(self, local: LocalOptions, samples: int) -> list[LocalOptions]:
        """List the local steps of every stage, for a client with n = `samples` that trains with `local`."""
        steps = -(-samples // self.batch_size)
        batch = -(-samples // steps)
        return [
            local.full_batch(
                steps * min(STAGE_EPOCHS, self.epochs - begin),
                batch_size=batch,
                momentum=self.momentum,
                learning_rate=local.learning_rate * self.rate * self.decay ** (stage // DECAY_STAGES),
            )
            for stage, begin in enumerate(range(0, self.epochs, STAGE_EPOCHS))
        ]
