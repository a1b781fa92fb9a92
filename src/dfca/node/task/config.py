"""The settings of one device: node.toml, written by `dfca node init` with a comment on every key.

What a device may decide for itself stands here; what all members must share stands in the facts (`facts.py`).
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli_w
from pydantic import AfterValidator, Field

from dfca.base.errors import ConfigError, RunError
from dfca.base.files import atomic_write, read_small
from dfca.base.table import Table, option
from dfca.base.validation import check, parse_toml
from dfca.node.addresses import split_address

FILE = "node.toml"
LARGEST = 2**20
PORT = 7447
INVITE_PORT = 7448
NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$"
MODULE = re.compile(r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")

Names = Annotated[tuple[str, ...], Field(strict=False)]  # TOML has lists, not tuples
Seconds = Annotated[float, Field(ge=0, le=1e7)]


def _address(address: str) -> str:
    split_address(address)
    return address


def _factory(name: str) -> str:
    if not MODULE.match(name):
        raise ValueError(f'must be "module:function", got "{name}"')
    return name


def _whole_path(path: str) -> str:
    if not Path(path).is_absolute():
        raise ValueError(f'must be an absolute path, got "{path}"')
    return path


Address = Annotated[str, AfterValidator(_address)]
Factory = Annotated[str, AfterValidator(_factory)]
Weights = Annotated[str, AfterValidator(_whole_path)]


class DataConfig(Table, kw_only=True):
    """The samples of this device."""

    path: str = option(
        min_length=1,
        max_length=4096,
        description="a file (.csv, .parquet, .npz, .safetensors), a folder of images with one subfolder per class, or "
        '"module:function", which runs your own code; relative to the folder of this file',
    )
    format: Literal["auto", "csv", "parquet", "npz", "safetensors", "images", "factory"] = option(
        default="auto", description="auto: by the path"
    )
    label: str = option(
        default="label",
        min_length=1,
        max_length=4096,
        description="the column with the class or the number; of a multi-label swarm several, with commas between",
    )
    features: Literal["auto"] | Names = option(
        default="auto", description="columns to use; auto: all but the label and those to ignore"
    )
    ignore: tuple[str, ...] = option(default=(), strict=False, description="columns that are no features, e.g. a time")
    missing: Literal["refuse", "drop"] = option(
        default="refuse", description="rows with an empty value: refuse the file, or drop the row"
    )
    test: str | None = option(
        default=None, max_length=4096, description="samples to score with, of the same form; none: some are held out"
    )
    held_out: float = option(default=0.2, ge=0, le=0.9, description="share of the samples that score and never train")
    image_size: int | None = option(
        default=None, ge=1, le=4096, description="pixels of a side, of the founder's images; none: as they are"
    )

    @property
    def kind(self) -> str:
        """The format, found by the path where it is "auto"."""
        return found_format(self.path) if self.format == "auto" else self.format

    def __post_init__(self) -> None:
        if self.format == "factory" and not MODULE.match(self.path):
            raise ValueError(f'path must be "module:function" for format "factory", got "{self.path}"')
        if self.features != "auto" and len(set(self.features)) < len(self.features):
            raise ValueError("features names a column twice")
        if self.features != "auto" and self.label in self.features:
            raise ValueError(f'features must not name the label "{self.label}"')


class NetworkConfig(Table, kw_only=True):
    """Where this device listens, and whom it talks to."""

    host: str = option(default="0.0.0.0", min_length=1, max_length=255, description="address to listen on")
    port: int = option(default=PORT, ge=0, le=65_535, description="0: any free one")
    invite_port: int = option(default=INVITE_PORT, ge=0, le=65_535, description="open only while an invite is")
    advertise: tuple[Address, ...] = option(
        default=(),
        strict=False,
        max_length=16,
        description='"host:port" by which others reach it; empty: found',
    )
    neighbours: Literal["auto"] | Names = option(
        default="auto", description="auto: about `degree` of the members; or a list of their names"
    )
    degree: int = option(default=6, ge=1, le=1000, description="links that auto aims at")
    discovery: bool = option(default=False, description="find members on the local network (needs dfca[discovery])")
    insecure: bool = option(default=False, description="plain text without keys; only on 127.0.0.1, for experiments")

    def __post_init__(self) -> None:
        if self.port and self.port == self.invite_port:
            raise ValueError(f"port and invite_port must differ, got {self.port} for both")
        if self.insecure and self.host not in ("127.0.0.1", "::1", "localhost"):
            raise ValueError(f'insecure is for host "127.0.0.1" only, got "{self.host}"')


class TrainingConfig(Table, kw_only=True):
    """How this device computes."""

    device: str = option(
        default="cpu", pattern=r"^(cpu|cuda(:\d+)?|mps|auto)$", description="cpu, cuda, cuda:N, mps or auto"
    )
    threads: int = option(default=1, ge=1, le=1024, description="cores that training may use")
    pause_s: Seconds = option(default=0.0, description="rest between two rounds, to save power")
    rest_s: Seconds = option(
        default=600.0, description="longest rest between two rounds while nothing is learned, to save power; 0: none"
    )
    reread_s: Seconds = option(default=10.0, description="how often to look whether the data has changed; 0: never")
    factory: Factory | None = option(
        default=None,
        max_length=200,
        description='"module:function" of a swarm whose model is code: runs code, so you must name it yourself',
    )
    codec: Factory | None = option(
        default=None,
        max_length=200,
        since=3,
        description='"module:function" of a swarm whose codec is code: runs code, so you must name it yourself',
    )
    weights: Weights | None = option(
        default=None,
        max_length=4096,
        since=3,
        description="this device's copy of the safetensors file that the swarm's model starts from",
    )


class LogConfig(Table, kw_only=True):
    """What this device writes down."""

    format: Literal["human", "json"] = option(default="human", description="human, or json: one object per line")
    level: Literal["debug", "info", "warning", "error"] = option(default="info", description="the least that is logged")
    metrics_port: int | None = option(
        default=None, ge=0, le=65_535, description="Prometheus metrics on 127.0.0.1; none: not served"
    )


class LimitsConfig(Table, kw_only=True):
    """What this device does at most, whatever others send."""

    data_bytes: int = option(default=2 * 2**30, ge=1024, description="of its data, read into memory")
    links: int = option(
        default=64, ge=1, le=10_000, description="neighbours at a time, those that others want included"
    )
    frames_per_s: float = option(default=200.0, gt=0, description="messages of one neighbour")
    pulls: int = option(default=4, ge=1, le=1000, description="models that are received at a time")
    cache_bytes: int = option(default=512 * 2**20, ge=2**20, description="models that neighbours may still read")
    disk_bytes: int = option(default=2**30, ge=2**20, description="models that have arrived in part")
    write_bytes_per_day: int = option(
        default=10 * 10**9, ge=0, description="saves of its models, to spare flash: rounds wait; 0: no limit"
    )


class NodeConfig(Table, kw_only=True):
    """Everything that one device decides for itself."""

    name: str = option(pattern=NAME, description="of this device, as the others see it")
    payload: Literal["swarm", "float32", "bf16", "int8"] = option(
        default="swarm", description="how its models are sent: as the swarm agreed, or smaller"
    )
    data: DataConfig
    network: NetworkConfig = NetworkConfig()
    training: TrainingConfig = TrainingConfig()
    log: LogConfig = LogConfig()
    limits: LimitsConfig = LimitsConfig()

    @classmethod
    def checked(cls, content: dict[str, Any], what: str = FILE) -> NodeConfig:
        """Make settings from a table. Raises ConfigError with everything that is wrong."""
        return check(content, cls, what)

    @classmethod
    def load(cls, folder: Path) -> NodeConfig:
        """Read node.toml of a node's folder. Raises ConfigError with everything that is wrong."""
        path = folder / FILE
        try:
            text = read_small(path, LARGEST).decode("utf-8-sig").replace("\r\n", "\n")
        except FileNotFoundError:
            raise ConfigError(
                f"there is no node in {folder} ({FILE} is missing); `dfca node init` or `dfca node join` makes one"
            ) from None
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path} cannot be read: {error}") from None
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from None
        try:
            content = parse_toml(text)
        except ValueError as error:
            raise ConfigError(f"{path} is not TOML: {error}") from None
        return cls.checked(content, str(path))

    def data_paths(self, folder: Path) -> list[Path]:
        """Return the files and folders that the samples are read from; none for "module:function"."""
        names = [] if self.data.kind == "factory" else [self.data.path, *([self.data.test] if self.data.test else ())]
        return [(folder / Path(name).expanduser()).absolute() for name in names]

    def save(self, folder: Path) -> None:
        """Write node.toml with a comment on every key. Raises RunError where the folder cannot be written."""
        path = folder / FILE
        if path.is_symlink():
            raise RunError(f"{path} is a link; remove it, or use another folder")
        atomic_write(path, self.to_toml())

    def to_toml(self) -> str:
        """Write all keys, each with its comment; those without a value are commented out."""
        plain = self.plain()
        lines = ["# The settings of this device; `dfca node run` reads them when it starts.", ""]
        sections: list[str] = []
        for key, description in self.descriptions().items():
            value = getattr(self, key)
            if isinstance(value, Table):
                sections += ["", f"[{key}]  # {(type(value).__doc__ or '').rstrip('.')}"]
                for name, inner in value.descriptions().items():
                    sections += _entry(name, plain[key][name], inner)
            else:
                lines += _entry(key, plain[key], description)
        return "\n".join([*lines, *sections]) + "\n"


def _entry(key: str, value: Any, description: str) -> list[str]:
    entry = f"# {key} =" if value is None else tomli_w.dumps({key: value}).strip()
    if "\n" not in entry and len(entry) + len(description) < 114:
        return [f"{entry}  # {description}"]
    return [*textwrap.wrap(description, 114, initial_indent="# ", subsequent_indent="# "), entry]


def found_format(path: str) -> str:
    """Find the format of data by its path.

    >>> found_format("a.csv"), found_format("my.module:load"), found_format("photos")
    ('csv', 'factory', 'images')
    """
    suffixes = {
        ".csv": "csv",
        ".tsv": "csv",
        ".txt": "csv",
        ".parquet": "parquet",
        ".pq": "parquet",
        ".npz": "npz",
        ".safetensors": "safetensors",
    }
    if MODULE.match(path):
        return "factory"
    return suffixes.get(Path(path).suffix.lower(), "images")


def absolute(path: str) -> str:
    """Make a path that the user typed independent of where the node starts; "module:function" stays."""
    return path if MODULE.match(path) else str(Path(path).expanduser().absolute())
