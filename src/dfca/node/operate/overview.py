"""`dfca node status --all`: what all members of a swarm do, asked from one device.

Each member is dialled and says a few things about itself. Of one that cannot be dialled (it does not run, or is behind
a NAT) the table has what this device's node knows of the link.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dfca.base.errors import DfcaError
from dfca.node.disk.folder import NodeFolder
from dfca.node.operate.status import SCORES, read_status

if TYPE_CHECKING:
    from rich.console import RenderableType

    from dfca.node.trust.membership import Member

SAID = ("version", "state", "round", "round_s", "cluster", "clusters", *SCORES, "members")
AT_ONCE = 32
MOST_PROBLEMS, MOST_TEXT = 3, 400


def summarise(status: Mapping[str, Any]) -> str:
    """Write what a node says of itself to members that ask; with privacy nothing that its data decides."""
    private = status.get("privacy") is not None
    said = {key: status.get(key) for key in SAID if not (private and key in SCORES)}
    said["linked"] = sum(neighbour["state"] == "up" for neighbour in status.get("neighbours", ()))
    said["problems"] = (
        [] if private else [str(text)[:MOST_TEXT] for text in (status.get("problems") or [])[:MOST_PROBLEMS]]
    )
    return json.dumps(said)


def ask_all(folder: Path) -> dict[str, Any]:
    """Ask every member what it does; returns {"members": [...]}, by name. Raises DfcaError if there is no node."""
    node = NodeFolder.load(folder)
    try:
        own = read_status(folder)
    except DfcaError:
        own = {}
    known = {neighbour.get("id"): neighbour for neighbour in own.get("neighbours", ()) if own.get("running")}
    return {"members": asyncio.run(_ask_all(node, own, known))}


async def _ask_all(node: NodeFolder, own: Mapping[str, Any], known: Mapping[str, Any]) -> list[dict[str, Any]]:
    gate = asyncio.Semaphore(AT_ONCE)

    async def ask(member: Member) -> dict[str, Any]:
        entry: dict[str, Any] = {"name": member.name, "id": member.id}
        if member.id == node.identity.id:
            said = read_summary(summarise(own)) if own.get("running") else {"state": "does not run"}
        else:
            async with gate:
                said = await _ask(node, member)
        if not said:
            link = known.get(member.id, {})
            said = {"state": f"not asked: link {link['state']}" if link else "no answer", "round": link.get("round")}
        return {**entry, **said}

    members = sorted(node.roster.members().values(), key=lambda member: member.name)
    return list(await asyncio.gather(*map(ask, members)))


async def _ask(node: NodeFolder, member: Member) -> dict[str, Any]:
    from dfca.node.net.probe import probe

    for address in member.addresses[:4]:
        probed = await probe(node.identity, member, address, node.config.network.insecure, False, summary=True)
        if not probed.error:
            return read_summary(probed.summary) or {"state": "answers; its version says no more"}
    return {}


def read_summary(text: str) -> dict[str, Any]:
    """Read what a member said of itself; of anything else than expected, nothing."""
    try:
        said = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(said, dict):
        return {}
    plain = {key: said.get(key) for key in (*SAID, "linked") if isinstance(said.get(key), str | int | float | None)}
    problems = said.get("problems")
    listed = [str(text)[:MOST_TEXT] for text in problems[:MOST_PROBLEMS]] if isinstance(problems, list) else []
    return {**plain, "problems": listed}


def overview_table(answer: Mapping[str, Any]) -> RenderableType:
    """Make a table of the members, with their problems below."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for name in ("member", "version", "state", "round", "cluster", "score", "links"):
        table.add_column(name, justify="right" if name in ("round", "score", "links") else "left")
    problems = []
    for member in answer["members"]:
        table.add_row(*map(Text, _cells(member)))
        problems += [Text(f"{member['name']}: {text}") for text in member.get("problems") or ()]
    return Group(table, *([Text(""), *problems] if problems else ()))


def _cells(member: Mapping[str, Any]) -> list[str]:
    def written(key: str, form: str = "") -> str:
        value = member.get(key)
        try:
            return "" if value is None else format(value, form)
        except ValueError:
            return "?"

    cluster = "" if member.get("cluster") is None else f"{written('cluster')} of {written('clusters')}"
    score = next((text for key, (_, form) in SCORES.items() if (text := written(key, form))), "")
    return [member["name"], written("version"), written("state"), written("round"), cluster, score, written("linked")]
