"""All members of a swarm as one node knows them: from the roster, its links, and what it has heard."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dfca.node.operate.control import NotRunning, call
from dfca.node.operate.status import format_ago
from dfca.node.trust.identity import short

if TYPE_CHECKING:
    from rich.console import RenderableType

    from dfca.node.trust.roster import Roster

OWN, NONE = "this device", "none"


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
        from dfca.node.disk.folder import NodeFolder

        loaded = NodeFolder.load(folder)
        return {"running": False, "members": describe_members(loaded.roster, loaded.identity.id, {}, {})}


def members_table(answer: Mapping[str, Any]) -> RenderableType:
    """Make a table of what `read_members` returns."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for name in ("member", "ID", "link", "last heard", "addresses", "may invite"):
        table.add_column(name)
    for member in answer["members"]:
        link = member["link"] if answer["running"] or member["link"] == OWN else ""
        addresses, may = ", ".join(member["addresses"]), "yes" if member["may_introduce"] else ""
        cells = (member["name"], short(member["id"]), link, _heard(member), addresses, may)
        table.add_row(*(Text(cell) for cell in cells))
    return table if answer["running"] else Group(table, Text("the node does not run: it has no links", style="dim"))


def _heard(member: Mapping[str, Any]) -> str:
    if member["link"] == OWN:
        return ""
    if member["silent_s"] is not None:
        return format_ago(member["silent_s"])
    said = member["announced"]
    return "never" if said is None else f"published its address {said[:16].replace('T', ' ')} UTC"
