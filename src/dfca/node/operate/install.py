"""A systemd unit that runs a node: as an ordinary user, with nothing writable but its own folder."""

from __future__ import annotations

import getpass
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from dfca.base.errors import ConfigError, RunError

UNITS = Path("/etc/systemd/system")
HOMES, TEMPORARY = ("/home", "/root", "/run/user"), ("/tmp", "/var/tmp")

_UNIT = """\
# Written by `dfca node install`. Start it now and at every boot: systemctl enable --now {unit}
[Unit]
Description=dfca node {name}
Wants=network-online.target
After=network-online.target time-sync.target
StartLimitIntervalSec=0

[Service]
Type=exec
User={user}
WorkingDirectory={folder}
ExecStart={command} node run {quoted} --log-format json
# Later and later, where it ends again and again (systemd 254 and newer).
Restart=always
RestartSteps=6
RestartMaxDelaySec=300
RestartSec=5
TimeoutStopSec=15
Nice=5
UMask=0077

# What a node does not need, it does not have.
NoNewPrivileges=yes
ProtectSystem=strict
ReadWritePaths={folder}
{sight}
PrivateDevices={private_devices}
ProtectKernelTunables=yes
ProtectKernelModules=yes
ProtectKernelLogs=yes
ProtectControlGroups=yes
ProtectClock=yes
ProtectHostname=yes
RestrictSUIDSGID=yes
RestrictRealtime=yes
RestrictNamespaces=yes
RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX
LockPersonality=yes
SystemCallArchitectures=native
SystemCallFilter=@system-service
SystemCallFilter=~@privileged
CapabilityBoundingSet=
AmbientCapabilities=

[Install]
WantedBy=multi-user.target
"""


def unit_name(folder: Path) -> str:
    """Name the unit of a node's folder."""
    return f"dfca-{re.sub(r'[^A-Za-z0-9_.-]', '-', folder.name)}.service"


def make_unit(folder: Path, user: str | None = None, device: str = "cpu", data: Sequence[Path] = ()) -> str:
    """Write the unit of a node. device: what it trains on; a GPU needs the machine's devices. data: what it reads."""
    folder, data = folder.resolve(), [path.resolve() for path in data]
    for value in (str(folder), sys.executable, *map(str, data)):
        if "\n" in value or '"' in value or "%" in value:
            raise ConfigError(f'systemd cannot use the path "{value}"; move it to a folder with a plain name')
    return _UNIT.format(
        unit=unit_name(folder),
        name=folder.name,
        user=user or getpass.getuser(),
        folder=_escaped(str(folder)),
        quoted=f'"{folder}"',
        command=f"{_escaped(sys.executable)} -m dfca",
        sight="\n".join(_sight([folder, Path(sys.prefix), Path(sys.base_prefix)], data)),
        private_devices="yes" if device == "cpu" else "no",
    )


def _sight(own: Sequence[Path], data: Sequence[Path]) -> list[str]:
    """Write which homes and temporary folders the node sees: none, unless something that it needs lies there."""
    # ReadWritePaths= lifts ProtectSystem= and ProtectHome=read-only for the node's folder, but not ProtectHome=yes.
    # PrivateTmp= hides files in /tmp: mount them again by their folder, because files are replaced.
    in_home = any(path.is_relative_to(home) for path in (*own, *data) for home in HOMES)
    lines = ["ProtectHome=read-only" if in_home else "ProtectHome=yes", "PrivateTmp=yes"]
    folders = dict.fromkeys(path if path.is_dir() else path.parent for path in data)
    for key, paths in (("BindReadOnlyPaths", folders), ("BindPaths", own[:1])):
        for path in paths:
            if any(path.is_relative_to(temporary) for temporary in TEMPORARY):
                lines.append(f"{key}={_escaped(str(path))}")
    return lines


def _escaped(path: str) -> str:
    return path.replace(" ", r"\x20")


def write_unit(folder: Path, text: str, target: Path | None = None) -> Path:
    """Write a unit, by default where the system looks for it. Raises RunError if that is not allowed."""
    path = (target or UNITS) / unit_name(folder.resolve())
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError as error:
        raise RunError(
            f"cannot write {path}: {error.strerror}; run it as root (sudo {shlex.join([sys.executable, '-m', 'dfca'])} "
            f"node install {folder} --write), or print the unit without --write"
        ) from error
    return path
