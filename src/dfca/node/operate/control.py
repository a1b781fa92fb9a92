"""Commands to a running node: JSON lines on 127.0.0.1, for users who can read its folder.

    control.json   {"port": 40123, "token": "...", "pid": 4711}, readable by the owner only

A request is one line: {"token": ..., "command": "status", ...}. The answer is one line: {"ok": true, ...}, or {"ok":
false, "error": a sentence, "status": an exit status}.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import secrets
import socket
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from dfca.base.errors import DfcaError, RunError, unknown
from dfca.base.files import read_small, replacing
from dfca.node.disk.save_file import STATE, last_save

FILE = "control.json"
MOST_REQUEST_BYTES = 1 << 18
MOST_ANSWER_BYTES = 1 << 26
MOST_CONNECTIONS = 32  # one more ends the oldest that has sent no command yet
PATIENCE_S = 10.0
STOP_S = 15.0  # how long a node may take to end; it promises ten seconds
LOCK = "lock"  # the file in the folder of a node that its process holds for as long as it runs
Handler = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]


class NotRunning(RunError):
    """No node runs in this folder."""


class ControlServer:
    """Serves commands. handlers: by command; they return the answer or raise DfcaError."""

    def __init__(self, folder: Path, handlers: Mapping[str, Handler]) -> None:
        self._path, self._handlers = folder / FILE, handlers
        self._token = secrets.token_urlsafe(24)
        self._server: asyncio.Server | None = None
        self._calls: set[asyncio.Task[None]] = set()
        self._silent: dict[asyncio.StreamWriter, None] = {}

    async def open(self) -> None:
        """Start to listen, and write port and token into the folder."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=MOST_REQUEST_BYTES)
        port = self._server.sockets[0].getsockname()[1]
        try:
            with replacing(self._path, mode=0o600) as file:
                file.write(json.dumps({"port": port, "token": self._token, "pid": os.getpid()}).encode())
        except OSError as error:
            self._server.close()
            raise RunError(
                f"cannot write {self._path}: {error.strerror or error}; make the folder writable, and remove what is "
                "in its place"
            ) from error

    async def close(self) -> None:
        """Stop listening; finish the commands that are being answered."""
        with suppress(OSError):
            self._path.unlink()
        if self._server is not None:
            self._server.close()
        if self._calls:
            await asyncio.wait(self._calls, timeout=1.0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._calls.add(task)
        self._silent[writer] = None
        if len(self._silent) > MOST_CONNECTIONS:
            oldest = next(iter(self._silent))
            del self._silent[oldest]
            oldest.transport.abort()
        try:
            line = await asyncio.wait_for(reader.readline(), PATIENCE_S)
            if writer not in self._silent:  # aborted to make room
                return
            del self._silent[writer]
            writer.write(json.dumps(await self._answer(line), allow_nan=True).encode() + b"\n")
            await asyncio.wait_for(writer.drain(), PATIENCE_S)
        except (TimeoutError, OSError, ValueError):
            pass  # the client is gone, or sent no line
        finally:
            self._calls.discard(task)
            self._silent.pop(writer, None)
            writer.close()

    async def _answer(self, line: bytes) -> dict[str, Any]:
        try:
            request = json.loads(line)
            token, command = str(request.pop("token")), str(request.pop("command"))
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
            return {"ok": False, "error": "not a command", "status": 2}
        if not hmac.compare_digest(token.encode(), self._token.encode()):
            return {"ok": False, "error": "the token is not that of this node", "status": 2}
        try:
            if command not in self._handlers:
                raise unknown("command of a node", command, self._handlers)
            return {"ok": True, **await self._handlers[command](request)}
        except DfcaError as error:
            return {"ok": False, "error": str(error), "status": error.status}
        except Exception as error:
            return {"ok": False, "error": f"unexpected {type(error).__name__}: {error}", "status": 1}


class RefusedCommand(DfcaError):
    """The running node refused a command."""

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.status = status


def call(folder: Path, command: str, timeout_s: float = 30.0, **values: Any) -> dict[str, Any]:
    """Send a command to the node that runs in a folder and return its answer.

    Raises NotRunning if no node runs there, and RefusedCommand with its sentence if it refuses.
    """
    try:
        control = json.loads(read_small(folder / FILE, MOST_ANSWER_BYTES))
        port, token = int(control["port"]), str(control["token"])
        with socket.create_connection(("127.0.0.1", port), timeout=2.0) as connection:
            connection.settimeout(timeout_s)
            connection.sendall(json.dumps({"token": token, "command": command, **values}).encode() + b"\n")
            with connection.makefile("rb") as lines:
                answer: dict[str, Any] = json.loads(lines.readline(MOST_ANSWER_BYTES))
    except PermissionError as error:
        raise RunError(
            f"{folder / FILE} belongs to another user; run the command as the user that runs the node"
        ) from error
    except TimeoutError as error:
        raise RunError(
            f"the node in {folder} did not answer within {timeout_s:g} s; is the machine too busy?"
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise NotRunning(f"no node runs in {folder}; start it: dfca node run {folder}") from error
    if not answer.pop("ok", False):
        raise RefusedCommand(str(answer.get("error")), int(answer.get("status", 1)))
    return answer


def stop_node(folder: Path, patience_s: float = STOP_S) -> dict[str, Any]:
    """End the node that runs in a folder and wait until it has unlocked it; returns its name and last saved round.

    Raises NotRunning if no node runs there, and RunError if it does not end in time.
    """
    from filelock import FileLock, Timeout

    try:
        ended = call(folder, "stop")
    except NotRunning as error:
        raise NotRunning(f"no node runs in {folder}; nothing was stopped") from error
    try:
        with FileLock(folder / LOCK, timeout=patience_s):
            return ended | (last_save(folder / STATE) or {})
    except Timeout:
        raise RunError(
            f"the node in {folder} was told to stop and has not ended within {patience_s:g} s; wait, or end its "
            f"process {ended.get('pid', '')} with kill -9, which loses at most the round in progress"
        ) from None
