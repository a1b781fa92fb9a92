"""Import all public names of an installed dfca, and the modules of the packages that an extra adds."""

from __future__ import annotations

import importlib
import re
import sys
from importlib.metadata import packages_distributions, requires

import dfca


def normalized(name: str) -> str:
    """Return the name of a package as indexes compare it."""
    return re.sub("[-_.]+", "-", name).lower()


for name in dfca.__all__:
    getattr(dfca, name)
modules: list[str] = []
for extra in sys.argv[1:]:
    of_extra = [need for need in requires("dfca") or [] if re.search(f"extra == .{extra}.$", need)]
    packages = {normalized(re.split("[^A-Za-z0-9._-]", need)[0]) for need in of_extra}
    for module, owners in packages_distributions().items():
        if module.isidentifier() and module[0] != "_" and packages & {normalized(owner) for owner in owners}:
            importlib.import_module(module)
            modules.append(module)
print("imported: dfca", *sorted(modules))
