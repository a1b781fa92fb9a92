"""The forms of records and invites: what is read as it was written, and what is none."""

from __future__ import annotations

import base64
from dataclasses import replace
from typing import Any

import pytest

from dfca.base.errors import ConfigError
from dfca.node.trust.identity import is_device_id
from dfca.node.trust.invite import Invite
from dfca.node.trust.records import (
    MAX_ADDRESSES,
    MAX_CERTIFICATE_BYTES,
    MAX_KEPT,
    MAX_NAME,
    MAX_RECORD_BYTES,
    MAX_SERIAL,
    MAX_SIGNATURE_BYTES,
    Contact,
    Introduction,
    MalformedRecord,
    Removal,
    canonical,
    check_addresses,
    check_name,
    from_bytes,
    from_json,
    to_bytes,
    to_json,
)

LETTERS = "abcdefghijklmnopqrstuvwxyz234567"


def make_ids(count: int) -> list[str]:
    """Make device IDs, in order."""
    letters = sorted(LETTERS)
    return [letters[n // 1024] + letters[n // 32 % 32] + letters[n % 32] + "a" * 49 for n in range(count)]


ONE, TWO, THREE = make_ids(3)
SIGNED = b"signature"
INTRODUCTION = Introduction(ONE, "kitchen", b"PEM", ("192.0.2.1:7447",), True, True, TWO, 3, SIGNED)
REMOVAL = Removal(ONE, TWO, (ONE, THREE), SIGNED)
CONTACT = Contact(ONE, ("[2001:db8::1]:7447", "host:1"), 4, SIGNED)


@pytest.mark.parametrize("record", [INTRODUCTION, REMOVAL, CONTACT])
def test_a_record_is_read_as_it_was_written(record: Any) -> None:
    assert from_bytes(to_bytes(record)) == record
    assert list(to_json(record)) != sorted(to_json(record))
    assert to_bytes(record).startswith(b'{"addresses"' if record is not REMOVAL else b'{"by"')  # keys in order


def test_the_signer_and_the_signed_bytes_of_a_record() -> None:
    assert (INTRODUCTION.signer, REMOVAL.signer, CONTACT.signer) == (TWO, TWO, ONE)
    assert CONTACT.slot == ("contact", ONE, ONE)
    assert CONTACT.signed_bytes("swarm") == canonical(
        b"dfca roster 1 contact",
        b"swarm",
        ONE.encode(),
        canonical(b"[2001:db8::1]:7447", b"host:1"),
        (4).to_bytes(8, "big"),
    )
    flags = canonical(bytes([1]), bytes([0]), TWO.encode(), (3).to_bytes(8, "big"))
    assert replace(INTRODUCTION, is_device=False).signed_bytes("swarm").endswith(flags)
    assert INTRODUCTION.signed_bytes("swarm") != INTRODUCTION.signed_bytes("other")


def test_which_record_of_a_slot_is_held() -> None:
    for lower, higher in (
        (replace(INTRODUCTION, may_introduce=False, serial=9), INTRODUCTION),  # what was allowed stays allowed
        (INTRODUCTION, replace(INTRODUCTION, serial=4, name="attic")),
        (replace(REMOVAL, kept=(ONE, TWO, THREE)), REMOVAL),  # it keeps fewer
        (CONTACT, replace(CONTACT, serial=5, addresses=())),
    ):
        assert max(lower, higher, key=lambda record: record.rank()) is higher


@pytest.mark.parametrize(
    ("record", "change"),
    [
        (CONTACT, {"addresses": "host:1"}),
        (CONTACT, {"addresses": 7}),
        (CONTACT, {"addresses": ["host:1"] * (MAX_ADDRESSES + 1)}),
        (CONTACT, {"addresses": ["host"]}),
        (CONTACT, {"addresses": ["host:0"]}),
        (CONTACT, {"addresses": ["host:65536"]}),
        (CONTACT, {"addresses": [7447]}),
        (CONTACT, {"addresses": ["höst:1"]}),
        (CONTACT, {"addresses": ["[fe80::1%ä]:1"]}),
        (CONTACT, {"serial": -1}),
        (CONTACT, {"serial": MAX_SERIAL + 1}),
        (CONTACT, {"serial": True}),
        (CONTACT, {"serial": "4"}),
        (CONTACT, {"id": "A" * 52}),
        (CONTACT, {"kind": "greeting"}),
        (CONTACT, {"kind": 7}),
        (CONTACT, {"more": 1}),
        (CONTACT, {"signature": ""}),
        (CONTACT, {"signature": 7}),
        (CONTACT, {"signature": "no base64"}),
        (CONTACT, {"signature": "no&base64!"}),
        (CONTACT, {"signature": "ä"}),
        (CONTACT, {"signature": "c2lnbmF0dXJl="}),
        (CONTACT, {"signature": "c2lnbmF0dXJm\n"}),
        (CONTACT, {"signature": "YR=="}),  # two ways to write one byte
        (CONTACT, {"signature": base64.b64encode(bytes(MAX_SIGNATURE_BYTES + 1)).decode()}),
        (INTRODUCTION, {"certificate": 7}),
        (INTRODUCTION, {"certificate": "ä"}),
        (INTRODUCTION, {"certificate": "x" * (MAX_CERTIFICATE_BYTES + 1)}),
        (INTRODUCTION, {"may_introduce": 1}),
        (INTRODUCTION, {"is_device": None}),
        (INTRODUCTION, {"name": None}),
        (INTRODUCTION, {"name": ""}),
        (INTRODUCTION, {"name": "x" * (MAX_NAME + 1)}),
        (INTRODUCTION, {"name": " kitchen"}),
        (INTRODUCTION, {"name": "kit\nchen"}),
        (INTRODUCTION, {"name": "a/b"}),
        (INTRODUCTION, {"name": ONE}),
        (INTRODUCTION, {"name": "u\u0308"}),  # in another normal form
        (REMOVAL, {"kept": "abc"}),
        (REMOVAL, {"kept": 7}),
        (REMOVAL, {"kept": [7]}),
        (REMOVAL, {"kept": [ONE, "short"]}),
        (REMOVAL, {"kept": [THREE, ONE]}),
        (REMOVAL, {"kept": [ONE, ONE]}),
        (REMOVAL, {"kept": make_ids(MAX_KEPT + 1)}),
    ],
)
def test_malformed_records_are_refused(record: Any, change: dict[str, Any]) -> None:
    values = to_json(record) | change
    with pytest.raises(MalformedRecord):
        from_json(values)


def test_the_largest_record_is_read() -> None:
    assert len(check_addresses(["host:65535"] * MAX_ADDRESSES)) == MAX_ADDRESSES
    assert check_addresses(("host:1",)) == ("host:1",)
    assert len(check_name("x" * MAX_NAME)) == MAX_NAME
    for change in (
        {"serial": MAX_SERIAL},
        {"serial": 0},
        {"signature": base64.b64encode(bytes(MAX_SIGNATURE_BYTES)).decode()},
    ):
        assert from_json(to_json(CONTACT) | change)
    assert from_json(to_json(INTRODUCTION) | {"certificate": "x" * MAX_CERTIFICATE_BYTES})
    with pytest.raises(MalformedRecord, match="not an object"):
        from_json([])
    with pytest.raises(MalformedRecord, match="is not JSON"):
        from_bytes(b" " * MAX_RECORD_BYTES)
    with pytest.raises(MalformedRecord, match=f"{MAX_RECORD_BYTES + 1} bytes, more than"):
        from_bytes(b" " * (MAX_RECORD_BYTES + 1))


def test_removals_may_keep_many() -> None:
    names = make_ids(MAX_KEPT)
    assert all(map(is_device_id, names))
    kept = from_json(to_json(REMOVAL) | {"kept": names})
    assert isinstance(kept, Removal)
    assert len(kept.kept) == MAX_KEPT


# Invites.


def test_an_invite_is_read_as_it_was_written() -> None:
    for host in ("192.0.2.1", "node.local", "2001:db8::1", "fe80::1%eth0"):
        invite = Invite.make(host, 7447, ONE)
        assert Invite.parse(f"  {invite}\n") == invite
    assert Invite.make("h", 1, ONE).secret != Invite.make("h", 1, ONE).secret
    assert Invite.parse(str(Invite.make("h", 65535, ONE))).port == 65535


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda line: line.replace("dfca1:", "dfca2:"), "that do not begin with dfca1:"),
        (lambda line: line.replace("/", "-"), "with 0 slashes instead of 2"),
        (lambda line: line + "/", "with 3 slashes instead of 2"),
        (lambda line: line[:-1], r"got \d+ characters; copy the whole line"),
        (lambda line: line.replace(":7447", ":0"), "the invite of device .* is damaged"),
        (lambda line: line.replace(":7447", ":65536"), "is damaged"),
        (lambda line: line.replace("192.0.2.1", "192 0 2 1"), "is damaged"),
        (lambda line: line.replace(ONE, "b" * 52), "is damaged"),
        (lambda line: line[:-1] + "b", "is damaged"),  # the last letter has bits that no secret has
    ],
)
def test_malformed_invites_are_refused(change: Any, sentence: str) -> None:
    line = str(Invite("192.0.2.1", 7447, ONE, bytes(16)))
    assert Invite.parse(line)
    with pytest.raises(ConfigError, match=sentence):
        Invite.parse(change(line))
