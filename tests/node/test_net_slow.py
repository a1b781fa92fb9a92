"""Models over real links, timed: 20 MB on loopback; 6.5 MB between two network namespaces at 20 Mbit/s, with 5 % loss
and a break of 6 s.

The latter needs root, `ip`, `tc` and `nft`. The namespaces are named after the process and deleted at the end.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any

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
            run(*inside, *f"tc qdisc add dev veth0 root tbf rate {RATE * 8:.0f} burst 32kb latency 50ms".split())
            run(*inside, "nft", "add table inet loss")
            run(*inside, "nft", "add chain inet loss in { type filter hook input priority 0 ; }")
            run(*inside, "nft", "add rule inet loss in iifname veth0 numgen random mod 100 < 5 drop")
        yield names
    finally:
        for name in names:
            with suppress(subprocess.CalledProcessError):
                run("ip", "netns", "delete", name)


def break_silently(names: list[str]) -> None:
    """Drop everything for a while, as a radio link does, and close no connection."""
    for name in names:
        run("ip", "netns", "exec", name, "nft", "add table inet cut")
        run("ip", "netns", "exec", name, "nft", "add chain inet cut in { type filter hook input priority 0 ; }")
        run("ip", "netns", "exec", name, "nft", "add rule inet cut in iifname veth0 drop")
    time.sleep(BREAK_S)
    for name in names:
        run("ip", "netns", "exec", name, "nft", "delete table inet cut")


CHILD = """
import asyncio, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from net_slow_child import exchange, main
folder, place = Path(sys.argv[2]), int(sys.argv[3])
"""


def start_child(prefix: tuple[str, ...], folder: Path, place: int, call: str) -> subprocess.Popen[str]:
    """Start a device; prefix: the words before the command; call: of net_slow_child."""
    command = (*prefix, sys.executable, "-c", f"{CHILD}asyncio.run({call})")
    return subprocess.Popen(
        (*command, str(Path(__file__).parents[1] / "support"), str(folder), str(place)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


@contextmanager
def ended(children: list[subprocess.Popen[str]]) -> Iterator[None]:
    """Kill the children at the end."""
    try:
        yield
    finally:
        for child in children:
            child.kill()
            child.wait()
            for pipe in (child.stdin, child.stdout):
                assert pipe is not None
                pipe.close()


def read_line(child: subprocess.Popen[str]) -> Any:
    assert child.stdout is not None
    return json.loads(child.stdout.readline())


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


@pytest.mark.slow
@pytest.mark.skipif(not can_make_namespaces, reason="needs root, ip, tc and nft")
@pytest.mark.parametrize("sender", [0, 1])
def test_a_model_crosses_a_bad_link_with_a_break_within_one_and_a_half_times_the_ideal(
    tmp_path: Path, sender: int
) -> None:
    from net_slow_child import prepare

    prepare(tmp_path, ADDRESSES, (PORT, PORT), FLOATS)
    with bad_link() as names:
        children = [
            start_child(("ip", "netns", "exec", name), tmp_path, i, "main(folder, place)")
            for i, name in enumerate(names)
        ]
        with ended(children):
            for child in children:
                assert read_line(child) == {"connected": True}
            source, sink = children[sender], children[1 - sender]
            assert source.stdin is not None
            source.stdin.write("send\n")
            source.stdin.flush()
            start = time.monotonic()
            partial = tmp_path / f"d{1 - sender}" / "partial"
            while sum(path.stat().st_size for path in partial.iterdir()) < 2e6:
                time.sleep(0.05)
                assert time.monotonic() - start < 20
            break_silently(names)
            result = read_line(sink)
            took = time.monotonic() - start
    ideal = 4 * FLOATS / RATE + BREAK_S
    print(f"took {took:.1f} s, ideal {ideal:.1f} s, resumed from {result['resumed']} bytes, links {result['events']}")
    assert result["fits"]
    assert result["resumed"] > 1e6
    assert took < 1.5 * ideal


@pytest.mark.slow
def test_twenty_megabytes_on_loopback_under_tls(tmp_path: Path) -> None:
    """Between two processes, from `send` until the reader's answer is here: 250 MB/s on two cores with nothing else
    to do. On busy ones only processor time says something, and bare gRPC, which moves as many bytes in turn with the
    models and does nothing else. `pytest tests/node/test_net_slow.py -m slow -s -k loopback`
    """
    from net_slow_child import prepare

    floats, count = 5_000_000, 17
    prepare(tmp_path, ("127.0.0.1", "127.0.0.1"), (free_port(), free_port(), free_port()), floats)
    children = [start_child((), tmp_path, i, f"exchange(folder, place, {count})") for i in range(2)]
    with ended(children):
        for child in children:
            assert read_line(child) == {"connected": True}
        sender, reader = [read_line(child) for child in children]
    # The first ones make connections and find the size of a chunk.
    walls, bare, *used = [
        seconds[2:] for seconds in (sender["walls"], reader["bare"], sender["processor"], reader["processor"])
    ]
    megabytes, used_s = 4 * floats / 1e6, [median(seconds) for seconds in used]
    print(
        f"encoded, announced, read, checked, answered: median of {len(walls)} {megabytes / median(walls):.0f} MB/s, "
        f"best {megabytes / min(walls):.0f}; bare gRPC {megabytes / median(bare):.0f} and {megabytes / min(bare):.0f}; "
        f"processor {1e3 * used_s[0] / megabytes:.2f} s/GB to send and {1e3 * used_s[1] / megabytes:.2f} to receive; "
        f"load {os.getloadavg()[0]:.1f}"
    )
    assert max(used_s) / megabytes < 1 / 250
