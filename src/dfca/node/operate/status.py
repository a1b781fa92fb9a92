"""The status of a node as one JSON object: what it does, with whom, how well, and what went wrong.

A running node answers with it; a stopped one has left its last in status.json.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from dfca.base.errors import RunError
from dfca.base.files import read_small
from dfca.node.disk.disk import SYSTEM_DISK, Disk
from dfca.node.disk.save_file import STATE, last_save
from dfca.node.operate.control import NotRunning, call

if TYPE_CHECKING:
    from rich.console import RenderableType

    from dfca.node.node import Node
    from dfca.node.operate.logs import NodeLog
    from dfca.node.task.facts import Facts
    from dfca.node.work.local_work import LocalWork
    from dfca.peer.machine import Machine

FILE = "status.json"
MISFIT, FIT = 0.9, 0.6  # shares of the loss of guessing: above, a model has learned nothing; below, it fits again
RECENT = 10  # losses needed for this verdict
MOST_BYTES = 16 * 2**20
SCORES = {"accuracy": ("accuracy", ".1%"), "rmse": ("RMSE", ".4g"), "f1": ("F1", ".1%")}
"""How scores are called and written, by their key in `HeldOutScore` and in a status."""


def describe_work(node: Node, work: LocalWork, notes: NodeLog, names: Mapping[int, str]) -> dict[str, Any]:
    """Describe what a node computes: state, round, clusters, scores, staleness."""
    machine, report = node.machine, work.report
    closed, models = machine.copies.closed, 0 if machine.bank is None else len(machine.bank)
    scores = [] if report is None else [_score(score) for score in report.scores]
    own, privacy = scores[report.cluster] if scores else None, describe_privacy(machine)
    scores = [score for j, score in enumerate(scores) if j not in closed]
    waits = re.sub(r"clients? (?=\d)", "", machine.waits())
    return {
        "state": machine.state.value,
        "waits": re.sub(r"\d{10,}", lambda number: names.get(int(number[0]), number[0]), waits),
        "round": machine.round,
        "rounds": machine.options.rounds,
        "clusters": models - len(closed),
        "cluster": machine.assignment,
        "incarnation": machine.incarnation,
        "loss": _finite(work.loss),
        **{key: None if own is None else own.get(key) for key in SCORES},
        "scores": scores,
        "personal": describe_personal(machine, work),
        "privacy": privacy,
        "epsilon": None if privacy is None else privacy["epsilon"],
        "samples": {"train": len(work.samples.client.y), "held_out": work.samples.held_out, "rereads": work.rereads},
        "staleness": notes.staleness,
        "round_s": notes.round_s,
        "rest_s": node.idling.rest_s,
        "since_round_s": None if notes.finished_at is None else notes.now() - notes.finished_at,
        "folds": notes.counts["fold"],
        "drops": notes.counts["drop"],
    }


def describe_personal(machine: Machine, work: LocalWork) -> dict[str, Any] | None:
    """Describe the personal last step, or return None before there is one: steps, the round before which they were
    picked, the held-out losses without and with it, and the score after it."""
    from dfca.core.rules.personal import GRID
    from dfca.peer.last_step import LastStep

    last_step = getattr(machine, "last_step", None)
    if not isinstance(last_step, LastStep) or not (last_step.curves.measured or last_step.steps):
        return None
    pool, steps = last_step.curves, last_step.steps
    personal: dict[str, Any] = {"steps": steps}
    if pool.measured:
        losses = [_finite(pool.rows[0][place]) for place in (0, GRID.index(steps))]
        personal |= {"round": pool.due, "samples": pool.samples, "losses": losses, "sweeps": len(pool.rows) - 1}
    scores = () if work.personal is None else work.personal.scores
    return {**personal, **(_score(scores[0]) if scores else {})}


def describe_privacy(machine: Machine) -> dict[str, Any] | None:
    """Describe what this device has given away: epsilon of its updates, at delta; None without privacy."""
    if (privacy := machine.options.method.privacy) is None:
        return None
    from dfca.base.accountant import epsilon

    updates = sum(machine.copies.updates)
    return {"updates": updates, "epsilon": epsilon(privacy.noise, updates, privacy.delta), "delta": privacy.delta}


def _score(score: Any) -> dict[str, Any]:
    values = {key: _finite(getattr(score, key)) for key in SCORES if getattr(score, key) is not None}
    return {"accuracy": None, "loss": _finite(score.loss)} | values


def guess_loss(facts: Facts) -> float:
    """Return the loss of guessing: ln(classes), ln 2 for a label, or 1 for scaled numbers."""
    if facts.predicts_numbers:
        return 1.0
    return math.log(2 if facts.task == "multilabel" else len(facts.classes))


def describe_misfit(losses: Sequence[float], facts: Facts, members: int, known: bool = False) -> str | None:
    """Return a sentence if no model of the swarm fits this device's data, by its last losses before training.

    known: it has been reported; taking it back needs a clearly lower loss.

    If most of the last losses are no better, others train
    these models on contradicting data and average away what this device learns. The median, because its own training
    still counts in a round before which nothing arrived.
    """
    guess = guess_loss(facts)
    if members < 2 or len(losses) < RECENT or median(losses) < (FIT if known else MISFIT) * guess:
        return None
    return name_misfit(facts, f"loss {median(losses):.2g}; guessing has {guess:.2g}")


def name_misfit(facts: Facts, figures: str) -> str:
    """Return the sentence for a device that no model of the swarm fits."""
    text = f"no model of the swarm fits this device's data ({figures})"
    if facts.clusters is None and facts.algorithm.startswith("dfca"):
        return (
            f"{text}: it may be the only one of its kind, and a swarm that finds its clusters itself opens one for at "
            f"least {facts.election.support} devices; add a second such device, or found the swarm anew with --clusters"
        )
    return f"{text}; are its labels and units those of the others? is --clusters large enough for all kinds?"


def describe_neighbours(node: Node, links: Mapping[int, Mapping[str, Any]], names: Mapping[int, str]) -> list[Any]:
    """Describe every neighbour: what the transport knows of its link, and what the peer knows of its round."""
    known, entries = node.machine.links, []
    for number in sorted({*links, *known, *getattr(node.machine, "neighbours", ())}, key=lambda n: names.get(n, "")):
        said = known.get(number)
        hello = said.hello if said is not None else None
        entry: dict[str, Any] = {"name": names.get(number, str(number)), "number": number}
        entry |= {"state": "up" if number in known else "down"} | dict(links.get(number, {}))
        entry["round"] = None if said is None or hello is None else max(hello.round - 1, said.round)
        entry["clusters"] = None if hello is None else hello.clusters
        entries.append(entry)
    return entries


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def save_status(folder: Path, status: Mapping[str, Any], disk: Disk = SYSTEM_DISK) -> None:
    """Keep a status for when the node does not run. Raises RunError if it cannot be written."""
    try:
        with disk.replacing(folder / FILE) as file:
            file.write(json.dumps(status).encode() + b"\n")
    except OSError as error:
        raise RunError(f"cannot write {FILE} in {folder}: {error.strerror}; free some space on the disk") from error


def read_status(folder: Path) -> dict[str, Any]:
    """Ask the node that runs in a folder for its status; if none runs, return the last one.

    That may be older than the last save of a node that was killed: "saved" says where its next start continues.
    Raises RunError if there is no status, ConfigError if there is no node.
    """
    try:
        return call(folder, "status", timeout_s=10.0)
    except NotRunning:
        try:
            last: dict[str, Any] = json.loads(read_small(folder / FILE, MOST_BYTES))
        except (OSError, ValueError):
            from dfca.node.task.config import NodeConfig

            NodeConfig.load(folder)
            raise RunError(
                f"the node in {folder} does not run and has left no status; start it: dfca node run {folder}"
            ) from None
        saved = last_save(folder / STATE)
        return {**last, "running": False, **({} if saved is None else {"saved": saved})}


def status_table(status: Mapping[str, Any]) -> RenderableType:
    """Make a table of a status."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    facts = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column(overflow="fold")
    for name, value in _facts(status):
        facts.add_row(name, Text(value))
    names = ("neighbour", "state", "round", "seen", "rtt", "received", "sent", "address", "last error")
    rows = (_cells(neighbour, bool(status.get("running"))) for neighbour in status.get("neighbours", ()))
    links = plain_table(names, rows, right=names[2:7])
    return Group(facts, Text(""), links) if status.get("neighbours") else Group(facts)


def plain_table(names: Sequence[str], rows: Iterable[Iterable[str]], right: Collection[str] = ()) -> RenderableType:
    """Make a table of plain texts without lines. right: the columns of numbers."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for name in names:
        table.add_column(name, justify="right" if name in right else "left")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def counted(number: int, noun: str) -> str:
    """Write a number of things.

    >>> counted(1, "cluster"), counted(2, "cluster")
    ('1 cluster', '2 clusters')
    """
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _facts(status: Mapping[str, Any]) -> list[tuple[str, str]]:
    get = status.get
    running = "runs" if get("running") else f"does not run; this is its state of {_dated(get('time'))}"
    rows = [("node", f"{get('name')} ({str(get('id', ''))[:7]}), {running}")]
    if saved := get("saved"):
        rows.append(
            ("last save", f"round {saved['round']}, of {_dated(saved['time'])}: the next start continues from it")
        )
    rows.append(
        ("swarm", f"{get('swarm_name')} ({str(get('swarm', ''))[:7]}), {counted(get('members') or 0, 'member')}")
    )
    rounds = "" if (get("rounds") or 0) >= 2**50 else f" of {get('rounds')}"
    took = "" if get("round_s") is None else f", {get('round_s'):.2g} s each"
    waits = "" if get("state") == "training" or not get("waits") else f"; {get('waits')}"
    rows.append(("round", f"{get('round')}{rounds}, {get('state')}{took}{waits}"))
    if get("rest_s"):
        rows.append(("rest", f"{get('rest_s'):.0f} s between rounds: nothing is learned; new data or models end it"))
    cluster = "none yet" if get("cluster") is None else f"{get('cluster')} of {get('clusters')}"
    rows.append(("cluster", cluster))
    for key, (title, form) in SCORES.items():
        if get(key) is None:
            continue
        scores = [format(score[key], form) for score in get("scores") or () if score.get(key) is not None]
        others = f" (all clusters: {', '.join(scores)})" if len(scores) > 1 else ""
        samples = get("samples") or {}
        rows.append((title, f"{format(get(key), form)} on {samples.get('held_out')} held-out samples{others}"))
    if personal := get("personal"):
        rows.append(("personal step", _personal(personal)))
    if privacy := get("privacy"):
        spent = f"epsilon {privacy['epsilon']:.3g} at delta {privacy['delta']:g}"
        rows.append(("privacy", f"{spent}, after {counted(privacy['updates'], 'update')}"))
    if get("loss") is not None:
        rows.append(("loss", f"{get('loss'):.4g} on {(get('samples') or {}).get('train')} samples, before training"))
    if get("staleness") is not None:
        rows.append(("staleness", f"{get('staleness'):.2g} updates, {get('folds')} folded, {get('drops')} dropped"))
    rows.append(
        ("traffic", f"{format_traffic(get('bytes_in', 0))} received, {format_traffic(get('bytes_out', 0))} sent")
    )
    if get("returns"):
        left_out = ", ".join(f"{count} of {name}" for name, count in sorted((get("left_out") or {}).items()))
        text = f"went back to its last good models {counted(get('returns') or 0, 'time')}"
        rows.append(("guard", f"{text}; left out: {left_out or 'nothing'}"))
    refused = ", ".join(f"{reason} {count}" for reason, count in sorted((get("refused") or {}).items()))
    rows.append(("refused", refused or "nothing"))
    rows += [("problem", text) for text in get("problems") or ()]
    last = get("last_error")
    if last and last["text"] not in (get("problems") or ()):
        rows.append(("last error", f"{last['text']} ({last['time']})"))
    return rows


def _dated(time: str | None) -> str:
    """Write a time of a status with how long ago it was."""
    try:
        return f"{time} ({format_ago((datetime.now(UTC) - datetime.fromisoformat(str(time))).total_seconds())})"
    except (ValueError, TypeError):
        return str(time)


def _personal(step: Mapping[str, Any]) -> str:
    if not step["steps"] and not step.get("samples"):
        return "none: nothing is held out to pick it on"
    if not step["steps"]:
        return f"none: on {step.get('samples')} held-out samples the swarm's model is the best"
    parts = [f"{step['steps']} steps before the model is used"]
    if step.get("losses") and None not in step["losses"]:
        before, after = step["losses"]
        parts.append(f"loss {before:.4g} -> {after:.4g} on {step['samples']} held-out samples")
    for key, (title, form) in SCORES.items():
        if step.get(key) is not None:
            parts.append(f"then {title} {format(step[key], form)}")
    return ", ".join(parts)


def _cells(neighbour: Mapping[str, Any], running: bool) -> list[str]:
    """Write a row of a neighbour; if the node does not run, without how long ago it was heard."""
    texts = {key: "" if value is None else str(value) for key, value in neighbour.items()}
    name, state, round, address, error = (
        texts.get(key, "") for key in ("name", "state", "round", "address", "last_error")
    )
    rtt_s, silent_s = neighbour.get("rtt_s"), neighbour.get("silent_s")
    rtt = "" if rtt_s is None else f"{1000 * rtt_s:.1f} ms"
    seen = "" if silent_s is None or not running else format_ago(silent_s)
    traffic = (format_traffic(neighbour.get(key) or 0) for key in ("bytes_in", "bytes_out"))
    problem = "" if state == "up" else _brief(error)
    return [name, state if running else f"was {state}", round, seen, rtt, *traffic, address, problem]


def _brief(error: str) -> str:
    """Shorten gRPC's error of a dial to its cause; the address has its own column.

    >>> _brief("10.0.0.2:7447: broken: failed to connect to all addresses; last error: UNKNOWN: Connection refused")
    'Connection refused'
    """
    return error.rpartition(": ")[2] if "failed to connect" in error else error


def format_ago(seconds: float) -> str:
    """Write how long ago something was.

    >>> format_ago(0.04), format_ago(150), format_ago(7200), format_ago(1e6)
    ('0.0 s ago', '2 min ago', '2 h ago', '11 days ago')
    """
    for unit, size in (("days", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds // size:.0f} {unit} ago"
    return f"{seconds:.1f} s ago"


def format_traffic(count: float) -> str:
    """Write bytes that were sent or received, in powers of ten, as networks are measured.

    >>> format_traffic(999), format_traffic(12_345), format_traffic(5e12)
    ('999 B', '12.3 kB', '5000.0 GB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError
