"""`dfca keys`: a fleet by files, from the authority's key to devices that know each other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from filelock import FileLock
from typer.testing import CliRunner

from dfca.base.errors import ConfigError, DataError
from dfca.cli import app
from dfca.node.trust import authority
from dfca.node.trust.authority import make_bundle, read_bundle, read_request, sign_request
from dfca.node.trust.identity import Identity, fingerprint
from dfca.node.trust.roster import Roster

FACTS = {"founder": "a" * 52, "name": "fleet", "seed": 1}


def keys(*arguments: object, answer: str | None = None, status: int = 0) -> str:
    result = CliRunner().invoke(app, ["keys", *map(str, arguments)], input=answer)
    assert result.exit_code == status, result.output
    assert "Traceback" not in result.output
    return result.output


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a device that has data, and so facts."""
    monkeypatch.chdir(tmp_path)
    Identity.create(tmp_path / "kitchen")
    (tmp_path / "kitchen" / "facts.json").write_text(json.dumps(FACTS))
    return tmp_path


def test_a_fleet_from_the_first_key_to_the_last_removal(folder: Path) -> None:
    shown = keys("init", "home")
    assert fingerprint(Identity.load(folder / "home").id) in shown
    on_device = keys("request", "kitchen", "--name", "kitchen", "--address", "192.0.2.1:7447")
    at_home = keys("sign", "home", "kitchen.request.json", answer="y\n")
    mark = fingerprint(Identity.load(folder / "kitchen").id)
    assert mark in on_device
    assert mark in at_home
    assert shown.split("fingerprint")[1].strip() in keys("accept", "kitchen", "kitchen.bundle.json", "--yes")
    keys("request", "garage", "--out", "g.json")  # a new device: it gets a key
    assert "has no name yet" in keys("sign", "home", "g.json", "--yes", status=2)
    keys("sign", "home", "g.json", "--name", "garage", "--may-introduce", "--yes", "--out", "g.bundle")
    keys("accept", "garage", "g.bundle", "--yes")
    assert "garage" in keys("accept", "kitchen", "g.bundle", "--yes")

    facts = json.loads((folder / "garage" / "facts.json").read_bytes())
    assert facts == FACTS | {"founder": Identity.load(folder / "home").id}
    kitchen, garage = Roster.load(folder / "kitchen" / "roster.json"), Roster.load(folder / "garage" / "roster.json")
    assert kitchen.digest() == garage.digest()
    assert {member.name: member.may_introduce for member in garage.members().values()} == {
        "kitchen": False,
        "garage": True,
    }
    assert garage.member(garage.root) is None  # the authority takes no part

    keys("remove", "home", "garage", "--yes", "--out", "removed.json")
    assert "belongs to the fleet: kitchen\n" in keys("accept", "kitchen", "removed.json", "--yes")
    assert "does not have the device in garage" in keys("accept", "garage", "removed.json", "--yes", status=2)
    assert "was removed from this swarm, which is final" in keys(
        "sign", "home", "g.json", "--name", "garage", "--yes", status=2
    )
    listed = keys("show", "home")
    assert "kitchen" in listed
    assert "garage" not in listed


def test_private_keys_never_leave_the_device(folder: Path) -> None:
    keys("init", "home")
    keys("request", "kitchen", "--name", "kitchen")
    keys("sign", "home", "kitchen.request.json", "--yes")
    secret = Identity.load(folder / "kitchen").key.splitlines()[1]
    for path in (*folder.glob("*.json"), *(folder / "home").iterdir()):
        assert secret not in path.read_bytes()


def test_nothing_happens_without_an_answer(folder: Path) -> None:
    keys("init", "home")
    keys("request", "kitchen", "--name", "kitchen")
    for answer in ("n\n", None):
        assert "nothing was changed" in keys("sign", "home", "kitchen.request.json", answer=answer, status=1)
    assert not (folder / "home" / "roster.json").exists()


def test_mistakes_are_explained(folder: Path) -> None:
    keys("init", "home")
    assert "has a key already" in keys("init", "home", status=2)
    keys("request", "attic", "--name", "attic")
    assert "no fleet yet" in keys("sign", "home", "attic.request.json", "--yes", status=2)
    keys("request", "kitchen", "--name", "kitchen")
    keys("sign", "home", "kitchen.request.json", "--yes")
    assert "cannot read nowhere" in keys("sign", "home", "nowhere", "--yes", status=1)
    assert "is not a request" in keys("sign", "home", "kitchen.bundle.json", "--yes", status=1)
    assert "is not a bundle" in keys("accept", "kitchen", "kitchen.request.json", "--yes", status=1)
    assert "does not exist" in keys("sign", "nowhere", "kitchen.request.json", "--yes", status=2)
    assert "does not have the device" in keys("accept", "attic", "kitchen.bundle.json", "--yes", status=2)
    assert "'cellar' is not a member of this fleet; members: kitchen" in keys(
        "remove", "home", "cellar", "--yes", status=2
    )
    assert "HOST:PORT" in keys("request", "kitchen", "--address", "here", status=2)
    with FileLock(folder / "kitchen" / "lock"):
        assert "is running; stop it" in keys("accept", "kitchen", "kitchen.bundle.json", "--yes", status=1)


def test_a_device_of_another_swarm_stays_there(folder: Path) -> None:
    keys("init", "home")
    keys("request", "kitchen", "--name", "kitchen")
    keys("sign", "home", "kitchen.request.json", "--yes")
    own = Identity.load(folder / "kitchen")
    alone = Roster.found(own, "s" * 52, "kitchen")
    alone.save(folder / "kitchen" / "roster.json")
    keys("accept", "kitchen", "kitchen.bundle.json", "--yes")  # a swarm of its own gives way
    alone.introduce(own, Identity.create(folder / "friend").certificate, "friend")
    alone.save(folder / "kitchen" / "roster.json")
    assert "belongs to another swarm" in keys("accept", "kitchen", "kitchen.bundle.json", "--yes", status=2)


def test_forged_files_are_refused(folder: Path) -> None:
    Identity.create(folder / "home")
    other = Identity.create(folder / "other")
    data = authority.make_request(folder / "kitchen", "kitchen")
    values = json.loads(data)
    for change in (
        {"certificate": other.certificate.decode()},  # a request for the key of another
        {"request": json.loads(authority.make_request(folder / "other"))["request"]},
        {"request": "garbage"},
        {"name": "../../etc"},
        {"addresses": None},
    ):
        with pytest.raises(DataError, match="this request cannot be used"):
            read_request(json.dumps(values | change).encode())
    for garbage in (b"", b"[]", b"[" * 100_000, b"\xff", json.dumps({"version": "dfca request 2"}).encode()):
        with pytest.raises(DataError, match="is not a request"):
            read_request(garbage)

    _, bundle = sign_request(folder / "home", read_request(data))
    assert make_bundle(read_bundle(bundle)) == bundle
    content = json.loads(bundle)
    for change in (
        {"facts": content["facts"] | {"seed": 2}},  # another swarm: no signature fits
        {"facts": content["facts"] | {"founder": other.id}},
        {"facts": []},
        {"facts": None},
        {"records": content["records"][1:]},
        {"records": None},
        {"records": [*content["records"], 1]},
    ):
        with pytest.raises(DataError, match=r"do not hold|no founder|no records"):
            read_bundle(json.dumps(content | change).encode())


def test_the_libraries_of_nodes_may_be_missing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    for name in [name for name in sys.modules if name.startswith("dfca.node.trust")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    assert "dfca keys needs more libraries: pip install 'dfca[node]'" in keys("init", "home", status=2)


def test_a_request_needs_a_fleet_and_a_name(folder: Path) -> None:
    Identity.create(folder / "home")
    with pytest.raises(ConfigError, match="has no name yet"):
        sign_request(folder / "home", read_request(authority.make_request(folder / "kitchen")))
