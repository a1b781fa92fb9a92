"""Identities and rosters: merged in any order to the same result, and nothing forged gets in."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dfca.base.errors import ConfigError, DataError
from dfca.node.trust import identity as identity_module
from dfca.node.trust import membership, records, roster
from dfca.node.trust.identity import (
    Identity,
    check_certificate,
    device_id,
    is_device_id,
    peer_number,
    short,
    verify,
)
from dfca.node.trust.records import Contact, Introduction, MalformedRecord, Removal, sign_record
from dfca.node.trust.roster import Roster

SWARM = "s" * 52


@pytest.fixture(scope="module")
def people(tmp_path_factory: pytest.TempPathFactory) -> list[Identity]:
    folder = tmp_path_factory.mktemp("people")
    return [Identity.create(folder / str(number)) for number in range(6)]


@pytest.fixture
def founded(people: list[Identity]) -> Roster:
    """A founder, one that may introduce, and one that it introduced."""
    made = Roster.found(people[0], SWARM, "kitchen", ["192.0.2.1:7447"])
    made.introduce(people[0], people[1].certificate, "garage", may_introduce=True)
    made.introduce(people[1], people[2].certificate, "attic")
    return made


def names(of: Roster) -> list[str]:
    return sorted(member.name for member in of.members().values())


# Identities


def test_an_identity_is_read_as_it_was_made(tmp_path: Path) -> None:
    made = Identity.create(tmp_path / "node")
    assert Identity.load(tmp_path / "node") == made
    assert made.id == device_id(made.certificate) == check_certificate(made.certificate)
    assert len(made.id) == 52
    assert is_device_id(made.id)
    assert made.number == peer_number(made.id) < 2**63
    assert os.stat(tmp_path / "node" / "key.pem").st_mode & 0o777 == 0o600
    assert "PRIVATE" not in repr(made)
    signature = made.sign(b"data")
    assert verify(made.certificate, b"data", signature)
    assert not verify(made.certificate, b"date", signature)
    assert not verify(made.certificate, b"data", signature[:-1])
    assert not verify(b"no certificate", b"data", signature)


def test_a_key_is_never_replaced(tmp_path: Path) -> None:
    Identity.create(tmp_path)
    with pytest.raises(ConfigError, match="has a key already"):
        Identity.create(tmp_path)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "key.pem").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="has a key already"):
        Identity.create(tmp_path / "other")
    assert not (tmp_path / "nowhere").exists()


def break_key(folder: Path) -> None:
    (folder / "key.pem").write_text("garbage")


def break_certificate(folder: Path) -> None:
    (folder / "certificate.pem").write_text("garbage")


def take_another_key(folder: Path) -> None:
    (folder / "key.pem").write_bytes(Identity.create(folder / "other").key)


def publish_key(folder: Path) -> None:
    (folder / "key.pem").chmod(0o644)


@pytest.mark.parametrize(
    ("spoil", "error", "sentence"),
    [
        (lambda folder: (folder / "key.pem").unlink(), ConfigError, "key.pem does not exist"),
        (lambda folder: (folder / "certificate.pem").unlink(), ConfigError, "certificate.pem does not exist"),
        (break_key, DataError, "is not a private key"),
        (break_certificate, DataError, "is not the certificate of a device: it cannot be read"),
        (take_another_key, DataError, "do not belong together"),
        (publish_key, ConfigError, "chmod 600"),
    ],
)
def test_a_damaged_identity_is_explained(
    tmp_path: Path, spoil: Callable[[Path], None], error: type[Exception], sentence: str
) -> None:
    Identity.create(tmp_path)
    spoil(tmp_path)
    with pytest.raises(error, match=sentence):
        Identity.load(tmp_path)


def test_dates_of_a_certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Identity.create(tmp_path)

    class Clock(datetime):
        shown = datetime(1980, 1, 1, tzinfo=UTC)

        @classmethod
        def now(cls, tz: object = None) -> datetime:  # type: ignore[override]
            return cls.shown

    monkeypatch.setattr(identity_module, "datetime", Clock)
    with pytest.raises(DataError, match="clock shows 1980-01-01, before"):
        Identity.load(tmp_path)
    made_in_the_past = Identity.create(tmp_path / "past")  # a device that starts with a clock of 1980
    Clock.shown = datetime.now(UTC) + timedelta(days=3660)
    with pytest.raises(DataError, match="expired on"):
        Identity.load(tmp_path)
    Clock.shown = datetime(2030, 1, 1, tzinfo=UTC)
    assert Identity.load(tmp_path / "past") == made_in_the_past


def test_certificates_that_could_vouch_for_others_are_refused(people: list[Identity]) -> None:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization

    def forge(subject: str, alternative: str, ca: bool, signer: Identity) -> bytes:
        key = serialization.load_pem_private_key(people[0].key, None)
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, subject)])
        builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).serial_number(7)
        builder = builder.not_valid_before(datetime(2020, 1, 1)).not_valid_after(datetime(2040, 1, 1))
        builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(alternative)]), False)
        builder = builder.add_extension(x509.BasicConstraints(ca, None), True).public_key(key.public_key())  # type: ignore[arg-type]
        by = serialization.load_pem_private_key(signer.key, None)
        return builder.sign(by, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)  # type: ignore[arg-type]

    own, other = people[0], people[1]
    assert check_certificate(forge(own.id, own.id, False, own)) == own.id  # renewed: the same ID
    for certificate, reason in (
        (forge(own.id, own.id, True, own), "vouch"),
        (forge(other.id, own.id, False, own), "name is not the ID"),
        (forge(own.id, other.id, False, own), "alternative name"),
        (forge(own.id, own.id, False, other), "signature"),
        (own.certificate + other.certificate, "more in it"),
        (own.certificate + b"\n", "more in it"),
        (b"x" * 3000, "3000 bytes"),
        (b"", "cannot be read"),
    ):
        with pytest.raises(ValueError, match=reason):
            check_certificate(certificate)


# Rosters


def test_members_of_a_roster(founded: Roster, people: list[Identity]) -> None:
    assert names(founded) == ["attic", "garage", "kitchen"]
    garage = founded.by_name("garage")
    assert garage is not None
    assert garage == founded.member(people[1].id) == founded.by_number(people[1].number) == founded.by_name(garage.id)
    assert garage == founded.by_name(short(garage.id))
    assert garage.may_introduce
    assert founded.member(people[3].id) is None
    assert founded.by_name("cellar") is None
    with pytest.raises(ConfigError, match=r"may not introduce others to this swarm; invite from one that may: "):
        founded.introduce(people[2], people[3].certificate, "cellar")


def test_subscribers_hear_of_new_records(founded: Roster, people: list[Identity]) -> None:
    heard: list[list[str]] = []
    stop = founded.subscribe(lambda: heard.append(names(founded)))
    founded.merge(founded.records())
    assert heard == []
    founded.announce(people[2], ["[2001:db8::1]:1"])
    founded.announce(people[2], ["[2001:db8::1]:1"])  # known: nothing happens
    founded.remove(people[0], people[2].id)
    stop()
    founded.introduce(people[0], people[3].certificate, "cellar")
    assert heard == [["attic", "garage", "kitchen"], ["garage", "kitchen"]]


def test_a_contact_that_says_nothing_new_is_news_all_the_same(founded: Roster, people: list[Identity]) -> None:
    """That a device has run is worth knowing, also where its addresses are those of its introduction."""
    member = founded.introduce(people[0], people[5].certificate, "pump", ["198.51.100.7:7447"])
    heard, before = [], founded.digest()
    founded.subscribe(lambda: heard.append(founded.digest()))
    founded.announce(people[5], member.addresses)
    assert set(founded.announced()) == {people[5].id}
    assert len(heard) == 1
    assert heard[0] != before


def test_the_newest_contact_counts(founded: Roster, people: list[Identity]) -> None:
    def at(address: str, serial: int) -> records.Record:
        return sign_record(Contact(people[2].id, (address,), serial), people[2], SWARM)

    assert founded.merge([at("192.0.2.3:1", 5)]) == []
    assert founded.merge([at("192.0.2.4:1", 4)]) == [roster.RosterReason.OLD_CONTACT]
    assert founded.members()[people[2].id].addresses == ("192.0.2.3:1",)
    founded.announce(people[2], ["192.0.2.9:1"])
    assert founded.members()[people[2].id].addresses == ("192.0.2.9:1",)


def test_removal_is_final_and_travels(founded: Roster, people: list[Identity]) -> None:
    other = founded.copy()
    founded.remove(people[0], people[2].id)
    assert other.merge(founded.records()) == []
    assert names(other) == ["garage", "kitchen"]
    again = Introduction(people[2].id, "attic", people[2].certificate, (), True, True, people[0].id, 9)
    other.merge([sign_record(again, people[0], SWARM)])
    assert names(other) == ["garage", "kitchen"]
    with pytest.raises(ConfigError, match="was removed from this swarm, which is final"):
        other.introduce(people[0], people[2].certificate, "attic")


@pytest.mark.parametrize(("keep", "left"), [(None, ["attic", "kitchen"]), ((), ["kitchen"])])
def test_members_introduced_by_a_removed_one_stay_only_if_kept(
    founded: Roster, people: list[Identity], keep: tuple[str, ...] | None, left: list[str]
) -> None:
    later = founded.copy()
    later.introduce(people[1], people[3].certificate, "cellar")  # unknown to the member that removes the introducer
    founded.remove(people[0], people[1].id, keep)
    founded.merge(later.records())
    assert names(founded) == left
    founded.introduce(people[0], people[3].certificate, "cellar")
    assert names(founded) == sorted([*left, "cellar"])


def test_one_that_leaves_cannot_keep_friends_once_it_is_removed(founded: Roster, people: list[Identity]) -> None:
    leaving = founded.copy()
    leaving.introduce(people[1], people[3].certificate, "friend")
    leaving.remove(people[1], people[1].id)
    assert names(leaving) == ["attic", "friend", "kitchen"]
    founded.remove(people[0], people[1].id)
    founded.merge(leaving.records())
    assert names(founded) == ["attic", "kitchen"]


def test_the_root_is_removed_by_itself_only(founded: Roster, people: list[Identity]) -> None:
    with pytest.raises(ConfigError, match="can only be removed by itself"):
        founded.remove(people[1], people[0].id)
    forced = sign_record(Removal(people[0].id, people[1].id, ()), people[1], SWARM)
    assert founded.merge([forced]) == [roster.RosterReason.ROOT_STAYS]
    founded.remove(people[0], people[0].id)
    assert names(founded) == ["attic", "garage"]  # the swarm continues without its founder
    founded.introduce(people[1], people[3].certificate, "cellar")
    assert "cellar" in names(founded)


def test_a_member_may_be_removed_by_one_that_may_introduce_only(founded: Roster, people: list[Identity]) -> None:
    with pytest.raises(ConfigError, match="may not remove others"):
        founded.remove(people[2], people[1].id)
    forced = sign_record(Removal(people[1].id, people[2].id, ()), people[2], SWARM)
    assert founded.merge([forced]) == [roster.RosterReason.NOT_ALLOWED]
    with pytest.raises(ConfigError, match="is not a member of this swarm; members: "):
        founded.remove(people[0], people[5].id)


def test_forged_records_are_refused_with_a_reason(founded: Roster, people: list[Identity]) -> None:
    a, b, c, d, stranger = people[0], people[1], people[2], people[3], people[4]

    def introduction(of: Identity, by: Identity, **other: object) -> Introduction:
        return replace(Introduction(of.id, "x", of.certificate, (), False, True, by.id), **other)  # type: ignore[arg-type]

    good = introduction(d, a)
    signed = sign_record(good, a, SWARM)
    cases: list[tuple[records.Record | bytes, str]] = [
        (sign_record(good, a, "another swarm"), roster.RosterReason.SIGNATURE),
        (sign_record(good, b, SWARM), roster.RosterReason.SIGNATURE),  # in the name of another
        (replace(signed, name="y"), roster.RosterReason.SIGNATURE),
        (replace(signed, may_introduce=True), roster.RosterReason.SIGNATURE),
        (replace(signed, addresses=("192.0.2.66:1",)), roster.RosterReason.SIGNATURE),
        (sign_record(introduction(d, c), c, SWARM), roster.RosterReason.NOT_ALLOWED),
        (sign_record(introduction(c, c, may_introduce=True), c, SWARM), roster.RosterReason.SELF_INTRODUCED),
        (sign_record(introduction(b, b, may_introduce=True), b, SWARM), roster.RosterReason.SELF_INTRODUCED),
        (sign_record(introduction(d, stranger), stranger, SWARM), roster.RosterReason.UNKNOWN_SIGNER),
        (sign_record(introduction(d, b, certificate=stranger.certificate), b, SWARM), roster.RosterReason.CERTIFICATE),
        (sign_record(introduction(d, b, is_device=False), b, SWARM), roster.RosterReason.NOT_A_DEVICE),
        (sign_record(Contact(stranger.id, (), 1), stranger, SWARM), roster.RosterReason.UNKNOWN_SIGNER),
        (sign_record(Contact(c.id, ("192.0.2.66:1",), 99), b, SWARM), roster.RosterReason.SIGNATURE),
        (sign_record(Removal(b.id, a.id, ()), c, SWARM), roster.RosterReason.SIGNATURE),
        (sign_record(Removal(stranger.id, a.id, ()), a, SWARM), roster.RosterReason.UNKNOWN_SIGNER),
        (b"{", roster.RosterReason.MALFORMED),
        (b"[" * 60_000, roster.RosterReason.MALFORMED),
        (b"x" * (records.MAX_RECORD_BYTES + 1), roster.RosterReason.MALFORMED),
    ]
    before = founded.digest()
    for record, reason in cases:
        assert founded.merge([record]) == [reason], record
    assert founded.digest() == before
    assert sum(founded.refused.values()) == len(cases)
    assert {reason for _, reason in cases} <= set(roster.RosterReason)
    assert founded.merge([signed]) == []


def test_forged_records_cost_little(founded: Roster, people: list[Identity]) -> None:
    forged = [
        sign_record(Contact(people[2].id, (), serial), people[3], SWARM) for serial in range(2 * roster.MAX_FORGED)
    ]
    good = sign_record(Contact(people[2].id, ("192.0.2.9:1",), 1), people[2], SWARM)
    reasons = founded.merge([*forged, good])
    unread = [roster.RosterReason.NOT_READ] * (roster.MAX_FORGED + 1)
    assert reasons == [roster.RosterReason.SIGNATURE] * roster.MAX_FORGED + unread
    assert founded.merge([good]) == []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("name", ""),
        ("name", "x" * 65),
        ("name", "two\nlines"),
        ("name", "\u202eevil"),
        ("name", "\ud800"),
        ("name", " x"),
        ("name", "a~b"),
        ("name", "../x"),
        ("name", "e\u0301"),
        ("name", "a" * 52),
        ("name", 3),
        ("addresses", "192.0.2.1:1"),
        ("addresses", ["192.0.2.1"]),
        ("addresses", ["192.0.2.1:0"]),
        ("addresses", ["192.0.2.1:65536"]),
        ("addresses", ["http://x:1"]),
        ("addresses", ["x y:1"]),
        ("addresses", ["192.0.2.1:\u0661"]),
        ("addresses", ["192.0.2.1:1"] * 9),
        ("may_introduce", 1),
        ("is_device", None),
        ("id", "b" * 52),
        ("introducer", "A" * 52),
        ("certificate", "\u00e9"),
        ("certificate", "x" * 2049),
        ("signature", "!"),
        ("signature", ""),
        ("signature", "A" * 400),
        ("serial", -1),
        ("serial", 2**63),
        ("serial", True),
        ("kind", "other"),
        ("kind", None),
        ("more", 1),
    ],
)
def test_the_form_of_a_record(founded: Roster, key: str, value: object) -> None:
    values = records.to_json(founded.records()[0])
    assert records.from_json(values) == founded.records()[0]
    with pytest.raises(MalformedRecord):
        records.from_json(values | {key: value})


def test_equal_names_are_told_apart_and_both_keep_a_part_of_their_id(founded: Roster, people: list[Identity]) -> None:
    founded.introduce(people[0], people[3].certificate, "Garage")
    first, second = founded.members()[people[1].id], founded.members()[people[3].id]
    assert (first.name, second.name) == (f"garage~{short(first.id)}", f"Garage~{short(second.id)}")
    assert founded.by_name("garage") is None
    assert founded.by_name(first.name) == first
    founded.introduce(people[0], people[3].certificate, "cellar")  # renamed
    assert founded.members()[people[1].id].name == "garage"
    assert founded.members()[people[3].id].name == "cellar"


def test_two_members_never_have_the_same_number(
    founded: Roster, people: list[Identity], monkeypatch: pytest.MonkeyPatch
) -> None:
    def clashing(id: str) -> int:
        return 7 if id in (people[0].id, people[3].id) else peer_number(id)

    other = founded.copy()
    other.introduce(people[1], people[3].certificate, "cellar")
    for module in (roster, membership):
        monkeypatch.setattr(module, "peer_number", clashing)
    founded = founded.copy()  # derived anew, with these numbers
    with pytest.raises(ConfigError, match="has the number of another member"):
        founded.introduce(people[0], people[3].certificate, "cellar")
    assert founded.merge(other.records()) == []
    assert names(founded) == ["attic", "garage", "kitchen"]  # the one nearer to the root stays
    assert founded.digest() == other.digest()


def test_a_roster_has_room_for_so_many(
    founded: Roster, people: list[Identity], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roster, "MAX_MEMBERS", 3)
    with pytest.raises(ConfigError, match="roster is full"):
        founded.introduce(people[0], people[3].certificate, "cellar")
    monkeypatch.setattr(roster, "MAX_RECORDS", 2)
    assert Roster(SWARM, people[0].id).merge(founded.records()) == [roster.RosterReason.FULL]


def test_a_roster_on_the_disk(founded: Roster, tmp_path: Path) -> None:
    path = tmp_path / "roster.json"
    assert founded.changed
    founded.save(path)
    assert not founded.changed
    read = Roster.load(path)
    assert (read.digest(), read.members(), read.changed) == (founded.digest(), founded.members(), False)
    values = json.loads(path.read_bytes())
    for text, sentence in (
        ("{", "is not a roster that can be read"),
        ("[]", "is not a roster that can be read"),
        (json.dumps(values | {"root": "x"}), "is not a roster that can be read"),
        (json.dumps(values | {"version": 2}), "has version 2 and this program reads 1"),
        (json.dumps(values | {"swarm": "another"}), "3 of 3 records do not hold"),
    ):
        path.write_text(text)
        with pytest.raises(DataError, match=sentence):
            Roster.load(path)
    with pytest.raises(DataError, match="does not exist"):
        Roster.load(tmp_path / "nowhere.json")


Action = tuple[str, int, int, bool]
ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["introduce", "introduce", "remove", "announce"]), st.integers(0, 5), st.integers(0, 5)
    ).flatmap(lambda drawn: st.booleans().map(lambda flag: (*drawn, flag))),
    max_size=7,
)


def act(on: Roster, people: list[Identity], actions: list[Action]) -> Roster:
    """Do what is allowed of a list of actions."""
    for kind, who, whom, flag in actions:
        try:
            if kind == "introduce":
                on.introduce(people[who], people[whom].certificate, f"n{whom}", (), flag)
            elif kind == "remove":
                on.remove(people[who], people[whom].id, None if flag else ())
            else:
                on.announce(people[who], [f"192.0.2.{whom + 1}:{1 + flag}"])
        except ConfigError:
            continue
    return on


def merged(first: Roster, *others: Roster) -> Roster:
    result = first.copy()
    for other in others:
        result.merge(other.records())
    return result


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(parts=st.tuples(ACTIONS, ACTIONS, ACTIONS), shared=ACTIONS, seed=st.randoms(use_true_random=False))
def test_merging_is_commutative_associative_and_idempotent(
    people: list[Identity], parts: tuple[list[Action], ...], shared: list[Action], seed: object
) -> None:
    """Three replicas with a common past act apart; whatever the order of merging, all agree."""
    common = act(Roster.found(people[0], SWARM, "root"), people, shared)
    a, b, c = (act(common.copy(), people, part) for part in parts)
    whole = merged(a, b, c)
    for other in (merged(c, b, a), merged(b, merged(c, a)), merged(merged(a, b), c), merged(whole, whole, a)):
        assert other.digest() == whole.digest()
        assert other.members() == whole.members()
    shuffled = whole.records()
    seed.shuffle(shuffled)  # type: ignore[attr-defined]
    at_once, one_by_one = Roster(SWARM, people[0].id), Roster(SWARM, people[0].id)
    assert at_once.merge(shuffled) == []
    assert [one_by_one.merge([record]) for record in whole.records()] == [[]] * len(shuffled)
    assert at_once.digest() == one_by_one.digest() == whole.digest()
    assert not set(whole.members()) & {record.id for record in whole.records() if isinstance(record, Removal)}


KEYS = st.sampled_from(["kind", "id", "name", "kept", "by", "signature", "serial", "addresses"])
SCALARS = st.none() | st.booleans() | st.integers() | st.sampled_from(["introduction", "contact", "removal", "a" * 52])


@settings(max_examples=40, deadline=None)
@given(st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(KEYS, inner), max_leaves=8))
def test_whatever_is_received_is_refused_or_a_record(values: object) -> None:
    empty = Roster(SWARM, "a" * 52)
    assert empty.merge([json.dumps(values).encode()]) == [roster.RosterReason.MALFORMED]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(0, 4)), max_size=12))
def test_members_that_grow_are_those_derived_anew(people: list[Identity], acts: list[tuple[int, int, int]]) -> None:
    made = Roster.found(people[0], SWARM, "kitchen")
    told = made.copy()
    for by, whom, act in acts:
        before = made.serial
        try:
            if act == 0:
                made.remove(people[by], people[whom].id)
            elif act == 1:
                made.announce(people[whom], [f"192.0.2.{by}:{7000 + len(acts)}"], now=made.serial)
            else:
                name = "pi" if act == 2 else f"d{whom}"
                made.introduce(people[by], people[whom].certificate, name, may_introduce=act == 3)
        except ConfigError:
            continue
        assert made._membership.members == membership.find_members(made.root, made._held.values()).members
        assert list(made.members()) == sorted(made.members())
        assert made._by_number == {member.number: member for member in made.members().values()}
        assert made.introduced() == frozenset(map(peer_number, made._keys))
        assert told.merge(made.since(before)) == []
        assert told.digest() == made.digest() == made.copy().digest()
        assert told.members() == made.members()
