"""`dfca node`: a device that takes part in a swarm."""

import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from dfca import __version__
from dfca.base.errors import ConfigError, DfcaError
from dfca.cli.arguments import parse_names
from dfca.cli.console import make_console

commands = typer.Typer(
    name="node", help="Run this device as a member of a swarm: no server, no coordinator.", no_args_is_help=True
)
OWN_PROCESS = "this process is the command's own"  # context of `dfca.cli.main`; calls from Python keep the process
LIBRARIES = ("grpc", "google.protobuf", "cryptography", "segno", "zstandard", "prometheus_client")

SHARED = "The model of its cluster as the swarm has it, without the personal last step."
Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder of the node.")]
Data = Annotated[
    str, typer.Option(metavar="PATH", help="CSV, Parquet, npz or safetensors file, image folder, or module:function.")
]
Label = Annotated[str | None, typer.Option(metavar="COLUMN", help="The column with the class, or the number.")]
Name = Annotated[str | None, typer.Option(metavar="NAME", help="Of this device.", show_default="the folder's")]
Features = Annotated[str | None, typer.Option(metavar="A,B", help="The columns to use.", show_default="all")]
Ignore = Annotated[str | None, typer.Option(metavar="A,B", help="Columns that are no features, such as a time.")]
Test = Annotated[str | None, typer.Option(metavar="PATH", help="Samples to score with, instead of held-out ones.")]
DropMissing = Annotated[bool, typer.Option("--drop-missing", help="Drop rows with empty values.")]
Port = Annotated[int | None, typer.Option(metavar="N", help="The port to listen on.", show_default="7447")]
Host = Annotated[str | None, typer.Option(metavar="ADDRESS", help="The address to listen on.", show_default="all")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Any key of node.toml; may be given several times."),
]
Factory = Annotated[
    str | None, typer.Option(metavar="MODULE:FUNCTION", help="The swarm's model is this code, which you trust.")
]
Weights = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="Weights that the model starts from (safetensors); all devices need this file."),
]


@commands.command()
def init(
    context: typer.Context,
    folder: Folder,
    data: Data,
    label: Label = None,
    model: Annotated[str, typer.Option(metavar="NAME", help="mlp, cnn, cnn1d, or module:function.")] = "mlp",
    hidden: Annotated[str | None, typer.Option(metavar="N,M", help="Units of the hidden layers.")] = None,
    classes: Annotated[
        str | None, typer.Option(metavar="A,B", help="All classes of the swarm.", show_default="those of the data")
    ] = None,
    clusters: Annotated[int | None, typer.Option(metavar="K", help="How many.", show_default="found")] = None,
    expect: Annotated[
        int, typer.Option(metavar="N", min=1, max=100_000, help="Nobody trains before N members have joined.")
    ] = 1,
    algorithm: Annotated[str, typer.Option(metavar="NAME", help="What the swarm runs.")] = "dfca-auto",
    task: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="classification; regression: the label is a number; forecasting: the label's later value; multilabel: "
            "--label A,B names columns of 0 and 1.",
        ),
    ] = "classification",
    window: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Rows that a forecast looks at.", show_default="16")
    ] = None,
    horizon: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Rows ahead that a forecast is of.", show_default="1")
    ] = None,
    swarm: Annotated[str | None, typer.Option(metavar="NAME", help="Of the swarm.", show_default="the node's")] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Of everything random.")] = 0,
    name: Name = None,
    features: Features = None,
    ignore: Ignore = None,
    test: Test = None,
    drop_missing: DropMissing = False,
    weights: Weights = None,
    host: Host = None,
    port: Port = None,
    set_: Set = None,
    agree: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="A fact of the swarm, such as local.steps=20; repeatable."),
    ] = None,
) -> None:
    """Found a swarm: make a key, a certificate, the settings (node.toml) and the swarm's facts; print the device ID.

    [bold]Example[/bold]

      dfca node init kitchen --data a.csv --label activity --model mlp
    """
    with _command():
        from dfca.node.operate.commands import init_node, parse_settings
        from dfca.node.task.founding import Founding

        _own_modules()
        made = init_node(
            folder,
            Founding(
                **_device_options(context.params),
                swarm=swarm,
                model=model,
                hidden=_numbers(hidden),
                classes=_tuple(classes),
                clusters=clusters,
                algorithm=algorithm,
                task=task,
                window=window,
                horizon=horizon,
                seed=seed,
                agreed={"starts_with": expect, **parse_settings(agree or (), "--agree")},
            ),
        )
    facts, console = made.facts, make_console()
    console.print(f"device ID  {made.identity.id}", highlight=False)
    console.print(
        f"swarm      {escape(facts.name)}: {facts.algorithm}, {facts.model.name} of {facts.model.size} numbers, "
        + escape(facts.describe_task()),
        highlight=False,
    )
    console.print(f"[dim]settings are in {folder}/node.toml; next:[/dim] dfca node run {folder}", highlight=False)


@commands.command()
def run(
    context: typer.Context,
    folder: Folder,
    log_format: Annotated[
        str | None, typer.Option(metavar="human|json", help="Form of the log.", show_default="as in node.toml")
    ] = None,
    record: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write down all inputs of the peer, for a replay.")
    ] = None,
    until_done: Annotated[bool, typer.Option("--until-done", help="End when all rounds are done.")] = False,
    with_parent: Annotated[
        bool, typer.Option("--with-parent", help="End when the standard input is closed, as by the end of a script.")
    ] = False,
) -> None:
    """Run the node until Ctrl-C or SIGTERM; it continues where it was, also after kill -9 or a power cut."""
    if log_format not in (None, "human", "json"):
        raise ConfigError(f'--log-format must be human or json, got "{log_format}"')
    with _command():
        if context.obj == OWN_PROCESS and sys.platform != "win32":
            from dfca.node.__main__ import become_node

            paths = {"folder": str(folder), "record": None if record is None else str(record)}
            debug = bool(context.find_root().params.get("debug"))
            flags = {"until_done": until_done, "with_parent": with_parent, "debug": debug}
            become_node({**paths, **flags, "log_format": log_format, "version": __version__})
        _own_modules()
        from dfca.node.run import run_node
        from dfca.node.service import ServiceOptions

        options = ServiceOptions(log_format, None, record, until_done, __version__)  # type: ignore[arg-type]
        run_node(folder, options, with_parent)


@commands.command()
def invite(
    folder: Folder,
    minutes: Annotated[float, typer.Option(metavar="M", min=0.1, max=1440, help="How long it is valid.")] = 10.0,
    may_introduce: Annotated[
        bool, typer.Option("--may-introduce", help="The new device may invite and remove others.")
    ] = False,
    wait: Annotated[
        bool | None,
        typer.Option(
            "--wait/--no-wait",
            help="Wait for the device, and show the code that both screens have.",
            show_default="wait in a terminal, not in a pipe",
        ),
    ] = None,
) -> None:
    """Let one new device join: print one line and a QR code, valid once and for ten minutes.

    In a pipe or a script it prints the line alone and returns; the invite stays open.
    """
    with _command():
        from dfca.node.operate.control import call
        from dfca.node.trust.invite import qr

        answer = call(folder, "invite", lifetime_s=60 * minutes, may_introduce=may_introduce)
        console = make_console()
        print(answer["invite"], flush=True)
        if console.is_terminal:
            print(qr(answer["invite"]))
            line = escape(answer["invite"])
            console.print(f"[dim]on the new device:[/dim] dfca node join NAME '{line}' --data FILE", soft_wrap=True)
        if wait if wait is not None else console.is_terminal:
            _wait_for_guest(folder, answer)


def _wait_for_guest(folder: Path, answer: dict[str, Any]) -> None:
    from dfca.base.errors import RunError
    from dfca.node.operate.control import call

    while True:
        time.sleep(0.5)
        news = call(folder, "joined", since=answer["joined"])
        for device in news["joined"]:
            print(f"{device['name']} has joined; both screens show {device['code']}", flush=True)
        if news["joined"]:
            return
        if not news["open"]:
            raise RunError("nobody has joined in time, or with a wrong secret; make a new invite")


@commands.command()
def join(
    context: typer.Context,
    folder: Folder,
    invite: Annotated[str, typer.Argument(metavar="INVITE", help="The line that `dfca node invite` printed.")],
    data: Data,
    label: Label = None,
    name: Name = None,
    features: Features = None,
    ignore: Ignore = None,
    test: Test = None,
    drop_missing: DropMissing = False,
    factory: Factory = None,
    weights: Weights = None,
    host: Host = None,
    port: Port = None,
    set_: Set = None,
) -> None:
    """Make a node and pair it: the inviter's ID is checked, then the data against the swarm's model, then it joins.

    [bold]Example[/bold]

      dfca node join garage 'dfca1:192.0.2.20:7448/...' --data b.csv
    """
    with _command():
        from dfca.node.trust.invite import Invite

        Invite.parse(invite)  # before what follows, which loads torch
        from dfca.node.operate.commands import join_node
        from dfca.node.task.founding import JoinPlan

        _own_modules()
        made = join_node(folder, invite, JoinPlan(**_device_options(context.params), factory=factory))
    console = make_console()
    console.print(f"device ID  {made.identity.id}", highlight=False)
    console.print(f"joined     {escape(made.facts.name)}, invited by {escape(made.inviter)}", highlight=False)
    console.print(f"code       [bold]{made.code}[/bold] (the same on the inviter's screen)", highlight=False)
    console.print(f"[dim]next:[/dim] dfca node run {folder}", highlight=False)


@commands.command()
def status(
    folder: Folder,
    members: Annotated[
        bool, typer.Option("--members", help="All members of the swarm instead, as this node knows them.")
    ] = False,
    all_: Annotated[bool, typer.Option("--all", help="All members instead: each is asked what it does.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="Everything, as one JSON object.")] = False,
) -> None:
    """Show what the node does: neighbours, cluster, round, accuracy, staleness, bytes, the last error."""
    import json

    from dfca.node.operate.status import read_status, status_table

    with _command(libraries=members or all_):
        if members:
            from dfca.node.operate.members import members_table, read_members

            answer = read_members(folder)
            table = members_table(answer)
        elif all_:
            from dfca.node.operate.members import ask_all, overview_table

            answer = ask_all(folder)
            table = overview_table(answer)
        else:
            answer = read_status(folder)
            table = status_table(answer)
    if json_:
        print(json.dumps(answer, indent=1))
    else:
        make_console().print(table)


@commands.command()
def doctor(folder: Folder) -> None:
    """Check ports, reachability both ways, clock, disk, certificate and data; each failure comes with its cure."""
    with _command():
        from dfca.node.operate.doctor import examine

        _own_modules()
        console, failed = make_console(), 0
        for check in examine(folder):
            mark = {"ok": "[green]ok  [/green]", "warning": "[yellow]warn[/yellow]"}.get(
                check.outcome, "[red]FAIL[/red]"
            )
            console.print(f"{mark}  {check.name:13} {escape(check.text)}", highlight=False, soft_wrap=True)
            if check.cure:
                console.print(f"      {'':13} [bold]{escape(check.cure)}[/bold]", highlight=False, soft_wrap=True)
            failed += check.outcome == "failure"
    raise typer.Exit(1 if failed else 0)


@commands.command()
def remove(folder: Folder, member: Annotated[str, typer.Argument(help="The name or ID of a member.")]) -> None:
    """Remove a member for ever: all others refuse it as soon as they hear of it."""
    with _command():
        from dfca.node.disk.folder import NodeFolder
        from dfca.node.operate.control import NotRunning, call
        from dfca.node.service import remove_member

        try:
            removed, note = call(folder, "remove", member=member)["removed"], "the others hear of it now"
        except NotRunning:
            loaded = NodeFolder.load(folder)
            with loaded.lock():
                removed, note = remove_member(loaded, member), "the others hear of it when this node runs"
    print(f"{removed} is removed; {note}")


@commands.command()
def stop(folder: Folder) -> None:
    """End the node that runs in a folder, and wait until it has ended."""
    from dfca.node.operate.control import stop_node

    with _command(libraries=False):
        ended = stop_node(folder)
    place = f", in round {ended['round']}" if "round" in ended else ""  # an older node does not say
    print(f"{ended.get('name', folder)} is stopped{place}; continue: dfca node run {folder}")


@commands.command()
def export(
    folder: Folder,
    onnx: Annotated[Path | None, typer.Option(metavar="FILE", help="Write an ONNX model of raw inputs.")] = None,
    safetensors: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the weights and the facts.")] = None,
    cluster: Annotated[
        int | None, typer.Option(metavar="J", min=0, help="Which model.", show_default="its own")
    ] = None,
    shared: Annotated[bool, typer.Option("--shared", help=SHARED)] = False,
) -> None:
    """Write the node's model as a file for other programs."""
    with _command():
        if onnx is None and safetensors is None:
            raise ConfigError("name a file to write: --onnx FILE or --safetensors FILE")
        from dfca.node.operate.commands import load_model
        from dfca.node.task.export import to_onnx, to_safetensors

        _own_modules()
        exported = load_model(folder, cluster, shared)
        for path, write in ((onnx, to_onnx), (safetensors, to_safetensors)):
            if path is not None:
                write(exported, path)
                print(f"{path}: {exported.describe()}")


@commands.command()
def predict(
    folder: Folder,
    data: Annotated[str, typer.Argument(metavar="DATA", help="Samples without a label, in the form of the data.")],
    cluster: Annotated[
        int | None, typer.Option(metavar="J", min=0, help="Which model.", show_default="its own")
    ] = None,
    shared: Annotated[bool, typer.Option("--shared", help=SHARED)] = False,
) -> None:
    """Predict the classes of new samples; prints CSV: row, class, probability. Of a regression: row, value."""
    with _command():
        from dfca.node.operate.commands import predict_file

        _own_modules()
        text, _ = predict_file(folder, data, cluster, shared)
    sys.stdout.write(text)


@commands.command()
def install(
    folder: Folder,
    write: Annotated[bool, typer.Option("--write", help="Write the unit into /etc/systemd/system.")] = False,
    user: Annotated[str | None, typer.Option(metavar="NAME", help="Who runs it.", show_default="you")] = None,
    to: Annotated[Path | None, typer.Option(metavar="DIR", help="Write the unit into another folder.")] = None,
) -> None:
    """Print a systemd unit that runs the node from the next boot on, or write it."""
    from dfca.node.operate.install import make_unit, unit_name, write_unit

    with _command(libraries=False):
        from dfca.node.task.config import NodeConfig

        config = NodeConfig.load(folder)
        text = make_unit(folder, user, config.training.device, config.data_paths(folder))
        if not write and to is None:
            sys.stdout.write(text)
            return
        path = write_unit(folder, text, to)
    print(f"{path}; start it now and at every boot: systemctl enable --now {unit_name(folder.resolve())}")


@commands.command()
def replay(
    recording: Annotated[Path, typer.Argument(metavar="FILE", help="What `dfca node run --record FILE` wrote.")],
) -> None:
    """Drive a peer by the recorded inputs of a device, and check that it does the same, bit by bit."""
    with _command():
        from dfca.base.errors import RunError
        from dfca.node.disk.record import first_difference, read_recording
        from dfca.peer.machine import Memory
        from dfca.peer.peer import Peer

        read = read_recording(recording)
        memory = Memory(read.options.size, read.options.dtype)
        peer = Peer(read.options, memory, read.incarnation, read.saved)
        count = first_difference(read, peer)
        if count is not None:
            raise RunError(f"the replay differs from the recording after input {count} of {len(read.inputs)}")
    cut = "" if read.complete else " (the recording is cut)"
    print(f"{len(read.inputs)} inputs, {len(read.checks)} saves, all the same bits; round {peer.round}{cut}")


@contextmanager
def _command(libraries: bool = True) -> Iterator[None]:
    """Check libraries first; errors that a user can mend end with status 2, and 1 is for unexpected ones."""
    try:
        if libraries:
            need_libraries("dfca node")
        yield
    except DfcaError as error:
        error.status = 2
        raise


def need_libraries(command: str) -> None:
    """Raise ConfigError where the extra `node` is not installed."""
    from importlib.util import find_spec

    try:
        missing = any(find_spec(name) is None for name in LIBRARIES)
    except ModuleNotFoundError:  # the package of a library
        missing = True
    if missing:
        raise ConfigError(f"{command} needs more libraries: pip install 'dfca[node]'")


def _own_modules() -> None:
    """Let "module:function" name code in the folder where dfca is called; after our own imports, which come first."""
    sys.path.insert(0, os.getcwd())


def _device_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that `init` and `join` have in common."""
    return {
        **{key: given[key] for key in ("data", "label", "name", "test", "drop_missing", "weights")},
        "features": _tuple(given["features"]),
        "ignore": _tuple(given["ignore"]) or (),
        "settings": _settings(given["host"], given["port"], given["set_"]),
    }


def _tuple(text: str | None) -> tuple[str, ...] | None:
    names = parse_names(text)
    return None if names is None else tuple(names)


def _numbers(text: str | None) -> tuple[int, ...] | None:
    try:
        return None if text is None else tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f'--hidden takes numbers such as 100 or 64,32, got "{text}"') from None


def _settings(host: str | None, port: int | None, pairs: list[str] | None) -> dict[str, Any]:
    from dfca.node.operate.commands import parse_settings

    settings = parse_settings(pairs or (), "--set")
    network = {key: value for key, value in (("host", host), ("port", port)) if value is not None}
    if network:
        settings["network"] = {**settings.get("network", {}), **network}
    return settings
