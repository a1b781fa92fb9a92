"""Import what a user names as "package.module:function": models, data, algorithms and graphs of their own.

Modules are looked for in the folder of the experiment file that names them (`look_in`), in the working directory, and
wherever Python looks. Importing runs the module: a name is as trusted as a program (docs/security.md).
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Callable
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from dfca.base.errors import ConfigError, DfcaError, place_of

_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_folders: list[str] = []  # of experiment files, in front of sys.path


def is_import(name: str) -> bool:
    """Return whether a name is meant as "module:function".

    >>> is_import("my.module:mine"), is_import("dfca-gi")
    (True, False)
    """
    return ":" in name


def check_name(name: str, key: str) -> None:
    """Refuse a name of another form, without importing anything. Raises ConfigError."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f'{key} must be "package.module:function", got "{name}"')


def look_in(folder: str | Path) -> None:
    """Look for modules in this folder first: that of an experiment file, beside which its own parts stand."""
    place = str(Path(folder).resolve())
    if place in _folders:
        _folders.remove(place)
    if place in sys.path:
        sys.path.remove(place)
    _folders.insert(0, place)
    sys.path.insert(0, place)
    importlib.invalidate_caches()  # the module may have been written a moment ago


def import_function(name: str, key: str) -> Callable[..., Any]:
    """Import the function that `key` of a config names. Raises ConfigError, also for what cannot be called."""
    value = import_object(name, key)
    if not callable(value):
        raise ConfigError(f'{key} "{name}" must be callable, got {type(value).__name__}')
    function: Callable[..., Any] = value
    return function


def call_own(make: Callable[..., Any], clients: int, seed: int, what: str, kind: type[DfcaError] = ConfigError) -> Any:
    """Call a function of the user's own as make(clients, seed). Raises `kind` where it fails."""
    try:
        return make(clients, seed)
    except DfcaError:
        raise
    except Exception as error:
        raise kind(
            f"{what} failed with {type(error).__name__}: {error}{place_of(error)}; it is called as "
            f"make(clients, seed), here make({clients}, {seed})"
        ) from error


def import_object(name: str, key: str) -> Any:
    """Import what `key` of a config names. Raises ConfigError, also where another file has that module's name."""
    check_name(name, key)
    module, _, path = name.partition(":")
    _look_in_working_directory()
    _refuse_other_file(module, f'{key} "{name}"')
    try:
        value: Any = importlib.import_module(module)
        for part in path.split("."):
            value = getattr(value, part)
    except (ImportError, AttributeError) as error:
        places = " or ".join(dict.fromkeys([*_folders[:1], os.getcwd()]))
        raise ConfigError(f'{key} "{name}" cannot be imported from {places}: {error}') from error
    except Exception as error:  # what the user's module raises while it is imported
        raise ConfigError(
            f'{key} "{name}" cannot be imported: {module} fails with {type(error).__name__}: {error}'
        ) from error
    return value


def _look_in_working_directory() -> None:
    """Let Python look in the working directory, which a command's own search path lacks; after experiments' folders."""
    here = os.getcwd()
    if here not in sys.path:
        place = sum(entry in _folders for entry in sys.path)
        sys.path.insert(place, here)
        importlib.invalidate_caches()


def _refuse_other_file(module: str, what: str) -> None:
    """Refuse a module that this process has imported from another file than the one that is meant now."""
    top = module.partition(".")[0]
    loaded = getattr(sys.modules.get(top), "__file__", None)
    if loaded is None or top == "__main__":
        return
    spec = PathFinder.find_spec(top)
    if spec is None or spec.origin is None or Path(spec.origin).resolve() == Path(loaded).resolve():
        return
    raise ConfigError(
        f"{what}: a module {top} was imported from {loaded} before, and here {spec.origin} is meant; rename one of "
        "them, or use a fresh Python process"
    )
