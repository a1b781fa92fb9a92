"""`python -m dfca.node OPTIONS`: the process of a node, without what only the command line needs.

`dfca node run` checks its options and settings and then becomes this process. typer, rich and pydantic would be 14 MB
that a device keeps for years and never uses again.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from dfca.base.errors import DfcaError
from dfca.base.files import read_small


def check_settings(folder: Path) -> dict[str, str]:
    """Check the settings of a node and the facts of its swarm; returns the digests of the files that are right.

    What is wrong with one is left to the node, which reads it again where its digest is missing or another one.
    """
    from dfca.node.task.config import FILE, Config
    from dfca.node.task.facts import FILE as FACTS
    from dfca.node.task.facts import LARGEST, Facts
    from dfca.node.task.sections import digest_of

    found = {}
    for name, load in ((FILE, Config.load), (FACTS, Facts.load)):
        with suppress(DfcaError, OSError):
            digest = digest_of(read_small(folder / name, LARGEST))
            load(folder)
            found[name] = digest
    return found


def become_node(options: dict[str, object]) -> NoReturn:
    """Replace this process by one that runs a node; it keeps its ID, its signals and its streams."""
    options = {**options, "checked": check_settings(Path(str(options["folder"])))}
    sys.stdout.flush()
    sys.stderr.flush()
    # -P: nothing in the working directory takes the place of a library; `main` adds it for the user's own modules.
    # no_debug_ranges: 1 MB of columns that only tracebacks would show.
    flags = ["-P", "-X", "no_debug_ranges"]
    os.execv(sys.executable, [sys.executable, *flags, "-m", "dfca.node", json.dumps(options)])


def main() -> None:
    """Run a node, by options that `become_node` has handed over; errors are one sentence and a status."""
    options = json.loads(sys.argv[1])
    if not options["debug"]:
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # what it would print beside our own sentence
    try:
        from dfca.node.run import leave_at_once, run_node
        from dfca.node.service import ServiceOptions

        sys.path.insert(0, os.getcwd())
        record = options["record"]
        run_node(
            Path(options["folder"]),
            ServiceOptions(
                log_format=options["log_format"],
                record=None if record is None else Path(record),
                until_done=options["until_done"],
                version=options["version"],
            ),
            options["with_parent"],
            options.get("checked"),
            leave_at_once,
        )
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        if options["debug"]:
            raise
        unexpected = "" if isinstance(error, DfcaError | OSError) else f"unexpected {type(error).__name__}: "
        hint = "; run again with --debug to see where" if unexpected else ""
        print(f"error: {unexpected}{' '.join(str(error).split())}{hint}", file=sys.stderr)
        sys.exit(2 if isinstance(error, DfcaError) else 1)


if __name__ == "__main__":
    main()
