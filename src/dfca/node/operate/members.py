"""All members of a swarm: as one node knows them (`dfca node members`), and as they answer (`dfca node status --all`).

The first is from the roster, the node's links, and what it has heard. For the second each member is dialled and says a
few things about itself. Of one that cannot be dialled (it does not run, or is behind a NAT) the table has what this
device's node knows of the link.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dfca.base.errors import DfcaError
from dfca.node.disk.folder import NodeFolder
from dfca.node.operate.control import NotRunning, call
from dfca.node.operate.status import SCORES, format_ago, plain_table, read_status
from dfca.node.trust.identity import short

if TYPE_CHECKING:
    from rich.console import RenderableType

    from dfca.node.trust.membership import Member
    from dfca.node.trust.roster import Roster

OWN, NONE = "this device", "none"
SAID = ("version", "state", "round", "round_s", "cluster", "clusters", *SCORES, "members")
AT_ONCE = 32
MOST_PROBLEMS, MOST_TEXT = 3, 400


def describe_members(
    roster: Roster, own: str, links: Mapping[str, Mapping[str, Any]], silent_s: Mapping[str, float]
) -> list[dict[str, Any]]:
    """Describe every member. links: of the neighbours, by ID; silent_s: how long ago each was heard since the start.

    Members other than neighbours have no link, and are not asked whether they run; `announced` is when a member last
    announced its addresses, by its own clock: at its first start and when they change.
    """
    announced = roster.announced()
    return [
        {
            "name": member.name,
            "id": member.id,
            "link": OWN if member.id == own else links.get(member.id, {}).get("state", NONE),
            "silent_s": silent_s.get(member.id),
            "announced": _date(announced.get(member.id)),
            "addresses": list(member.addresses),
            "may_introduce": member.may_introduce,
        }
        for member in sorted(roster.members().values(), key=lambda member: member.name)
    ]


def _date(seconds: int | None) -> str | None:
    try:
        return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
    except (ValueError, OverflowError, OSError):
        return None  # a device may claim any time


def read_members(folder: Path) -> dict[str, Any]:
    """Ask the node that runs in a folder for the members; if none runs, read the roster, without links.

    Raises DfcaError if there is no node, or its roster cannot be read.
    """
    try:
        return {"running": True, **call(folder, "members", timeout_s=10.0)}
    except NotRunning:
        loaded = NodeFolder.load(folder)
        return {"running": False, "members": describe_members(loaded.roster, loaded.identity.id, {}, {})}


def members_table(answer: Mapping[str, Any]) -> RenderableType:
    """Make a table of what `read_members` returns."""
    from rich.console import Group
    from rich.text import Text

    rows = []
    for member in answer["members"]:
        link = member["link"] if answer["running"] or member["link"] == OWN else ""
        addresses, may = ", ".join(member["addresses"]), "yes" if member["may_introduce"] else ""
        rows.append((member["name"], short(member["id"]), link, _heard(member), addresses, may))
    table = plain_table(("member", "ID", "link", "last heard", "addresses", "may invite"), rows)
    return table if answer["running"] else Group(table, Text("the node does not run: it has no links", style="dim"))


def _heard(member: Mapping[str, Any]) -> str:
    if member["link"] == OWN:
        return ""
    if member["silent_s"] is not None:
        return format_ago(member["silent_s"])
    said = member["announced"]
    return "never" if said is None else f"published its address {said[:16].replace('T', ' ')} UTC"


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
    from rich.text import Text

    members = answer["members"]
    names = ("member", "version", "state", "round", "cluster", "score", "links")
    table = plain_table(names, map(_cells, members), right=("round", "score", "links"))
    problems = [Text(f"{member['name']}: {text}") for member in members for text in member.get("problems") or ()]
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
