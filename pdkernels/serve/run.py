"""The server's process."""

from __future__ import annotations

import asyncio
import errno
import gc
import json
import socket
import sys
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

from pdkernels._validation import sentence
from pdkernels.serve.app import Limits
from pdkernels.serve.errors import error_body

_READ = 10  # seconds in which clients may read the rest of answers that have ended
_WRITE = 10  # seconds in which an engine may write what it keeps
_PIECE = 1 << 11  # bytes that are parsed at once
MAX_HEAD = 1 << 16  # bytes; proxies pass large cookies and keys on
_MAX_BEHIND = 1 << 20  # bytes that may come behind a request that is being answered
_BACKLOG = 128
"""Connections that asyncio accepts at once, and of which each, when no more files can be opened, costs lines of the log."""
_SPARE = 64 + 3 * _BACKLOG
"""Files that are left to all else; two turns of the loop pass between a connection and the close of another."""
_MOST_FILES = 1 << 14
"""That a server asks the system for: its usual 1,024, or 256, are fewer connections than requests that may wait."""
_USER_TIMEOUT = getattr(socket, "TCP_USER_TIMEOUT", None)  # of Linux
_LONGEST_WAIT = 2**31 - 1  # milliseconds that it takes
_NO_HTTP = "what was sent is no request of HTTP/1.1, or its head is too long"
_NO_HTTP_HEAD = (
    b"HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
)


def listeners(host: str, port: int) -> list[socket.socket]:
    """Sockets that listen on a port, at all addresses of a host.

    Raises:
        OSError: the port is taken or not permitted; the host is not of this machine.
    """
    with ExitStack() as opened:
        found, failed = [], None
        try:
            asked = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        except OSError as error:
            raise OSError(sentence("serve", f"{host!r} is no address: {error.strerror}")) from None
        for family, *_, address in dict.fromkeys(asked):
            try:
                found.append(opened.enter_context(socket.create_server(address[:2], family=family, backlog=_BACKLOG)))
            except OSError as error:
                failed = error
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):  # one of two families may be missing
                    found = []
                    break
        if not found:
            assert failed is not None
            taken = failed.errno == errno.EADDRINUSE
            reason = "it is taken" if taken else str(failed.strerror or failed).split(" (while", 1)[0].lower()
            remedy = "Choose another with --port." if taken else ""
            raise OSError(sentence("serve", f"cannot listen on port {port} of {host}: {reason}", remedy))
        opened.pop_all()
    return found


def most_connections(limit: int = _MOST_FILES) -> int:
    """Lets this process open up to `limit` files, if the system does; as many connections as leave enough of them."""
    try:
        import resource
    except ModuleNotFoundError:  # another system
        return sys.maxsize
    files, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted_files = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    if files != resource.RLIM_INFINITY and files < wanted_files:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted_files, hard))
            files = wanted_files
    return sys.maxsize if files == resource.RLIM_INFINITY else max(files // 4, files - _SPARE)


def fair(protocol: Any, seconds: float, unread: float = 60.0, most: int = sys.maxsize) -> Any:
    """uvicorn's protocol of a connection, in which no client makes others wait.

    What has come is parsed in pieces, between which others have their turn: a body in chunks of a byte takes long. No
    more is read while any of it waits to be parsed. What comes behind a request waits for its answer; more than a
    megabyte of it closes the connection. So does the head of a request that does not arrive within `seconds`, and a
    client that takes nothing of an answer for `unread` seconds; uvicorn itself waits for ever. Of more than `most` connections the one
    that has been without a request for longest is closed; the new one if all others have requests.
    """
    connections, idle = set[Any](), dict[Any, None]()

    class Fair(protocol):  # type: ignore[misc]
        _late: asyncio.TimerHandle | None = None
        _scheduled = False

        def connection_made(self, transport: Any) -> None:
            self._data = bytearray()
            super().connection_made(transport)
            self._wait()
            connections.add(self)
            idle[self] = None
            if len(connections) > most:
                longest = next(iter(idle))
                del idle[longest]
                longest.transport.close()
            connection = transport.get_extra_info("socket")
            if connection is not None and _USER_TIMEOUT is not None:
                # The kernel alone knows what a client has taken: megabytes of an answer are in its buffers.
                milliseconds = int(min(max(1, 1000 * unread), _LONGEST_WAIT))
                with suppress(OSError):  # a socket that is not of TCP
                    connection.setsockopt(socket.IPPROTO_TCP, _USER_TIMEOUT, milliseconds)

        def data_received(self, data: bytes) -> None:
            self._data += data
            if self._answering and len(self._data) > _MAX_BEHIND:
                self.transport.close()
            elif not self._scheduled:
                self._parse()

        def connection_lost(self, error: Exception | None) -> None:
            self._data.clear()
            self._stop()
            connections.discard(self)
            idle.pop(self, None)
            super().connection_lost(error)

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self in connections:
                idle[self] = None
            self._schedule()

        def send_400_response(self, msg: str) -> None:
            """What is no HTTP gets an error in the form of all others, unless an answer has begun."""
            from h11 import IDLE, SEND_RESPONSE

            if self.conn.our_state in (IDLE, SEND_RESPONSE):
                content = json.dumps(error_body(_NO_HTTP, 400)).encode()
                self.transport.write(_NO_HTTP_HEAD % len(content) + content)
            self.transport.close()

        @property
        def _answering(self) -> bool:
            """Whether a request has come whole, and not all of its answer has gone."""
            return self.cycle is not None and not (self.cycle.response_complete or self.cycle.more_body)

        @property
        def _between(self) -> bool:
            """Whether nothing of the next request has been parsed."""
            from h11 import IDLE

            return self.conn.their_state is IDLE and not self.conn.trailing_data[0]

        def _schedule(self) -> None:
            if self._data and not (self._answering or self._scheduled):
                self._scheduled = True
                self.loop.call_soon(self._parse)

        def _parse(self) -> None:
            self._scheduled = False
            if self._data and not self._answering:
                if self._between:  # RFC 9112, 2.2: some clients send an empty line behind a body
                    del self._data[: len(self._data) - len(self._data.lstrip(b"\r\n"))]
                piece = bytes(self._data[:_PIECE])
                del self._data[:_PIECE]
                super().data_received(piece)
                self._wait()
            self._schedule()
            if self._scheduled:
                self.transport.pause_reading()
            elif not self.flow.read_paused:
                self.transport.resume_reading()

        def _wait(self) -> None:
            if self.cycle is not None and not self.cycle.response_complete:
                idle.pop(self, None)
                self._stop()
            elif self._late is None:
                self._late = self.loop.call_later(seconds, self.transport.close)

        def _stop(self) -> None:
            if self._late is not None:
                self._late.cancel()
            self._late = None

    return Fair


def run(app: Any, *, host: str = "127.0.0.1", port: int = 8000) -> None:
    """Serves an application of `create_app`, within its limits, until SIGTERM or SIGINT.

    Then running requests may finish within `Limits.shutdown` seconds; those that have not end with what they have.

    Raises:
        ImportError: without uvicorn.
        OSError: it cannot listen there.
    """
    try:
        import uvicorn
        from uvicorn.protocols.http.h11_impl import H11Protocol
    except ModuleNotFoundError as missing:
        remedy = "Install it with `pip install uvicorn`."
        raise ImportError(sentence("serve", "a server needs uvicorn", remedy)) from missing
    bounds: Limits = app.state.limits
    seconds = bounds.shutdown
    protocol = fair(H11Protocol, bounds.body_seconds, bounds.unread_seconds, most_connections())

    class Server(uvicorn.Server):
        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            app.state.grammars.close()
            end = partial(app.state.engine.close, finish=False, timeout=0)
            late = asyncio.get_running_loop().call_later(seconds, end)
            try:
                await super().shutdown(sockets)
                # What earlier texts are to be kept on disk is there before uvicorn raises the signal again.
                await asyncio.to_thread(app.state.engine.close, finish=False, timeout=_WRITE)
            finally:
                late.cancel()

    last = int(seconds) + _READ
    times: dict[str, Any] = {"timeout_graceful_shutdown": last, "timeout_keep_alive": 30}
    bounded: dict[str, Any] = {"h11_max_incomplete_event_size": MAX_HEAD, "backlog": _BACKLOG}
    config = uvicorn.Config(app, http=protocol, ws="none", log_level="info", **bounded, **times)
    sockets = listeners(host, port)
    gc.collect()
    gc.freeze()  # a collection that looks at all that is loaded takes a tenth of a second, in which every stream waits
    try:
        with suppress(KeyboardInterrupt):
            Server(config).run(sockets=sockets)
    finally:
        gc.unfreeze()
        for one in sockets:
            one.close()
