"""A model over a bad link between two network namespaces: 20 Mbit/s, 5 % loss, and a break of 6 s.

Needs root, `ip`, `tc` and `nft`. The namespaces are named after the process and deleted at the end.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

RATE = 20e6 / 8
BREAK_S = 6.0
FLOATS = 1_625_000  # 6.5 MB
ADDRESSES = ("10.213.77.1", "10.213.77.2")
PORT = 7447

can_make_namespaces = (
    sys.platform == "linux" and os.geteuid() == 0 and all(shutil.which(tool) for tool in ("ip", "tc", "nft"))
)


def run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, timeout=20)


@contextmanager
def bad_link() -> Iterator[list[str]]:
    """Make two namespaces with a link that is slow and loses packets in both directions."""
    names = [f"dfca{os.getpid()}{end}" for end in "ab"]
    try:
        for name in names:
            run("ip", "netns", "add", name)
        run("ip", "link", "add", "veth0", "netns", names[0], "type", "veth", "peer", "name", "veth0", "netns", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            inside = ("ip", "netns", "exec", name)
            run(*inside, "ip", "address", "add", f"{address}/24", "dev", "veth0")
            run(*inside, "ip", "link", "set", "lo", "up")
            run(*inside, "ip", "link", "set", "veth0", "up")
            run(*inside, "tc", "qdisc", "add", "dev", "veth0", "root", "tbf", "rate", "20mbit", "burst", "32kb",
                "latency", "50ms")  # fmt: skip
            run(*inside, "nft", "add table inet loss")
            run(*inside, "nft", "add chain inet loss in { type filter hook input priority 0 ; }")
            run(*inside, "nft", "add rule inet loss in iifname veth0 numgen random mod 100 < 5 drop")
        yield names
    finally:
        for name in names:
            with suppress(subprocess.CalledProcessError):
                run("ip", "netns", "delete", name)


CHILD = """
import asyncio, json, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from net_slow_child import main
asyncio.run(main(Path(sys.argv[2]), int(sys.argv[3])))
"""


@pytest.mark.slow
@pytest.mark.skipif(not can_make_namespaces, reason="needs root, ip, tc and nft")
@pytest.mark.parametrize("sender", [0, 1])
def test_a_model_crosses_a_bad_link_with_a_break_within_one_and_a_half_times_the_ideal(
    tmp_path: Path, sender: int
) -> None:
    from net_slow_child import prepare

    prepare(tmp_path, ADDRESSES, PORT, FLOATS)
    with bad_link() as names:
        children = [
            subprocess.Popen(
                (
                    "ip",
                    "netns",
                    "exec",
                    name,
                    sys.executable,
                    "-c",
                    CHILD,
                    str(Path(__file__).parent),
                    str(tmp_path),
                    str(i),
                ),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )
            for i, name in enumerate(names)
        ]
        try:
            for child in children:
                assert child.stdout is not None
                assert json.loads(child.stdout.readline()) == {"connected": True}
            source, sink = children[sender], children[1 - sender]
            assert source.stdin is not None
            assert sink.stdout is not None
            source.stdin.write("send\n")
            source.stdin.flush()
            start = time.monotonic()
            time.sleep(1.2)
            for state in ("down", "up"):
                run("ip", "netns", "exec", names[0], "ip", "link", "set", "veth0", state)
                if state == "down":
                    time.sleep(BREAK_S)
            result = json.loads(sink.stdout.readline())
            took = time.monotonic() - start
        finally:
            for child in children:
                child.kill()
                child.wait()
                for pipe in (child.stdin, child.stdout):
                    assert pipe is not None
                    pipe.close()
    ideal = 4 * FLOATS / RATE + BREAK_S
    print(f"took {took:.1f} s, ideal {ideal:.1f} s, resumed from {result['resumed']} bytes, links {result['events']}")
    assert result["fits"]
    assert took < 1.5 * ideal
