"""An HTTP server in threads that survives a flood of connections: few at once, each for a short time."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

MOST_CONNECTIONS = 16  # one more ends the oldest: a scrape takes milliseconds, so the oldest is not one
PATIENCE_S = 10.0


def serve(port: int, host: str, app: Any) -> Callable[[], None]:
    """Serve a WSGI application in threads; returns a function that ends it. Raises OSError for an unusable port."""
    server = make_server(host, port, app, _Server, handler_class=_QuietHandler)
    thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()

    def close() -> None:
        server.shutdown()
        server.server_close()
        thread.join(1.0)

    return close


class _QuietHandler(WSGIRequestHandler):
    timeout = PATIENCE_S

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, *args: Any) -> None:
        self._open: dict[Any, None] = {}
        self._lock = threading.Lock()
        super().__init__(*args)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._open[request] = None
            oldest = next(iter(self._open)) if len(self._open) > MOST_CONNECTIONS else None
            if oldest is not None:
                del self._open[oldest]
                with suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread reads the end, and closes it
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log nothing: the client is gone, too slow, or sent no HTTP."""
