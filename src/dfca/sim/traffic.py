"""What clients and a server have sent so far, and what it costs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Traffic:
    """The models and numbers sent so far.

    messages_by_client (N,), messages_by_cluster (m,): models that clients sent. server_messages: models that a server
    sent. start_messages: models that elections sent. scalars: numbers that clients sent besides models. coded: those
    of the clients' messages that carried the payload of a codec.
    """

    messages_by_client: Tensor
    messages_by_cluster: Tensor
    server_messages: int = 0
    start_messages: int = 0
    scalars: int = 0
    coded: int = 0

    @classmethod
    def none(cls, clients: int, models: int) -> Traffic:
        """Begin with nothing sent."""
        return cls(torch.zeros(clients, dtype=torch.int64), torch.zeros(models, dtype=torch.int64))

    def count(self, copies: Tensor, clusters: Tensor) -> None:
        """Count models sent: copies (N,) by each client, of clusters (N,)."""
        sent = copies > 0
        self.messages_by_client += copies
        self.messages_by_cluster.index_add_(0, clusters[sent], copies[sent])

    def open_cluster(self, cluster: int) -> None:
        """Make room for a cluster that is new."""
        new = torch.zeros(max(0, cluster + 1 - len(self.messages_by_cluster)), dtype=torch.int64)
        self.messages_by_cluster = torch.cat([self.messages_by_cluster, new])

    def row(self, model_bytes: int, payload_bytes: int | None = None) -> dict[str, int | list[int]]:
        """Return the metrics of what was sent; model_bytes: of one model; payload_bytes: of a codec's payload."""
        messages = int(self.messages_by_client.sum())
        saved = 0 if payload_bytes is None else self.coded * (model_bytes - payload_bytes)
        return {
            "messages_sent": messages,
            "bytes_sent": (messages + self.start_messages) * model_bytes + 4 * self.scalars - saved,
            "start_bytes": self.start_messages * model_bytes,
            "scalars_sent": self.scalars,
            "server_bytes_sent": self.server_messages * model_bytes,
            "messages_by_client": self.messages_by_client.tolist(),
            "messages_by_cluster": self.messages_by_cluster.tolist(),
            "model_bytes": model_bytes,
            **({} if payload_bytes is None else {"payload_bytes": payload_bytes}),
        }
