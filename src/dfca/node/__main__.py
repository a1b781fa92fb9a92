"""`python -m dfca.node OPTIONS`: the process of a node, without what only the command line needs.

`dfca node run` checks its options and then becomes this process: typer and rich would add 5 MB.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import NoReturn

from dfca.base.errors import DfcaError


def become_node(options: dict[str, object]) -> NoReturn:
    """Replace this process by one that runs a node; it keeps its ID, its signals and its streams."""
    sys.stdout.flush()
    sys.stderr.flush()
    # -P: nothing in the working directory shadows a library; `main` adds it for the user's own modules.
    # no_debug_ranges: saves 1 MB of columns that only tracebacks show.
    flags = ["-P", "-X", "no_debug_ranges"]
    os.execv(sys.executable, [sys.executable, *flags, "-m", "dfca.node", json.dumps(options)])


def main() -> None:
    """Run a node with the options from `become_node`; an error is one sentence and a status."""
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
