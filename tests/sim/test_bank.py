from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from drifts import drift_setting
from safetensors.torch import load_file
from toy import make_toy_setting, quick

from dfca.base.errors import ConfigError, ShortOfMemory
from dfca.base.files import Stream, atomic_save, sha256
from dfca.base.memory import GIB, explain_oom
from dfca.sim.local import bank as bank_module
from dfca.sim.local.bank import Bank, BankSpec
from dfca.sim.rounds.simulation import Simulation
from dfca.sim.setting import Setting


def run(setting: Setting) -> Simulation:
    simulation = Simulation(setting)
    while not simulation.done:
        simulation.step()
    return simulation


def make_bank(place: str, models: int = 2, most: int = 2, **options: object) -> Bank:
    return Bank(BankSpec((models, 3, 5), most, torch.float32, place=place, **options))


@pytest.mark.parametrize("algorithm", ["dfca-auto", "dfca-li", "fedspd", "ifca"])
def test_a_bank_on_disk_gives_the_same_bits(algorithm: str, tmp_path: Path) -> None:
    one, two = (
        run(make_toy_setting(quick(algorithm), bank=place, bank_folder=tmp_path / place, dtype=torch.float32))
        for place in ("memory", "disk")
    )
    assert torch.equal(one.banks, two.banks)
    assert not any("disk" in note for note in one.notes)
    assert any("lie on the disk" in note for note in two.notes)
    assert list((tmp_path / "disk").iterdir()) == []  # deleted as soon as it is mapped


def test_clusters_that_open_later_find_room_on_the_disk_too(tmp_path: Path) -> None:
    one, two = (run(drift_setting(bank=place, bank_folder=tmp_path)) for place in ("memory", "disk"))
    assert one.models == two.models > 2
    assert torch.equal(one.banks, two.banks)


def test_room_for_more_clusters_keeps_what_is_there() -> None:
    for place in ("memory", "disk"):
        bank = make_bank(place, most=4)
        bank.open(2).fill_(7.0)
        assert bank.open(3)[:2].eq(7.0).all()
        with pytest.raises(ValueError, match="room for 4 clusters, got 5"):
            bank.open(5)


def test_auto_goes_to_the_disk_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    size = 2 * 3 * 5 * 4
    needed = 5 * size // 4 + 1000 + GIB
    for available, on_disk in ((needed, False), (needed - 1, True), (None, False)):
        monkeypatch.setattr(bank_module, "available_bytes", lambda device, free=available: free)
        assert make_bank("auto", data_bytes=1000).on_disk is on_disk
    monkeypatch.setattr(bank_module, "available_bytes", lambda device: 2 * needed - 2)
    assert make_bank("auto", data_bytes=1000, sharers=2).on_disk


def test_sentences(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bank_module, "available_bytes", lambda device: 100)
    sentence = r'need 0.0 MiB of memory, and 0.0 MiB are available; use bank = "disk", fewer clients'
    with pytest.raises(ShortOfMemory, match=sentence):
        make_bank("memory")
    (tmp_path / "file").touch()
    with pytest.raises(ShortOfMemory, match="a bank on disk cannot be made in"):
        make_bank("disk", folder=tmp_path / "file")
    with pytest.raises(ConfigError, match='unknown bank "tape"'):
        make_toy_setting(bank="tape")
    with pytest.raises(ConfigError, match='bank "disk" is for device "cpu", got device "cuda"'):
        make_toy_setting(bank="disk", device="cuda")


def test_a_full_disk_is_told_before_anything_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(ShortOfMemory, match=r"on the disk, and it has no room \(No space left on device\); use --out"):
        make_bank("disk")


def test_an_allocation_that_fails_is_one_sentence() -> None:
    with pytest.raises(ShortOfMemory, match=r"out of memory \(.*\); what is stored is kept: use"), explain_oom():
        torch.empty(2**60)
    with pytest.raises(RuntimeError, match="something else"), explain_oom():
        raise RuntimeError("something else")


def test_tensors_are_written_in_pieces_as_the_library_reads_them(tmp_path: Path) -> None:
    bank = torch.randn(2, 5, 3)
    tensors = {"flags": torch.tensor([True, False]), "empty": torch.zeros(0, 3), "count": torch.tensor(7)}
    digest = atomic_save(
        tmp_path / "a", {**tensors, "bank": Stream((2, 5, 3), torch.float32, bank.view(10, 3).split(4))}
    )
    assert digest == sha256(tmp_path / "a")
    loaded = load_file(tmp_path / "a")
    for name, tensor in {**tensors, "bank": bank}.items():
        assert torch.equal(loaded[name], tensor)
        assert loaded[name].dtype == tensor.dtype


@pytest.mark.skipif(sys.platform != "linux", reason="glibc")
def test_freed_memory_is_kept_where_that_was_asked_for() -> None:
    """Blocks of 64 MB that are freed and asked for again cost few page faults; torch asks for them as bytes do."""
    code = """
import resource, sys
from dfca.base.memory import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
size = 2**26
for _ in range(2):
    b"x" * size
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    b"x" * size
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
    kept, plain = (
        int(subprocess.run([sys.executable, "-c", code, how], capture_output=True, text=True, check=True).stdout)
        for how in ("keep", "plain")
    )
    assert kept * 5 < plain
