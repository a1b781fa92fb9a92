"""Reads announced models from neighbours: in parts, resumed after a break, delivered when complete.

Time limits use the steady clock and adapt to the link (`timing`): a stall is noticed soon on a fast link and later
on a slow one, and a neighbour that sends a byte per second is given up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from dfca.base.errors import ConfigError
from dfca.node.net.links.dialer import Dialer
from dfca.node.net.links.link import LinkDown, NetLink
from dfca.node.net.links.parts import PacedSize, PartReader
from dfca.node.net.links.timing import Deadline
from dfca.node.net.links.wire import Connection, OutStream, StreamBroken, StreamCancelled, StreamEnded
from dfca.node.net.local import Local
from dfca.node.net.options import NetOptions, Swarm
from dfca.node.net.transfer.chunks import read_chunk
from dfca.node.net.transfer.partials import Partial, Partials
from dfca.node.net.transfer.pulls import Pull, Pulls
from dfca.node.wire import codec, payload
from dfca.node.wire import wire_pb2 as pb
from dfca.node.wire.frames import CODED, ENCODING_NAMES, Refused
from dfca.peer.records.messages import Update


async def _ended(writing: Future[None] | None) -> None:
    """Wait until a thread has ended, with or without an error."""
    if writing is not None and not writing.done():
        wrapped = asyncio.wrap_future(writing)
        wrapped.add_done_callback(lambda done: done.cancelled() or done.exception())  # also if nobody waits any more
        await asyncio.wait([wrapped])


class _Stalled(Exception):
    """Nothing came in time."""


class _Broken(_Stalled):
    """The connection broke or could not be made: not the neighbour's fault."""


class _Gone(Exception):
    """The neighbour no longer has it."""


class _ReadCall:
    """A model that is read by a call, from a neighbour of version 0.2, which does not send parts on the link."""

    def __init__(self, call: OutStream) -> None:
        self._call, self.cancel = call, call.cancel

    async def read(self) -> tuple[memoryview, int]:
        return read_chunk(await self._call.read())


class _Source:
    """How fast a member sends, and the connection for the models of one that does not send them on its link."""

    def __init__(self, options: NetOptions) -> None:
        self.deadline = Deadline(options.least_read_s, options.most_read_s)
        self.window = PacedSize.window(options)
        self.attempts = 0
        self._connection: Connection | None = None

    def connection(self, make: Callable[[], Connection]) -> Connection:
        """Return the connection; a new one after `drop`."""
        if self._connection is None:
            self._connection = make()
        return self._connection

    async def drop(self) -> None:
        """Leave the connection."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(Exception):
                await connection.close()


class Puller:
    """Reads models. deliver: called with the link and the whole message, in the epoch of its announcement."""

    def __init__(
        self,
        local: Local,
        swarm: Swarm,
        dialer: Dialer,
        partials: Partials,
        executor: Executor,
        deliver: Callable[[NetLink, Any], None],
    ) -> None:
        options = local.options
        self.pulls = Pulls(options.pulls, options.pulls_per_member, options.announced)
        self.reference_norm: Callable[[], float | None] = lambda: None
        self.resumed = 0  # bytes that did not have to be read again
        self._local, self._swarm, self._dialer, self._partials = local, swarm, dialer, partials
        self._executor, self._deliver = executor, deliver
        self._sources: dict[str, _Source] = {}
        self._tasks: dict[Pull, asyncio.Task[None]] = {}
        self._dropping: set[asyncio.Task[None]] = set()
        self._due: dict[Pull, tuple[float, Callable[[], None]]] = {}  # when, and what ends the wait

    def announce(self, link: NetLink, announce: pb.Announce) -> None:
        """Take an announcement. Raises Refused if it cannot be a model of this swarm."""
        decoded = codec.decode(announce.message)
        encoding = ENCODING_NAMES[announce.encoding]
        codec.check_announced(decoded, announce.rows, encoding)
        if encoding == CODED and (decoded.kind is not Update or self._swarm.payload_bytes is None):
            raise Refused("encoding", f"the payload of a codec for {decoded.kind.__name__}, which has none here")
        most = payload.most_bytes(self._expect(announce.rows, encoding))
        if announce.size > most:
            raise Refused("size", f"{announce.size} bytes announced, at most {most}")
        pull = Pull(
            link=link,
            member=link.member,
            number=announce.number,
            name=announce.name,
            size=announce.size,
            rows=announce.rows,
            encoding=encoding,
            cluster=decoded.partial.message.cluster if decoded.kind is Update else None,
            decoded=decoded,
        )
        for replaced in self.pulls.announce(pull):
            link.send(pb.Frame(unavailable=pb.Unavailable(number=replaced.number, reason="newer")))
        self._fill()

    def withdraw(self, link: NetLink, number: int) -> None:
        """Forget an announcement."""
        pull = self.pulls.withdraw(link.member, number)
        if pull is not None:
            self._cancel(pull)

    def lose(self, link: NetLink) -> None:
        """Stop reading from a link that went down; partial models stay on the disk."""
        for pull in self.pulls.forget(link.member):
            self._cancel(pull)
        source = self._sources.pop(link.member, None)
        if source is not None:  # its connection is likely stuck too
            task = asyncio.ensure_future(source.drop())
            self._dropping.add(task)
            task.add_done_callback(self._dropping.discard)

    def check(self) -> None:
        """End reads that are overdue."""
        now = self._local.now()
        for pull, (due, cancel) in list(self._due.items()):
            if now > due:
                del self._due[pull]
                cancel()

    async def close(self) -> None:
        """Stop everything."""
        tasks = list(self._tasks.values())
        for task in tasks:
            if not task.cancelling():  # a second cancellation would lose the chunk that a thread is writing
                task.cancel()
        await asyncio.gather(*tasks, *self._dropping, return_exceptions=True)
        for source in self._sources.values():
            await source.drop()
        self._sources.clear()

    # One pull.

    def _fill(self) -> None:
        while (pull := self.pulls.begin()) is not None:
            task = asyncio.ensure_future(self._run(pull))
            self._tasks[pull] = task
            task.add_done_callback(lambda _, pull=pull: self._end(pull))  # type: ignore[misc]

    def _end(self, pull: Pull) -> None:
        task = self._tasks.pop(pull)
        self._due.pop(pull, None)
        self.pulls.end(pull)
        pull.link.incoming.end(pull.number)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Refused):
            pull.link.end(LinkDown(error.reason, error.text, guilty=True))
        elif error is not None:
            pull.link.end(LinkDown("failed", f"{type(error).__name__}: {error}"))
        self._fill()

    def _cancel(self, pull: Pull) -> None:
        task = self._tasks.get(pull)
        if task is not None:
            task.cancel()

    async def _run(self, pull: Pull) -> None:
        partial = await self._partials.open_in(self._executor, pull.name, pull.member, pull.size)
        if partial is None:
            self._give_up(pull, "disk")
            return
        done = False
        try:
            self.resumed += partial.offset
            if not await self._read_all(pull, partial):
                return
            if partial.resumed and partial.digest() != pull.name:
                await self._in_thread(partial.discard)  # the file on the disk may be wrong: read everything again
                if not await self._read_all(pull, partial):
                    return
            done = True
            model = await self._in_thread(self._unpack, pull, partial, self.reference_norm())
            if not pull.link.down and not pull.cancelled:
                message = pull.decoded.message(model)
                pull.link.send(pb.Frame(received=pb.Received(number=pull.number)))
                self._deliver(pull.link, message)
        except OSError:
            self._give_up(pull, "disk")
        finally:
            self._partials.close(pull.name, pull.member, partial, done)

    async def _read_all(self, pull: Pull, partial: Partial) -> bool:
        """Read until the payload is complete, patient with a few stalls; return whether it is."""
        options, misses = self._local.options, 0
        source = self._sources.setdefault(pull.member, _Source(options))
        while partial.offset < pull.size:
            before = partial.offset
            try:
                await self._read_some(pull, partial, source)
            except _Gone:
                self._lose(pull, "gone")
                return False
            except _Stalled as error:
                enough = partial.offset - before >= options.least_progress_bytes
                misses = 1 if enough else misses + 1
                source.attempts += 1
                await source.drop()
                if misses >= options.read_attempts:
                    if isinstance(error, _Broken):
                        self._give_up(pull, "unreachable")
                        return False
                    raise Refused("deadline", str(error)) from error
                await asyncio.sleep(min(0.1 * 2**misses, 1.0))
        return True

    async def _read_some(self, pull: Pull, partial: Partial, source: _Source) -> None:
        """Read from the offset until the payload is complete, nothing comes in time, or the connection breaks."""
        call = self._open(pull, partial.offset, source)
        expected, writing = partial.offset, None
        progress, since = 0, self._local.now()
        try:
            while expected < pull.size:
                if pull not in self._due:
                    self._due[pull] = (self._local.now() + source.deadline.seconds, call.cancel)
                data, offset = await self._next(call, source)
                if offset != expected or expected + len(data) > pull.size:
                    raise Refused("size", "a chunk that does not follow the last one")
                expected, progress = expected + len(data), progress + len(data)
                if progress >= min(self._local.options.least_progress_bytes, pull.size):
                    self._due.pop(pull, None)
                    source.deadline.observe(self._local.now() - since)
                    progress, since = 0, self._local.now()
                if pull.reader is None:
                    self._local.traffic.received[pull.member] += len(data)
                    pull.link.detector.hear(self._local.now())
                await _ended(writing)
                if writing is not None:
                    writing.result()
                pull.got = expected
                writing = self._executor.submit(partial.write, data)
        finally:
            self._due.pop(pull, None)
            call.cancel()
            await _ended(writing)
        if writing is not None:
            writing.result()

    def _open(self, pull: Pull, offset: int, source: _Source) -> _ReadCall | PartReader:
        """Begin to read, or continue after a stall."""
        if not pull.link.in_parts:
            connection = source.connection(lambda: self._connect(pull.member, source.attempts))
            return _ReadCall(connection.read(pb.ReadRequest(name=pull.name, offset=offset).SerializeToString()))
        if pull.reader is None or pull.reader.is_done:
            pull.reader = pull.link.incoming.read(pull.number, offset, pull.size, source.window)
        return pull.reader

    async def _next(self, call: _ReadCall | PartReader, source: _Source) -> tuple[memoryview, int]:
        try:
            return await call.read()
        except StreamEnded as error:
            raise _Stalled("it ended early") from error
        except StreamCancelled as error:
            source.deadline.miss()  # by `check`
            raise _Stalled("nothing came in time") from error
        except StreamBroken as error:
            if error.code == "not_found":
                raise _Gone from error
            raise _Broken(f"{error.code.upper()}: {str(error)[:100]}") from error

    def _unpack(self, pull: Pull, partial: Partial, norm: float | None) -> Any:
        """Check the payload and return the model. Runs in a thread."""
        if partial.digest() != pull.name:
            raise Refused("digest", "other bytes than announced")
        expect = replace(self._expect(pull.rows, pull.encoding), reference_norm=norm)
        return self._swarm.fill(payload.unpack(partial.content(), expect))

    def _give_up(self, pull: Pull, reason: str) -> None:
        self._local.refusals.add(reason, pull.member)
        self._lose(pull, reason)

    def _lose(self, pull: Pull, reason: str) -> None:
        """Give up a model: an update is lost, anything else takes the link down."""
        if pull.cluster is None:
            pull.link.end(LinkDown(reason, "a message that must arrive could not be read"))
        elif not pull.link.down:
            pull.link.send(pb.Frame(unavailable=pb.Unavailable(number=pull.number, reason=reason)))

    def _connect(self, member: str, attempt: int) -> Connection:
        known, addresses = self._local.roster.member(member), self._dialer.addresses(member)
        if known is None or not addresses:
            raise _Broken("no address is known")
        address = addresses[attempt % len(addresses)]
        try:
            return self._local.wire.connect(member, known.certificate, address)
        except ConfigError as error:
            raise _Broken(str(error)) from error

    def _expect(self, rows: int, encoding: str) -> payload.Expect:
        if encoding == CODED:
            return payload.Expect(self._swarm.payload_bytes or 0, torch.uint8, None, encoding)
        return payload.Expect(self._swarm.sent_size, self._swarm.dtype, rows or None, encoding)

    async def _in_thread(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._executor, function, *arguments)
