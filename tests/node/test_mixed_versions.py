"""A node of this version and one of 0.2 in one swarm: what 0.2 says was recorded (tests/golden/0.2/wire.json)."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import grpc.aio
from net_world import FAST, until, update, world

from dfca.node.net.links.grpc_wire import make_channel
from dfca.node.net.options import Swarm
from dfca.node.net.transfer.chunks import read_chunk
from dfca.node.wire import frames, payload
from dfca.node.wire import wire_pb2 as pb
from dfca.peer.records.messages import Declined

RECORDED = json.loads((Path(__file__).parents[1] / "golden" / "0.2" / "wire.json").read_text())
FRAMES = {kind: bytes.fromhex(data) for kind, data in RECORDED["frames"]}
KNOWN = set(FRAMES)  # to a node of 0.2; another kind would end its link


def test_a_node_of_the_previous_version_talks_and_reads_models(tmp_path: Path) -> None:
    hello = frames.parse(FRAMES["hello"]).hello
    swarm = Swarm(hello.swarm, hello.model_size)

    async def run() -> None:
        async with world(tmp_path, 2, FAST, swarm) as net:
            await until(net.connected)
            old, new = net.devices
            await old.transport.stop()
            await until(lambda: not new.node.up())
            identity = old.identity
            channel = make_channel(identity, new.identity.id, new.identity.certificate, new.address, insecure=False)
            call = channel.stream_stream(frames.TALK)()
            for kind in ("hello", "heartbeat", "message", "roster_digest"):
                await call.write(FRAMES[kind])
            await until(lambda: new.node.messages and new.node.up())
            assert new.node.messages == [(old.number, Declined(3))]
            new.transport.send(old.number, update(3, size=swarm.size))
            heard: dict[str, pb.Frame] = {}
            async with asyncio.timeout(30):
                while "announce" not in heard:
                    frame = frames.parse(await call.read())
                    heard[frame.WhichOneof("kind") or ""] = frame
            assert set(heard) <= KNOWN
            assert heard["hello"].hello.epoch == hello.epoch
            announced = heard["announce"].announce
            reading = channel.unary_stream(frames.READ)(pb.ReadRequest(name=announced.name).SerializeToString())
            data = b""
            while (message := await reading.read()) is not grpc.aio.EOF:
                data += bytes(read_chunk(message)[0])
            model = payload.unpack(data, payload.Expect(swarm.size, swarm.dtype, None, "float32"))
            assert model.tolist() == [3.0] * swarm.size
            await call.write(FRAMES["received"])  # of announcement 1
            await until(lambda: new.transport.status()["cached_bytes"] == 0)
            await call.write(FRAMES["close"])
            await until(lambda: not new.node.up())
            call.cancel()
            await channel.close()

    asyncio.run(run())
