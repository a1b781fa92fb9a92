"""The local work of a round in plain torch: loops over clients, and nothing federated.

For every client: the losses of its k models on its samples, then tau steps of plain gradient descent on the best one,
on all samples or on mini-batches.
Every schedule computes what the simulator computes (tested; only batch norm's running statistics may differ),
and the fastest one on this machine is the floor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dfca.core.learning.local import draw_batches
from dfca.core.rng import seeded, stream
from dfca.sim.setting import Setting

Forward = Callable[[Sequence[Tensor], Tensor], Tensor]


class PlainTorch:
    """The clients' models and samples as a plain script would hold them: N x k modules, N pairs of tensors."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.samples = [setting.split.train.of(i) for i in range(setting.clients)]
        self.modules: list[list[nn.Sequential]] = []
        for _ in range(setting.clients):
            mine = []
            for j in range(setting.clusters or 1):
                with seeded(setting.seed, "init", j):
                    module = setting.make_model()
                assert isinstance(module, nn.Sequential)
                mine.append(module)
            self.modules.append(mine)
        self.tensors = [[list[Tensor](module.parameters()) for module in mine] for mine in self.modules]
        rate = setting.local.learning_rate
        self.optimisers = [
            [torch.optim.SGD(tensors, lr=rate, foreach=True) for tensors in mine] for mine in self.tensors
        ]
        layers = {type(layer) for layer in self.modules[0][0]}
        self._rounds: Counter[int] = Counter()
        self._pool = ThreadPoolExecutor(max(1, torch.get_num_threads()))
        kinds: dict[str, Callable[[int], None]] = {"modules": self._with_modules}
        if nn.Conv2d not in layers:
            kinds["tensors"] = partial(self._with_tensors, forward_mlp)
            kinds["backward by hand"] = self._by_hand
        else:
            kinds["modules, channels last"] = partial(self._with_modules, channels_last=True)
        if nn.BatchNorm2d in layers:
            kinds["tensors"] = partial(self._with_tensors, forward_cnn)
            kinds["pool before ReLU"] = partial(self._with_tensors, partial(forward_cnn, pool_first=True))
            last = partial(forward_cnn, pool_first=True, channels_last=True)
            kinds["pool before ReLU, channels last"] = partial(self._with_tensors, last)
        self.schedules: dict[str, Callable[[], None]] = {name: partial(self._loop, one) for name, one in kinds.items()}
        if (threads := torch.get_num_threads()) > 1:
            for name, one in kinds.items():
                self.schedules[f"{name}, {threads} Python threads"] = partial(self._threads, one, threads)

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()

    def _loop(self, one: Callable[[int], None]) -> None:
        for client in range(len(self.samples)):
            one(client)

    def _threads(self, one: Callable[[int], None], threads: int) -> None:
        """Deal the clients to Python threads with one core each."""

        def work(first: int) -> None:
            torch.set_num_threads(1)  # of this thread
            for client in range(first, len(self.samples), threads):
                one(client)

        try:
            list(self._pool.map(work, range(threads)))
        finally:
            torch.set_num_threads(threads)

    def _batches(self, client: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the samples of each step of the client's next round."""
        (x, y), local, round = self.samples[client], self.setting.local, self._rounds[client]
        self._rounds[client] += 1
        batches = draw_batches(len(y), local, stream(self.setting.seed, "batches", client, round))
        for step in range(local.steps):
            yield (x, y) if batches is None else (x[batches[step]], y[batches[step]])

    def _with_modules(self, client: int, channels_last: bool = False) -> None:
        """The script as one would write it first: nn.Module and torch.optim."""
        x, y = self.samples[client]
        best = self._best([partial(module, x) for module in self.modules[client]], y)
        module, optimiser = self.modules[client][best], self.optimisers[client][best]
        for x, y in self._batches(client):
            if channels_last:
                x = x.contiguous(memory_format=torch.channels_last)
            optimiser.zero_grad()
            torch.autograd.backward(F.cross_entropy(module(x), y))
            optimiser.step()

    def _with_tensors(self, forward: Forward, client: int) -> None:
        """Functions on tensors, one fused update of all of them."""
        x, y = self.samples[client]
        best = self._best([partial(forward, tensors, x) for tensors in self.tensors[client]], y)
        tensors = self.tensors[client][best]
        for x, y in self._batches(client):
            gradients = torch.autograd.grad(F.cross_entropy(forward(tensors, x), y), tensors)
            with torch.no_grad():
                torch._foreach_add_(tensors, gradients, alpha=-self.setting.local.learning_rate)

    def _by_hand(self, client: int) -> None:
        """The MLP's backward pass written out, gradients added into the weights by the matrix product itself."""
        x, y = self.samples[client]
        rate = self.setting.local.learning_rate
        best = self._best([partial(forward_mlp, tensors, x) for tensors in self.tensors[client]], y)
        first, first_bias, second, second_bias = (tensor.detach() for tensor in self.tensors[client][best])
        for x, y in self._batches(client):
            x, rows = x.flatten(1), torch.arange(len(y))
            hidden = torch.addmm(first_bias, x, first.T).relu_()
            outputs = torch.addmm(second_bias, hidden, second.T).softmax(dim=1)
            outputs[rows, y] -= 1
            outputs /= len(y)
            inner = (outputs @ second).mul_(hidden > 0)
            second.addmm_(outputs.T, hidden, alpha=-rate)
            second_bias.sub_(outputs.sum(dim=0), alpha=rate)
            first.addmm_(inner.T, x, alpha=-rate)
            first_bias.sub_(inner.sum(dim=0), alpha=rate)

    def _best(self, models: Sequence[Callable[[], Tensor]], y: Tensor) -> int:
        if len(models) == 1:
            return 0
        with torch.no_grad():
            return int(torch.stack([F.cross_entropy(run(), y) for run in models]).argmin())


def forward_mlp(tensors: Sequence[Tensor], x: Tensor) -> Tensor:
    """Run `models.mlp`."""
    return F.linear(F.relu(F.linear(x.flatten(1), tensors[0], tensors[1])), tensors[2], tensors[3])


def forward_cnn(tensors: Sequence[Tensor], x: Tensor, pool_first: bool = False, channels_last: bool = False) -> Tensor:
    """Run `models.cnn`; max-pool and ReLU commute, and pooling first leaves a quarter of the ReLUs.

    channels_last: the layout that the CPU's convolution likes best; batch norm in it is exact to 1e-4 only.
    """
    if channels_last:
        x = x.as_strided(x.shape, (x[0].numel(), 1, x.shape[3] * x.shape[1], x.shape[1])) if x.shape[1] == 1 else x
        x = x.contiguous(memory_format=torch.channels_last)
    for weight, bias, scale, shift in (tensors[0:4], tensors[4:8]):
        x = F.conv2d(x, weight, bias)
        x = F.relu(F.max_pool2d(x, 2)) if pool_first else F.max_pool2d(F.relu(x), 2)
        x = F.batch_norm(x, None, None, scale, shift, training=True)
    return F.linear(F.relu(F.linear(x.flatten(1), tensors[8], tensors[9])), tensors[10], tensors[11])
