"""`dfca keys`: an authority for fleets. It introduces devices by files, and their private keys never leave them."""

from pathlib import Path
from typing import Annotated

import typer

from dfca.base.errors import DataError, RunError
from dfca.cli.console import make_console
from dfca.cli.node import need_libraries

commands = typer.Typer(
    name="keys",
    help="Fleets: an authority that introduces devices by files; private keys never leave a device.",
    no_args_is_help=True,
)

Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="A folder for the authority, or of a node.")]
Authority = Annotated[Path, typer.Argument(metavar="AUTHORITY", help="The folder of the authority.")]
NodeFolder = Annotated[Path, typer.Argument(metavar="NODE", help="The folder of a node.")]
Out = Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Where to write it.")]
Name = Annotated[str | None, typer.Option("--name", metavar="NAME", help="What people call the device.")]
Addresses = Annotated[
    list[str] | None, typer.Option("--address", metavar="HOST:PORT", help="Where the device listens; may be repeated.")
]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.")]


@commands.command()
def init(folder: Folder) -> None:
    """Make an authority: a key and its fingerprint. Keep its folder on a machine that you trust, and a copy of it."""
    need_libraries("dfca keys")
    from dfca.node.trust.identity import Identity

    identity = Identity.create(folder)
    _print(f"authority in {folder}")
    _print_fingerprint(identity.id)


@commands.command()
def show(folder: Folder) -> None:
    """Show the fingerprint of an authority or a node, and the members that it knows."""
    need_libraries("dfca keys")
    from dfca.node.trust.authority import ROSTER_FILE
    from dfca.node.trust.identity import Identity, fingerprint
    from dfca.node.trust.roster import Roster

    _print_fingerprint(Identity.load(folder).id)
    if (folder / ROSTER_FILE).exists():
        for member in Roster.load(folder / ROSTER_FILE).members().values():
            role = "  may introduce" if member.may_introduce else ""
            _print(f"{member.name}  {fingerprint(member.id)}  {' '.join(member.addresses)}{role}".rstrip())


@commands.command()
def request(node: NodeFolder, name: Name = None, address: Addresses = None, out: Out = None) -> None:
    """Write the request of a device, on the device; a folder without a key gets one.

    [bold]Example[/bold]

      dfca keys request kitchen --name kitchen --address 192.0.2.20:7447
    """
    need_libraries("dfca keys")
    from dfca.node.trust.authority import make_request, read_request

    known_name, known_addresses = _own_contact(node)
    data = make_request(node, name or known_name, address or known_addresses)
    path = out or Path(f"{node.resolve().name}.request.json")
    _write(path, data)
    _print(f"request in {path}; have it signed: dfca keys sign AUTHORITY {path}")
    _print_fingerprint(read_request(data).id)


@commands.command()
def sign(
    authority: Authority,
    request: Annotated[Path, typer.Argument(metavar="REQUEST", help="The file of `dfca keys request`.")],
    name: Name = None,
    address: Addresses = None,
    may_introduce: Annotated[
        bool, typer.Option("--may-introduce", help="The device may introduce and remove others.")
    ] = False,
    yes: Yes = False,
    out: Out = None,
) -> None:
    """Introduce the device of a request, once its fingerprint is the one that the device shows; write its bundle."""
    need_libraries("dfca keys")
    from dfca.node.trust.authority import read_request, sign_request

    asked = read_request(_read(request))
    _print_fingerprint(asked.id)
    _confirm("Does the device show the same fingerprint?", yes)
    member, bundle = sign_request(authority, asked, name, address or (), may_introduce)
    path = out or Path(f"{request.name.removesuffix('.json').removesuffix('.request')}.bundle.json")
    _write(path, bundle)
    _print(f"{member.name} is a member; bundle in {path}; on the device: dfca keys accept NODE {path}")


@commands.command()
def accept(
    node: NodeFolder,
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE", help="The file of `dfca keys sign`.")],
    yes: Yes = False,
) -> None:
    """Accept a bundle on the device, once its fingerprint is the one that the authority shows."""
    need_libraries("dfca keys")
    from dfca.node.trust.authority import accept_bundle, read_bundle

    read = read_bundle(_read(bundle))
    _print_fingerprint(read.authority)
    _confirm("Does the authority show the same fingerprint (dfca keys show)?", yes)
    members = accept_bundle(node, read).members()
    _print(f"{node} belongs to the fleet: " + ", ".join(sorted(member.name for member in members.values())))


@commands.command()
def remove(
    authority: Authority,
    member: Annotated[str, typer.Argument(metavar="MEMBER", help="Its name, or its ID.")],
    yes: Yes = False,
    out: Out = None,
) -> None:
    """Remove a member of the fleet for ever; one other member accepts the bundle and tells the others."""
    need_libraries("dfca keys")
    from dfca.node.trust.authority import remove_member
    from dfca.node.trust.identity import short

    _confirm(f"Remove {member}? This is final.", yes)
    removed, bundle = remove_member(authority, member)
    path = out or Path(f"{short(removed.id)}.removed.json")
    _write(path, bundle)
    _print(f"{removed.name} is removed; bundle in {path}; on any other device: dfca keys accept NODE {path}")


def _own_contact(node: Path) -> tuple[str | None, tuple[str, ...]]:
    """Return the name and the addresses of a device from its settings, if it has some."""
    from dfca.node.addresses import own_addresses
    from dfca.node.task.config import FILE, NodeConfig

    if not (node / FILE).exists():
        return None, ()
    config = NodeConfig.load(node)
    port = config.network.port
    return config.name, own_addresses(config, port) if port else ()


def _confirm(question: str, yes: bool) -> None:
    try:
        agreed = yes or typer.confirm(question)
    except typer.Abort as error:
        raise RunError("nothing was changed; where nobody can answer, use --yes") from error
    if not agreed:
        raise RunError("nothing was changed")


def _print(text: str) -> None:
    make_console().print(text, highlight=False, markup=False, soft_wrap=True)


def _print_fingerprint(id: str) -> None:
    from dfca.node.trust.identity import fingerprint

    _print(f"fingerprint  {fingerprint(id)}")


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}; check the name of the file") from error


def _write(path: Path, data: bytes) -> None:
    from dfca.base.files import atomic_write

    atomic_write(path, data + b"\n")
