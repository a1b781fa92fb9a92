"""The entry of a worker process: `python -m dfca.runs.worker FD`, started by `workers.Pool`."""

from __future__ import annotations

import sys
from multiprocessing.connection import Connection

from dfca.runs.workers import work

if __name__ == "__main__":
    work(Connection(int(sys.argv[1])))
