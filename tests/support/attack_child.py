"""A node in a process of its own that keeps no hostile member out: `python attack_child.py FOLDER`.

It writes how many frames it has read of each member to a file, every half second.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

from attack_world import READS_FILE, count_reads, take_limits_away

from dfca.base.errors import DfcaError
from dfca.base.files import atomic_write
from dfca.node.run import run_node
from dfca.node.service import ServiceOptions


def report(path: Path, reads: Counter[str]) -> None:
    while True:
        with suppress(DfcaError):  # a node that starts deletes what others are about to rename
            atomic_write(path, json.dumps(dict(reads.copy())))
        time.sleep(0.5)


if __name__ == "__main__":
    take_limits_away(setattr)
    threading.Thread(target=report, args=(Path(sys.argv[1]) / READS_FILE, count_reads(setattr)), daemon=True).start()
    run_node(Path(sys.argv[1]), ServiceOptions())
