"""Probes, for `dfca node doctor`: does a member answer, what does its clock say, and can it reach this device?"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import grpc

from dfca.base.errors import ConfigError
from dfca.node.net.links.grpc_wire import call_metadata, make_channel
from dfca.node.net.local import Local
from dfca.node.trust.identity import Identity
from dfca.node.trust.membership import Member
from dfca.node.wire import wire_pb2 as pb
from dfca.node.wire.frames import PROBE, Refused, parse_probe, parse_probe_reply

DIAL_S = 3.0
MOST_ADDRESSES = 4
MOST_ERROR = 200


@dataclass(frozen=True)
class Probed:
    """The result of probing one address."""

    address: str
    error: str = ""  # empty if the member answered
    rtt_s: float = 0.0
    offset_s: float = 0.0  # its clock minus ours, within half the round trip
    back: tuple[tuple[str, str], ...] = ()  # (address of this device, why the member cannot reach it or "")
    summary: str = ""  # JSON


async def answer_probe(local: Local, member: str, data: bytes, summarise: Callable[[], str]) -> bytes:
    """Answer the probe of a member. Raises Refused for one that is malformed."""
    request = parse_probe(data)
    reply = pb.ProbeReply()
    known, insecure = local.roster.member(member), local.options.insecure
    if request.dial_back and known is not None:
        dials = (probe(local.identity, known, at, insecure, False) for at in known.addresses[:MOST_ADDRESSES])
        for dialled in await asyncio.gather(*dials):
            reply.dialled.add(address=dialled.address, error=dialled.error[:MOST_ERROR])
    if request.summary:
        reply.summary = summarise()
    reply.time_s = time.time()
    answer: bytes = reply.SerializeToString()
    return answer


async def probe(
    identity: Identity, member: Member, address: str, insecure: bool, dial_back: bool, summary: bool = False
) -> Probed:
    """Dial an address of a member; errors are part of the result."""
    span = 3 * DIAL_S if dial_back else DIAL_S
    channel = None
    try:
        channel = make_channel(identity, member.id, member.certificate, address, insecure)
        async with asyncio.timeout(DIAL_S):
            await channel.channel_ready()
        begin = time.monotonic()
        call = channel.unary_unary(PROBE)
        request = pb.ProbeRequest(dial_back=dial_back, summary=summary).SerializeToString()
        reply = parse_probe_reply(await call(request, timeout=span, metadata=call_metadata(identity, insecure)))
        took, now = time.monotonic() - begin, time.time()
        back = tuple((dialled.address, dialled.error) for dialled in reply.dialled)
        offset = reply.time_s - (now - took / 2) if not dial_back else 0.0
        return Probed(address, "", took, offset, back, reply.summary)
    except TimeoutError:
        return Probed(address, "no answer in time")
    except grpc.RpcError as error:
        code = getattr(error, "code", lambda: None)()
        return Probed(address, f"the call was refused ({code.name.lower() if code else 'broken'})")
    except (ConfigError, Refused) as error:
        return Probed(address, str(error))
    finally:
        if channel is not None:
            with suppress(Exception):
                await channel.close()
