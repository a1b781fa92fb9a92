"""Serve the page on 127.0.0.1: its files, the changes as server-sent events, and two questions about one trial.

    /TOKEN/                      page/index.html; page/*.css, *.js beside it
    /TOKEN/events                everything once, then what changes, as JSON
    /TOKEN/frames?trial=&after=  the clusters of a trial's clients over time
    /TOKEN/graph?trial=          where its clients are drawn

Nothing can be changed over it: there is only GET. Who may look: the user's own browser. Other machines cannot reach the
address, pages of other sites fail at the Host header (DNS rebinding) and at the token, other users at the token.
"""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qs, urlsplit

from dfca import __version__
from dfca.base.errors import ConfigError
from dfca.report.drawing import palette
from dfca.watch.graph import colours_of, drawn, load_registry
from dfca.watch.hub import Hub

HOSTS = ("127.0.0.1", "localhost")
MOST_WATCHERS = 12
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
PAGE = ("index.html", "style.css", "main.js", "charts.js", "graph.js", "format.js")
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}


class PageServer(ThreadingHTTPServer):
    """The server of one hub's page."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, hub: Hub, port: int = 0) -> None:
        self.hub, self.token = hub, secrets.token_urlsafe(12)
        self.watchers = threading.BoundedSemaphore(MOST_WATCHERS)
        self.ended = threading.Event()
        try:
            super().__init__(("127.0.0.1", port), _Handler)
        except OSError as error:
            raise ConfigError(
                f"port {port} of 127.0.0.1 cannot be used ({error.strerror}); take another --port, or leave it out"
            ) from error

        threading.Thread(target=self._load, daemon=True).start()

    def _load(self) -> None:
        """Load what is slow to load while the browser starts."""
        load_registry()
        self.hub.publish({"repaint": True})

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/{self.token}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a browser that has gone."""

    def server_close(self) -> None:
        """Stop listening, and end the streams."""
        self.ended.set()
        self.hub.publish({})  # wakes them
        super().server_close()


class _Handler(BaseHTTPRequestHandler):
    """Answers one request."""

    server: PageServer
    server_version, sys_version = "dfca", ""
    protocol_version = "HTTP/1.1"
    timeout = 30

    def do_GET(self) -> None:
        if (self.headers.get("Host") or "").rpartition(":")[0] not in HOSTS:
            self._send(421, b"this page is served as http://127.0.0.1 only\n", "text/plain")
            return
        url = urlsplit(self.path)
        first, _, name = url.path.removeprefix("/").partition("/")
        if not secrets.compare_digest(first.encode(), self.server.token.encode()):
            self._send(404, b"use the address that `dfca watch` has printed\n", "text/plain")
            return
        asked = {key: values[0] for key, values in parse_qs(url.query, max_num_fields=4).items()}
        questions: dict[str, Callable[[], None]] = {
            "events": self._stream,
            "frames": lambda: self._answer(self.server.hub.frames(asked.get("trial", ""), _number(asked.get("after")))),
            "graph": lambda: self._graph(asked.get("trial", "")),
        }
        if name in questions:
            questions[name]()
        elif (name or "index.html") in PAGE:
            name = name or "index.html"
            body = files("dfca.watch").joinpath("page", name).read_bytes()
            head = palette.css_variables().encode() if name == "style.css" else b""
            self._send(200, head + body, TYPES[name[name.rindex(".") :]])
        else:
            self._send(404, b"there is no such page\n", "text/plain")

    def _graph(self, trial: str) -> None:
        graph = self.server.hub.graph(trial)
        self._answer(None if graph is None else drawn(graph))

    def _answer(self, value: dict[str, Any] | None) -> None:
        if value is None:
            self._send(404, b"{}", "application/json")
        else:
            self._send(200, _json(value), "application/json")

    def _stream(self) -> None:
        """Send everything, then every change."""
        if not self.server.watchers.acquire(blocking=False):
            self._send(503, b"too many pages are open\n", "text/plain")
            return
        try:
            self.close_connection = True
            self._head(200, "text/event-stream", None)
            self.wfile.write(b"retry: 1000\n\n")
            algorithms: list[str] = []
            for change in self.server.hub.follow():
                if self.server.ended.is_set():
                    return
                algorithms = (change or {}).get("algorithms", algorithms)
                if change and ("algorithms" in change or "repaint" in change):
                    change = change | {"colours": colours_of(algorithms), "version": __version__}
                self.wfile.write(b"data: %b\n\n" % _json(change) if change else b": still here\n\n")
                self.wfile.flush()
        finally:
            self.server.watchers.release()

    def _send(self, status: int, body: bytes, kind: str) -> None:
        self._head(status, kind, len(body))
        self.wfile.write(body)

    def _head(self, status: int, kind: str, length: int | None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind + ("" if kind == "application/json" else "; charset=utf-8"))
        if length is None:
            self.send_header("Connection", "close")
        else:
            self.send_header("Content-Length", str(length))
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Write no log: the terminal is the user's."""


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def _number(given: str | None) -> int:
    try:
        return int((given or "-1")[:18])
    except ValueError:
        return -1
