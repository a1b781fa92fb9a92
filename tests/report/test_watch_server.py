"""The page of `dfca watch`: who may ask for what, and nodes that are asked."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from watch_folder import Folder, get

from dfca.node.operate.control import ControlServer
from dfca.watch.hub import Hub
from dfca.watch.node_source import NodeSource, NodesPage, ask
from dfca.watch.run_source import RunSource
from dfca.watch.server import PAGE, PageServer


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    made = Folder(tmp_path / "run")
    made.append(5, [0, 0, 1, 1])
    return made


@pytest.fixture
def server(folder: Folder) -> Iterator[PageServer]:
    with PageServer(Hub(RunSource(folder.path))) as made:
        thread = threading.Thread(target=lambda: made.serve_forever(poll_interval=0.02))
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def test_only_this_machine_under_its_own_name_with_the_token(server: PageServer) -> None:
    assert server.server_address[0] == "127.0.0.1"
    port, root = server.server_address[1], f"http://127.0.0.1:{server.server_address[1]}"
    assert get(server.url)[0] == 200
    assert get(server.url, Host=f"localhost:{port}")[0] == 200
    for host in (f"evil.example:{port}", "evil.example", "127.0.0.1.evil.example:80", ""):
        assert get(server.url, Host=host)[0] == 421, host
    for path in ("/", "/events", "/x/", f"/{server.token}x/", f"/{server.token[:-1]}/"):
        assert get(root + path)[0] == 404, path
    for path in ("../server.py", "%2e%2e/server.py", "page/main.js", "x", "frames?trial=nobody", "graph?trial=%00"):
        assert get(server.url + path)[0] == 404, path


def test_nothing_can_be_posted(server: PageServer) -> None:
    request = urllib.request.Request(server.url, data=b"x", method="POST")
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request)
    refused.value.close()
    assert refused.value.code == 501


def test_the_page_is_small_and_names_no_other_place(server: PageServer) -> None:
    total = 0
    for name in PAGE:
        status, body, headers = get(server.url + name)
        total += len(body)
        assert status == 200
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        assert "unsafe" not in headers["Content-Security-Policy"]
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert set(re.findall(rb"https?://[^\"' )]+", body)) <= {b"http://www.w3.org/2000/svg"}
        assert b"innerHTML" not in body
    assert total < 200_000


def test_the_stream_begins_with_everything_and_continues_with_changes(server: PageServer, folder: Folder) -> None:
    with urllib.request.urlopen(server.url + "events") as stream:
        first = following(stream)
        assert first["all"]
        assert first["trials"]["dfca-auto/0/"]["x"] == [5]
        assert first["colours"]["algorithms"]["dfca-auto"]["colour"].startswith("#")
        folder.append(10, [0, 0, 1, 0])
        while "trials" not in (news := following(stream)):
            pass
        assert news["trials"]["dfca-auto/0/"]["x"] == [5, 10]
    answer = json.loads(get(server.url + "frames?trial=dfca-auto/0/&after=0")[1])
    assert [frame[3] for frame in answer["frames"]] == ["0010"]
    graph = json.loads(get(server.url + "graph?trial=dfca-auto/0/")[1])
    assert (graph["nodes"], graph["all_edges"], graph["clusters"]) == (4, 4, [0, 0, 1, 1])


def following(stream: Any) -> dict[str, Any]:
    for line in stream:
        if line.startswith(b"data: "):
            return dict(json.loads(line[6:]))
    raise AssertionError("the stream has ended")


def test_too_many_pages_are_refused(server: PageServer) -> None:
    while server.watchers.acquire(blocking=False):
        pass
    assert get(server.url + "events")[0] == 503


def test_a_browser_that_is_late_gets_everything_again(folder: Folder) -> None:
    hub = Hub(RunSource(folder.path))
    following_ = hub.follow()
    assert (next(following_) or {})["all"]
    for number in range(60):
        hub.publish({"number": number})
    assert (next(following_) or {}).get("all")
    hub.publish({"number": 60})
    assert next(following_) == {"number": 60}
    following_.close()


# --- nodes


STATUS = {
    "name": "kitchen",
    "running": True,
    "state": "training",
    "round": 7,
    "cluster": 1,
    "clusters": 2,
    "accuracy": 0.75,
    "staleness": 0.5,
    "bytes_out": 2000,
    "bytes_in": 10,
    "neighbours": [{"name": "garage", "state": "up"}, {"name": "<b>attic</b>", "state": "down"}],
    "problems": ["no space left on the disk"],
}


def test_a_node_is_asked_and_its_neighbours_are_drawn(tmp_path: Path) -> None:
    node = tmp_path / "kitchen"
    node.mkdir()
    (node / "node.toml").write_text("")

    async def answer(request: dict[str, Any]) -> dict[str, Any]:
        return STATUS

    async def run() -> None:
        server = ControlServer(node, {"status": answer})
        await server.open()
        source = NodeSource(lambda: [node])
        await asyncio.to_thread(source.ask)
        await server.close()
        shown = source.whole()["nodes"][0]
        assert (shown["name"], shown["state"], shown["links"], shown["neighbours"]) == ("kitchen", "training", 1, 2)
        assert shown["problem"] == "no space left on the disk"
        graph = source.graph("")
        assert graph is not None
        assert (graph["names"], graph["edges"]) == (["kitchen", "<b>attic</b>", "garage"], [[0, 1], [0, 2]])

    asyncio.run(run())
    assert ask(node) == {}  # it has ended, and left no status
    (node / "status.json").write_text(json.dumps(STATUS))
    assert ask(node)["running"] is False


@pytest.mark.parametrize("content", ["", "[]", '{"port": 1, "token": "x", "pid": "x"}', '{"pid": 1e999}', "{" * 9999])
def test_damaged_files_of_a_node_give_a_row(tmp_path: Path, content: str) -> None:
    (tmp_path / "node.toml").write_text("")
    (tmp_path / "control.json").write_text(content)
    (tmp_path / "status.json").write_text(content)
    source = NodeSource(lambda: [tmp_path])
    source.ask()
    assert source.whole()["nodes"][0]["running"] is False
    json.dumps(source.whole(), allow_nan=False)


def test_nodes_are_a_page_of_their_own(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "node.toml").write_text("")
        status = STATUS | {"name": name, "cluster": int(name == "b"), "accuracy": 0.5 + 0.25 * (name == "b")}
        (tmp_path / name / "status.json").write_text(json.dumps(status))
    page = NodesPage([tmp_path / "a", tmp_path / "b"])
    page._nodes.ask()
    page.poll()
    shown = page.whole()
    trial = shown["trials"]["nodes/0/"]
    assert shown["run"]["clients"] == 4
    assert (trial["score"], trial["traffic"], trial["away"]) == ([0.625], [2010], [2])
    frames = page.frames("nodes/0/", -1)
    assert frames is not None
    assert frames["frames"][0][3:] == ["01..", [0, 1], [0.5, 0.75]]


@pytest.mark.parametrize("key", ["rmse", "f1"])
def test_nodes_of_other_tasks_show_their_score(key: str, tmp_path: Path) -> None:
    for name, score in (("a", 0.5), ("b", None)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "node.toml").write_text("")
        (tmp_path / name / "status.json").write_text(json.dumps(STATUS | {"name": name, "accuracy": None, key: score}))
    page = NodesPage([tmp_path / "a", tmp_path / "b"])
    page._nodes.ask()
    page.poll()
    shown = page.whole()
    assert (shown["run"]["metric"]["name"], shown["trials"]["nodes/0/"]["score"]) == (key.upper(), [0.5])
    assert [node["score"] for node in shown["nodes"]] == [0.5, None]
