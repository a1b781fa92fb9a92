"""D-FedEM: federated learning of a mixture of distributions (Marfoq, Neglia, Bellet, Kameni, Vidal; NeurIPS 2021).

k models are shared by all; client i has mixture weights pi_i, uniform at first. Each round:
  E. q_s(d) <- pi_is exp(-L(theta_is, d)) / sum_r pi_ir exp(-L(theta_ir, d));    pi_is <- mean over d of q_s(d)
  M. for every s, tau local steps of theta_is on the loss mean_d q_s(d) L(theta_is, d)
  3. send all models to the neighbours;   theta_is <- sum_m w_im theta_ms   (Metropolis weights, doubly stochastic)
A client predicts sum_s pi_is softmax f_s(x); of outputs that are no scores of classes, their mean by pi_i.

Differs from the paper in: full-batch steps by default, as for all algorithms here; L is the loss of the task, which
need not be a log-likelihood. With few steps per round one model can take over all samples before the others have
learned (docs/rivals.md). One module of a client, as `model()` gives it, is the model with the largest weight.
Differs from the public code in: momentum (0.9 there, for all methods) and weight decay are those of the experiment, and
momentum begins anew in every round; the rate is that of everybody, where the code tunes it per method and divides it by
10 after a half and three quarters of the rounds; Metropolis weights instead of the fastest mixing ones. As there, q is
not normed: a model with a small share of a client's samples takes small steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dfca.core.algorithm import Algorithm, Choice, View

if TYPE_CHECKING:
    from torch import Tensor


def fedem(momentum: float | None = None) -> Algorithm:
    """D-FedEM: a mixture of k models; every client trains all of them, by how well they explain each sample."""
    return Algorithm(
        "fedem",
        momentum=momentum,
        start="shared",
        exchange="gossip",
        choose=explain,
        needs="samples",
        weights="metropolis",
        share="all",
        trains="all",
        memory=uniform,
        mixture=mixture_weights,
    )


def explain(view: View) -> Choice:
    """Do the E-step; the cluster of a client is the model with the largest weight."""
    assert view.sample_losses is not None  # the record says needs="samples"
    assert view.memory is not None
    q = responsibilities(view.sample_losses, view.memory)
    pi = q.mean(dim=1)
    return Choice(int(pi.argmax()), weights=q, memory=pi)


def responsibilities(sample_losses: Tensor, pi: Tensor) -> Tensor:
    """Compute q_s(d) = pi_s exp(-L_sd) / sum_r pi_r exp(-L_rd): (k, n), (k,) -> (k, n), in double precision.

    A loss that is not finite explains nothing; where no model explains a sample, all share it.
    """
    import torch  # late: names and options do without

    logits = pi.to(sample_losses.device).double().log()[:, None] - sample_losses.double()
    logits = logits.nan_to_num(nan=-torch.inf, posinf=-torch.inf, neginf=-torch.inf)
    return logits.softmax(dim=0).nan_to_num(nan=1 / len(pi))


def uniform(models: int, clients: int) -> Tensor:
    """Begin with equal weights: (k,)."""
    import torch

    return torch.full((models,), 1 / models, dtype=torch.float64)


def mixture_weights(memory: Tensor) -> Tensor:
    """Predict with the mixture weights themselves."""
    return memory
