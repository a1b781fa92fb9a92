"""A systemd unit that runs a node: as an ordinary user, with nothing writable but its own folder."""

from __future__ import annotations

import getpass
import re
import shlex
import sys
from pathlib import Path

from dfca.errors import ConfigError, RunError

UNITS = Path("/etc/systemd/system")

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
{home}
PrivateTmp=yes
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


def make_unit(folder: Path, user: str | None = None, device: str = "cpu") -> str:
    """Write the unit of a node. device: what it trains on; a GPU needs the machine's devices."""
    folder = folder.resolve()
    for value in (str(folder), sys.executable):
        if "\n" in value or '"' in value or "%" in value:
            raise ConfigError(f'systemd cannot use the path "{value}"; move the node to a folder with a plain name')
    in_home = any(str(folder).startswith(prefix) for prefix in ("/home/", "/root/", "/run/user/"))
    return _UNIT.format(
        unit=unit_name(folder),
        name=folder.name,
        user=user or getpass.getuser(),
        folder=_escaped(str(folder)),
        quoted=f'"{folder}"',
        command=f"{_escaped(sys.executable)} -m dfca",
        home="# ProtectHome is off: the node's folder is in a home." if in_home else "ProtectHome=yes",
        private_devices="yes" if device == "cpu" else "no",
    )


def _escaped(path: str) -> str:
    return path.replace(" ", r"\x20")


def write_unit(folder: Path, text: str, target: Path | None = None) -> Path:
    """Write a unit, by default where the system looks for it. Raises RunError where that is not allowed."""
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
