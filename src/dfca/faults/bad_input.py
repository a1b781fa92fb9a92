"""What bad links and bad peers send."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from dfca.core.rules.merging import Plan
from dfca.core.state import Message
from dfca.peer.records import messages as m
from dfca.peer.records.lineage import NO_CLUSTERS, Clusters, Entry, layout_of


def corrupt(update: m.Update, rnd: random.Random) -> Any:
    """Break a model as a bad link does."""
    model = update.message.model.clone()
    kind = rnd.randrange(4)
    if kind == 0:
        model[rnd.randrange(len(model))] = math.nan
    elif kind == 1:
        model = model[:-1]
    elif kind == 2:
        model = model.float()
    else:
        return update._replace(message=replace(update.message, cluster=update.message.cluster + 100))
    return update._replace(message=replace(update.message, model=model))


HUGE = (1.7e308, -1.7e308)  # finite numbers whose difference is not
_JUNK: Sequence[Any] = (None, 7, "x", -1, 2**70, (), (1, 2), math.nan, math.inf, [1], {"a": 1}, b"z")


def garble(message: Any, rnd: random.Random) -> Any:
    """Make something else of a message: junk, or the message with one field changed."""
    if rnd.random() < 0.3:
        return rnd.choice(_JUNK)
    names = message._fields
    name = rnd.choice(names)
    value = getattr(message, name)
    if type(value) is int and rnd.random() < 0.6:
        return message._replace(**{name: value + rnd.choice((-1, 1, 5, 10**6))})
    if isinstance(value, Tensor) and rnd.random() < 0.6:
        return message._replace(**{name: torch.full_like(value, rnd.choice((math.nan, 1e300, 0.0, *HUGE)))})
    if isinstance(value, Message):
        part = rnd.choice([field.name for field in fields(value)])
        junk: Any = torch.full_like(value.model, rnd.choice(HUGE)) if part == "model" else rnd.choice(_JUNK)
        return message._replace(**{name: replace(value, **{part: junk})})
    return message._replace(**{name: rnd.choice(_JUNK)})


def lie(message: Any, rnd: random.Random) -> Any:
    """Claim a lineage with more voters than there are, or a survey that never was."""
    if isinstance(message, m.Result):
        return message._replace(entry=_fake_survey(NO_CLUSTERS, rnd))
    if isinstance(message, m.Answer):
        return message._replace(survey=message.survey._replace(excess=tuple(-(10**9) for _ in message.survey.excess)))
    if isinstance(message, m.Count) and message.poll is not None:
        return message._replace(poll=message.poll._replace(samples=tuple(10**9 for _ in message.poll.samples)))
    if isinstance(message, m.Hello) and any(entry.is_survey for entry in message.lineage) and rnd.random() < 0.5:
        return message._replace(lineage=(*message.lineage, _fake_survey(layout_of(message.lineage), rnd)))
    fake = (Entry(rnd.choice((1, 50, 10**6)), rnd.randrange(3), 0, 0, rnd.randrange(100), (0, 1)),)
    if isinstance(message, m.Hello):
        return message._replace(lineage=fake, clusters=2)
    if isinstance(message, m.Update | m.Copy | m.BankCopy | m.Alarm):
        return message._replace(lineage=fake)
    if isinstance(message, m.Curves):
        return message._replace(
            degree=rnd.choice((-1, 0, 2**20)), values=(rnd.choice((-1e30, 1e30)),) * len(message.values)
        )
    if isinstance(message, m.Candidate | m.Centre) and rnd.random() < 0.2 and isinstance(message.model, Tensor):
        return message._replace(model=torch.full_like(message.model, 1e6))
    return message


def _fake_survey(known: Clusters, rnd: random.Random) -> Entry:
    """Make up a survey that closes all clusters but one; of those that are known, or of any."""
    opened = [j for j in range(known.models or 2) if j not in known.closed]
    plan, last = Plan((), tuple(opened[1:])), rnd.random() < 0.5 or len(opened) == 1
    slots = (known if known.models else Clusters(2)).changed_by(plan, last)
    return Entry(rnd.choice((1, 50)), 0, 0, 0, 0, slots, *plan, last)
