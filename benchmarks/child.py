"""Measure in a process of its own: its peak memory is its own, and a crash ends nothing else.

`call(kind, ...)` starts `python -m benchmarks.child`, which prints one line of JSON.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from benchmarks.baselines.work import MARK, now
from benchmarks.measurements import Skip
from benchmarks.sizes import Size
from dfca.base.memory import available_bytes, format_bytes, peak_bytes

LONGEST_S = 3600.0


def call(kind: str, **arguments: Any) -> dict[str, Any]:
    """Run one of `KINDS` in a fresh process.

    Raises Skip with the reason where it fails or is killed.
    """
    return run_script([sys.executable, "-m", "benchmarks.child", kind, json.dumps(arguments)])


def run_script(
    command: list[str], environment: dict[str, str] | None = None, longest_s: float = LONGEST_S
) -> dict[str, Any]:
    """Run a command that prints a marked line of JSON; the whole group of processes ends with it.

    Raises Skip with the reason where there is no such line.
    """
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(environment or {})},
        start_new_session=True,
    )
    try:
        out, errors = process.communicate(timeout=longest_s)
    except subprocess.TimeoutExpired:
        raise Skip(f"it took longer than {longest_s:.0f} s") from None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    for line in reversed(out.splitlines()):
        if line.startswith(MARK):
            answer: dict[str, Any] = json.loads(line.removeprefix(MARK))
            return answer
    raise Skip(_reason(process.returncode, errors or out))


def need_memory(size: Size) -> None:
    """Raise Skip unless the memory is enough for a size: 1.25 banks, the samples twice, 1 GiB."""
    bank = 4 * size.clusters * size.clients * size.parameters
    data = 4 * size.clients * size.samples * size.inputs
    needed, free = int(1.25 * bank + 2 * data + 2**30), available_bytes()
    if free is not None and needed > free:
        raise Skip(f"it needs {format_bytes(needed)} of memory, {format_bytes(free)} are free")


def rounds(size: dict[str, Any], repeats: int, threads: int) -> dict[str, Any]:
    """Time rounds after one that is not counted: seconds per round and per phase, memory above the base.

    The base is the peak of the same process after a tiny simulation, so that libraries are not counted.
    """
    import torch

    from benchmarks.sizes import make_setting
    from dfca.sim.rounds.simulation import Simulation

    torch.set_num_threads(threads)
    tiny = {**size, "clients": 4, "samples": 2, "inputs": 196, "hidden": 4, "degree": 2}
    Simulation(make_setting(Size(**{**tiny, "clusters": min(4, size["clusters"])}))).step()
    base = peak_bytes()
    simulation = Simulation(make_setting(Size(**size)))
    simulation.step()
    seconds, phases = [], []
    for _ in range(repeats):
        before, begin = dict(simulation.seconds), now()
        simulation.step()
        seconds.append(now() - begin)
        phases.append({name: spent - before[name] for name, spent in simulation.seconds.items()})
    return {"seconds": seconds, "phases": phases, "memory": peak_bytes() - base, "base": base}


def bf16(size: int, repeats: int) -> dict[str, Any]:
    """Time a square matrix product in float32 and in bfloat16, in turn."""
    import torch

    from benchmarks.measurements import in_turn

    wide = torch.randn(size, size)
    short = wide.bfloat16()
    return dict(in_turn({"float32": lambda: wide @ wide, "bf16": lambda: short @ short}, repeats, lambda _: None, 2))


def measure_rounds(size: Size, repeats: int, threads: int) -> dict[str, Any]:
    """Call `rounds` in a process of its own, if there is memory for it."""
    need_memory(size)
    return call("rounds", size=asdict(size), repeats=repeats, threads=threads)


KINDS: dict[str, Callable[..., dict[str, Any]]] = {"rounds": rounds, "bf16": bf16}


def _reason(status: int, output: str) -> str:
    if status < 0:
        return f"the process was ended by {signal.Signals(-status).name}"
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return f"the process failed: {lines[-1][:200] if lines else f'exit status {status}'}"


if __name__ == "__main__":
    print(MARK + json.dumps(KINDS[sys.argv[1]](**json.loads(sys.argv[2]))), flush=True)
