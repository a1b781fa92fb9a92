"""The parts of the network that need no network: what waits, what is offered, what is read, what lies on the disk."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dfca.node.net.limits import Bucket, Penalties, Refusals
from dfca.node.net.links.link import FrameQueue, Overflow
from dfca.node.net.local import LinkTraffic
from dfca.node.net.transfer.chunks import read_chunk, write_chunk
from dfca.node.net.transfer.offers import ModelOffer, Offers
from dfca.node.net.transfer.partials import Partials
from dfca.node.net.transfer.pulls import Pull, Pulls
from dfca.node.wire import wire_pb2 as pb
from dfca.node.wire.frames import Refused

ONE, TWO = "a" * 52, "b" * 52


# What leaves.


def test_an_outbox_keeps_order_replaces_by_key_and_is_bounded() -> None:
    outbox: FrameQueue[str] = FrameQueue(3, 100)
    outbox.put("one", 10)
    outbox.replace("cluster 0", "old")
    outbox.put("two", 10)
    outbox.replace("cluster 0", "new")
    outbox.put("three", 10)
    with pytest.raises(Overflow):
        outbox.put("four", 10)
    assert [outbox.get() for _ in range(5)] == ["one", "two", "new", "three", None]
    with pytest.raises(Overflow):
        outbox.put("large", 101)
    outbox.put("fits", 100)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 50))))
def test_an_outbox_never_holds_more_than_its_bounds(steps: list[tuple[int, int]]) -> None:
    outbox: FrameQueue[int] = FrameQueue(5, 120)
    for kind, size in steps:
        if kind == 0:
            outbox.get()
        elif kind == 1:
            outbox.replace(size % 3, size)
        else:
            try:
                outbox.put(size, size)
            except Overflow:
                assert outbox._count == 5 or outbox._bytes + size > 120
        assert outbox._count <= 5
        assert outbox._bytes <= 120
        assert len(outbox) <= 8
    while outbox.get() is not None:
        pass
    assert outbox._count == outbox._bytes == 0


def offer(member: str, name: bytes, cluster: int | None, since: float = 0.0, number: int = 1) -> ModelOffer:
    return ModelOffer(member, name, pb.PeerMessage(), cluster, 0, since, number=number)


def names(offers: Offers, member: str = ONE) -> list[bytes]:
    return [offered.name for offered in offers.of(member)]


def test_one_copy_is_kept_for_all_readers_until_the_last_has_read_it() -> None:
    offers = Offers(1000)
    offers.add(offer(ONE, b"m", 0), b"x" * 100)
    offers.add(offer(TWO, b"m", 0), b"x" * 100)
    assert offers.bytes == 100
    offers.take(ONE, 1)
    assert offers.data(ONE, b"m") is None
    assert offers.data(TWO, b"m") == b"x" * 100
    offers.take(TWO, 1)
    assert (len(offers), offers.bytes) == (0, 0)


def test_the_newest_update_waits_behind_the_one_that_is_read_and_replaces_one_that_waits() -> None:
    offers = Offers(1000)
    offers.add(offer(ONE, b"read", 0, since=1.0), b"1")
    offers.add(offer(ONE, b"other", 1, since=2.0, number=0), b"2")
    offers.add(offer(ONE, b"waits", 0, since=3.0, number=0), b"3")
    offers.add(offer(ONE, b"newest", 0, since=4.0, number=0), b"4")
    assert names(offers) == [b"read", b"other", b"newest"]
    assert offers.bytes == 3
    assert [offers.first(ONE, cluster) for cluster in (0, 1)] == offers.of(ONE)[:2]
    offers.take(ONE, 1)
    first = offers.first(ONE, 0)
    assert first is not None
    assert first.name == b"newest"
    assert offers.first(ONE, 2) is None


def test_when_a_link_is_lost_updates_stay_and_the_rest_is_forgotten() -> None:
    offers = Offers(1000)
    offers.add(offer(ONE, b"update", 0, since=1.0), b"1")
    offers.add(offer(ONE, b"copy", None, since=2.0), b"2")
    offers.lose_link(ONE, 60.0)
    assert names(offers) == [b"update"]
    offers.forget(ONE)
    assert offers.of(ONE) == []


@pytest.mark.parametrize(("asked", "left"), [(True, [b"read", b"newest"]), (False, [b"newest"])])
def test_on_the_next_link_an_update_that_was_begun_is_read_before_the_newest(asked: bool, left: list[bytes]) -> None:
    offers = Offers(1000)
    offers.add(offer(ONE, b"read", 0, since=1.0), b"1")
    offers.add(offer(ONE, b"newest", 0, since=2.0, number=0), b"2")
    if asked:
        assert offers.announced(ONE, 1) == b"1"
    offers.lose_link(ONE, 60.0)
    assert names(offers) == left
    offers.add(offer(ONE, b"newer", 0, since=3.0, number=0), b"3")
    assert names(offers) == [*left[:-1], b"newer"]


def test_the_cache_is_bounded_and_the_oldest_leave_first() -> None:
    offers = Offers(250)
    first, second, third = offer(ONE, b"a", 0), offer(TWO, b"b", None), offer(ONE, b"c", 1)
    assert offers.add(first, b"x" * 100) == []
    assert offers.add(second, b"x" * 100) == []
    assert offers.add(third, b"x" * 100) == [first]
    assert first.done
    assert offers.bytes == 200
    assert offers.add(offer(ONE, b"d", 2), b"x" * 1000) == [second, third]  # one always fits: a model must leave


# What comes.


def pull(number: int, cluster: int | None = 0, member: str = ONE, link: Any = "link", name: bytes = b"") -> Pull:
    return Pull(link, member, number, name or bytes([number]) * 32, 100, 0, "float32", cluster, None)


def test_the_newest_update_replaces_one_that_waits_and_is_read_behind_the_one_that_is_read() -> None:
    pulls = Pulls(4, 2, 10)
    pulls.announce(pull(1))
    running = pulls.begin()
    assert running is not None
    assert pulls.announce(pull(2)) == []
    assert pulls.begin() is None
    (waiting,) = pulls.announce(pull(3))
    assert waiting.number == 2
    pulls.end(running)
    newest = pulls.begin()
    assert newest is not None
    assert newest.number == 3


def test_messages_that_must_arrive_are_not_replaced_and_too_many_are_refused() -> None:
    pulls = Pulls(4, 1, 3)
    for number in (1, 2, 3):
        assert pulls.announce(pull(number, None)) == []
    with pytest.raises(Refused, match="rate"):
        pulls.announce(pull(4, None))


def test_one_member_cannot_take_all_reads_and_members_take_turns() -> None:
    pulls = Pulls(3, 2, 10)
    for number in range(1, 6):
        pulls.announce(pull(number, None))
    pulls.announce(pull(6, None, TWO))
    order = [pulls.begin() for _ in range(4)]
    assert [(begun.member, begun.number) if begun else None for begun in order] == [(ONE, 1), (TWO, 6), (ONE, 2), None]


def test_reads_of_a_lost_link_are_cancelled_and_their_numbers_mean_nothing_on_the_next() -> None:
    pulls = Pulls(4, 2, 10)
    pulls.announce(pull(1))
    old = pulls.begin()
    assert old is not None
    assert pulls.forget(ONE) == [old]
    assert pulls.announce(pull(1, link="next", name=old.name)) == []
    assert pulls.begin() is None  # the old read of the same model still holds its file
    pulls.end(old)
    assert pulls.begin() is not None


# On the disk.


def partials(folder: Path, most: int = 10_000, buffer_bytes: int = 0) -> Partials:
    kept = Partials(folder / "partial", most, 10, buffer_bytes)
    kept.prepare()
    return kept


NAME = bytes(range(32))


def test_a_partial_is_continued_also_by_another_process(tmp_path: Path) -> None:
    import hashlib

    data = os.urandom(1000)
    name = hashlib.sha256(data).digest()
    first = partials(tmp_path).open(name, ONE, 1000)
    assert first is not None
    first.write(data[:400])  # and now the process is killed
    folder = partials(tmp_path)
    second = folder.open(name, ONE, 1000)
    assert second is not None
    assert (second.offset, second.resumed) == (400, True)
    second.write(data[400:])
    assert second.digest() == name
    assert bytes(second.content()) == data
    assert folder.path(name, ONE).read_bytes() == data
    folder.close(name, ONE, second, done=True)
    assert list((tmp_path / "partial").iterdir()) == []
    first.close()


def test_a_partial_payload_is_never_read_through_a_link(tmp_path: Path) -> None:
    folder = partials(tmp_path)
    part = folder.open(NAME, ONE, 20)
    assert part is not None
    part.write(b"x" * 20)
    path = folder.path(NAME, ONE)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="link"):
        part.content()
    part.close()


def test_a_payload_that_comes_fast_never_touches_the_disk(tmp_path: Path) -> None:
    import hashlib

    data = os.urandom(1000)
    folder = partials(tmp_path, buffer_bytes=1000)
    partial = folder.open(NAME, ONE, 1000)
    assert partial is not None
    for begin in range(0, 1000, 300):
        partial.write(memoryview(data)[begin : begin + 300])
    whole = partial.content()
    assert partial.digest() == hashlib.sha256(data).digest()
    assert bytes(whole) == data
    assert list((tmp_path / "partial").iterdir()) == []
    folder.close(NAME, ONE, partial, done=True)
    assert bytes(whole) == data
    assert list((tmp_path / "partial").iterdir()) == []


def test_a_payload_in_memory_goes_to_the_disk_when_its_read_ends_early_or_takes_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = os.urandom(1000)
    folder = partials(tmp_path, buffer_bytes=1500)
    first = folder.open(NAME, ONE, 1000)
    assert first is not None
    first.write(data[:400])
    assert not folder.path(NAME, ONE).exists()
    folder.close(NAME, ONE, first, done=False)
    assert folder.path(NAME, ONE).read_bytes() == data[:400]
    again = folder.open(NAME, ONE, 1000)
    assert again is not None
    assert (again.offset, again.resumed) == (400, True)

    monkeypatch.setattr("dfca.node.net.transfer.partials.SPILL_S", -1.0)
    folder.close(NAME, ONE, again, done=True)
    slow = folder.open(NAME, TWO, 1000)
    assert slow is not None
    slow.write(data[:300])  # and now the process may be killed
    slow.write(data[300:700])
    assert folder.path(NAME, TWO).read_bytes() == data[:700]
    slow.write(data[700:])
    assert bytes(slow.content()) == data
    folder.close(NAME, TWO, slow, done=True)
    assert list((tmp_path / "partial").iterdir()) == []


def test_payloads_beyond_the_memory_for_them_are_collected_on_the_disk(tmp_path: Path) -> None:
    folder = partials(tmp_path, buffer_bytes=1500)
    by_member = {who: folder.open(NAME, who, 1000) for who in (ONE, TWO)}
    for partial in by_member.values():
        assert partial is not None
        partial.write(b"x" * 500)
    assert [path.name for path in (tmp_path / "partial").iterdir()] == [folder.path(NAME, TWO).name]
    for who, partial in by_member.items():
        assert partial is not None
        folder.close(NAME, who, partial, done=True)
    third = folder.open(NAME, ONE, 1000)
    assert third is not None
    third.write(b"x" * 500)
    assert list((tmp_path / "partial").iterdir()) == []  # there is room again
    folder.close(NAME, ONE, third, done=True)


def test_a_payload_of_one_neighbour_is_not_continued_by_another(tmp_path: Path) -> None:
    folder = partials(tmp_path)
    one = folder.open(NAME, ONE, 1000)
    assert one is not None
    one.write(b"x" * 500)
    two = folder.open(NAME, TWO, 1000)
    assert two is not None
    assert two.offset == 0
    assert folder.open(NAME, ONE, 1000) is None  # it is being read
    folder.close(NAME, ONE, one, done=False)


def test_a_partial_that_cannot_be_a_beginning_is_deleted_and_links_are_not_followed(tmp_path: Path) -> None:
    folder = partials(tmp_path)
    path = folder.path(NAME, ONE)
    path.write_bytes(b"x" * 2000)
    partial = folder.open(NAME, ONE, 1000)
    assert partial is not None
    assert partial.offset == 0
    assert not path.exists()
    target = tmp_path / "precious"
    target.write_bytes(b"keep me")
    path.symlink_to(target)
    folder.close(NAME, ONE, partial, done=False)
    again = folder.open(NAME, ONE, 1000)
    assert again is not None
    again.write(b"z" * 20)
    folder.close(NAME, ONE, again, done=False)
    assert target.read_bytes() == b"keep me"


def test_a_late_write_of_a_thread_after_a_read_has_ended_opens_nothing(tmp_path: Path) -> None:
    folder = partials(tmp_path)
    partial = folder.open(NAME, ONE, 1000)
    assert partial is not None
    folder.close(NAME, ONE, partial, done=False)
    partial.write(b"x" * 500)
    assert list((tmp_path / "partial").iterdir()) == []


def test_a_payload_opened_after_its_read_was_cancelled_is_closed_and_can_be_opened_again(tmp_path: Path) -> None:
    folder, may_open = partials(tmp_path), threading.Event()
    folder.path(NAME, ONE).write_bytes(b"x" * 500)  # a file to be opened at once

    async def cancel_while_opening(executor: ThreadPoolExecutor) -> None:
        opening = folder.open

        def slowly(*arguments: Any) -> Any:
            may_open.wait(5)
            return opening(*arguments)

        folder.open = slowly  # type: ignore[method-assign]
        task = asyncio.ensure_future(folder.open_in(executor, NAME, ONE, 1000))
        await asyncio.sleep(0)
        while not executor._work_queue.empty():  # until the thread has begun
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        folder.open = opening  # type: ignore[method-assign]
        may_open.set()

    with ThreadPoolExecutor(1) as executor:
        asyncio.run(cancel_while_opening(executor))
    gc.collect()  # a file that was left open warns, which is an error here
    again = folder.open(NAME, ONE, 1000)
    assert again is not None
    assert again.offset == 500
    folder.close(NAME, ONE, again, done=True)


def test_small_payloads_never_touch_the_disk(tmp_path: Path) -> None:
    folder = partials(tmp_path)
    small = folder.open(NAME, ONE, 10)
    assert small is not None
    small.write(b"0123456789")
    assert bytes(small.content()) == b"0123456789"
    assert list((tmp_path / "partial").iterdir()) == []


def test_the_disk_is_bounded_and_the_oldest_partial_leaves_first(tmp_path: Path) -> None:
    folder = partials(tmp_path, most=1000)
    for number in range(3):
        name = bytes([number]) * 32
        partial = folder.open(name, ONE, 400)
        assert partial is not None
        partial.write(b"x" * 300)
        folder.close(name, ONE, partial, done=False)
        os.utime(folder.path(name, ONE), (number + 1e9, number + 1e9))
    kept = sorted(path.name[:2] for path in (tmp_path / "partial").iterdir())
    assert kept == ["00", "01", "02"]
    large = folder.open(NAME, ONE, 500)
    assert large is not None
    assert sorted(path.name[:2] for path in (tmp_path / "partial").iterdir()) == ["02"]
    assert folder.open(bytes(32), TWO, 600) is None


def test_foreign_files_are_removed_from_the_folder(tmp_path: Path) -> None:
    (tmp_path / "partial").mkdir()
    (tmp_path / "partial" / "notes.txt").write_text("x")
    partials(tmp_path)
    assert list((tmp_path / "partial").iterdir()) == []


# On the wire.


@given(st.binary(min_size=1, max_size=300), st.integers(0, 2**40), st.integers(1, 300))
def test_chunks_are_the_protobuf_messages_they_stand_for(data: bytes, start: int, size: int) -> None:
    offset = start % len(data)
    written = write_chunk(memoryview(data), offset, size)
    assert written == pb.Chunk(data=data[offset : offset + size], offset=offset).SerializeToString()
    content, place = read_chunk(written)
    assert (bytes(content), place) == (data[offset : offset + size], offset)


@given(st.binary(max_size=60))
def test_any_bytes_are_a_chunk_as_protobuf_reads_it_or_refused(data: bytes) -> None:
    try:
        content, offset = read_chunk(data)
    except Refused:
        return
    chunk = pb.Chunk.FromString(data)
    assert (bytes(content), offset) == (chunk.data, chunk.offset)


# Limits.


def test_bytes_of_links_and_members_that_are_gone_stay_in_the_sums() -> None:
    traffic = LinkTraffic()
    traffic.received["garage"] += 5  # of models; frames are counted by the link
    traffic.end_link("garage", received=10, sent=20, heard=3.0)
    traffic.end_link("garage", received=1, sent=2, heard=0.0)
    assert (traffic.received["garage"], traffic.sent["garage"]) == (16, 22)
    assert list(traffic.heard) == ["garage"]
    traffic.forget("garage")
    traffic.forget("attic")
    assert (traffic.gone_received, traffic.gone_sent) == (16, 22)
    assert (traffic.received.total(), traffic.sent.total(), traffic.heard) == (0, 0, {})


def test_a_bucket_allows_a_burst_and_then_its_rate() -> None:
    bucket = Bucket(10.0, 5, now=0.0)
    assert [bucket.take(0.0) for _ in range(6)] == [True] * 5 + [False]
    assert bucket.take(0.1)
    assert not bucket.take(0.1)
    assert sum(bucket.take(100.0) for _ in range(10)) == 5


def test_penalties_double_and_are_forgiven() -> None:
    penalties = Penalties(5.0, 60.0)
    assert penalties.left_s(ONE, 0.0) == 0.0
    penalties.punish(ONE, 0.0)
    assert penalties.left_s(ONE, 1.0) == 4.0
    penalties.punish(ONE, 10.0)
    assert penalties.left_s(ONE, 10.0) == 10.0
    for _ in range(10):
        penalties.punish(ONE, 20.0)
    assert penalties.left_s(ONE, 20.0) == 60.0
    penalties.punish(ONE, 500.0)
    assert penalties.left_s(ONE, 500.0) == 5.0


def test_refusals_count_by_reason_and_by_member() -> None:
    refusals = Refusals()
    refusals.add("rate", ONE)
    refusals.add("rate")
    assert refusals.total == {"rate": 2}
    assert refusals.of(ONE) == {"rate": 1}
    refusals.forget(ONE)
    assert refusals.of(ONE) == {}
