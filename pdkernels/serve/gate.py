"""What stands before the application: who may send requests, of what kind, and what becomes of one that fails.

It reads a body whole; a middleware of Starlette's own would hide from the application that a client has gone.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
import re
import socket
import traceback
from collections.abc import Awaitable, Callable, Sequence
from typing import Any
from urllib.parse import unquote, urlsplit

from starlette.responses import JSONResponse

from pdkernels.serve.errors import FAILED, Refused, clipped, error_body, of_failure, shown
from pdkernels.serve.json_text import written_json

LOG = logging.getLogger("pdkernels.serve")
_OPEN = ("/", "/health")  # pages that need no key
_DRAINED = 8
"""A body that is too large is read up to this many times the limit, so that its client hears why it is refused."""
_PORTS = {"http": 80, "https": 443}
_AUTHORITY = re.compile(r"(\[[0-9a-f:.%]+\]|[^\s:@/\[\]]+)(?::([0-9]{1,5}))?", re.IGNORECASE)
_URL = re.compile(rb"https?://([^/]*)(/.*)?", re.IGNORECASE)


class Escaped(JSONResponse):
    """JSON in ASCII, as streams are: what a client sent with half of a character in it goes back as it came."""

    def render(self, content: Any) -> bytes:
        """Its bytes."""
        return written_json(content).encode()


class _Broken(Refused):
    """A request whose body is not read to its end, so that its connection cannot go on."""

    @classmethod
    def of(cls, error: Refused) -> _Broken:
        """The same refusal."""
        return cls(str(error), error.status, error.parameter, error.code)


class Gate:
    """Lets requests through that a page of another site cannot have sent, with the key, and with a JSON body of bounded
    size and time.

    Args:
        app: the application.
        body: bytes that a body may have, whatever its headers say.
        seconds: in which it must arrive.
        api_key: that clients must send; None: none.
        origins: of pages of other sites that may send requests; "*": all.
        hosts: names of this server in requests, as "name" or "name:port"; "*": all. A connection to a loopback address
            needs one of them, of loopback's or the machine's: a page of another site can have its own name lead there.
            Without `hosts`, others need none.
    """

    def __init__(
        self,
        app: Any,
        *,
        body: int,
        seconds: float,
        api_key: str | None = None,
        origins: Sequence[str] = (),
        hosts: Sequence[str] = (),
    ) -> None:
        self._app, self._max_body, self._seconds, self._key = app, body, seconds, api_key
        self._origins, self._hosts = set(origins), {host.lower() for host in hosts}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False

        async def sending(message: Any) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._admit(_in_origin_form(scope), receive, sending)
        except Refused as error:
            headers = {"WWW-Authenticate": "Bearer"} if error.status == 401 else {}
            if isinstance(error, _Broken):
                headers["Connection"] = "close"
            content = error_body(str(error), error.status, error.parameter, error.code)
            await Escaped(content, error.status, headers)(scope, receive, send)
        except (KeyboardInterrupt, SystemExit, asyncio.CancelledError):
            raise
        except BaseException as error:  # a panic of a library in Rust is no Exception
            log_failure(scope["method"], scope["path"], error)
            if not started:
                await Escaped(error_body(FAILED, 500), 500)(scope, receive, send)

    async def _admit(self, scope: Any, receive: Any, send: Any) -> None:
        headers: dict[bytes, list[str]] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name, []).append(value.decode("latin-1").strip())
        if b"transfer-encoding" in headers and (b"content-length" in headers or scope.get("http_version") != "1.1"):
            fault = "a body with a Transfer-Encoding has no Content-Length, and is of HTTP/1.1"
            raise _Broken(f"{fault}: its end is not certain", 400)
        refused: Refused | None = None
        try:
            self._check_head(scope, headers)
        except Refused as error:
            if b"expect" in headers:
                raise _Broken.of(error) from None  # its client has sent nothing yet
            refused = error
        try:
            body = await self._read(headers, receive, kept=refused is None)
        except _Broken:
            if refused is None:
                raise
            raise _Broken.of(refused) from None
        if body is None:
            return
        if refused is not None:
            raise refused
        kind = headers.get(b"content-type", [""])[-1].partition(";")[0].strip().lower()
        is_json = kind == "application/json" or re.fullmatch(r"application/\S+\+json", kind)
        if scope["method"] == "POST" and (body or kind) and not is_json:
            raise Refused("the body must be a JSON object, sent with Content-Type: application/json", 400)
        await self._app(scope, _replayed(body, receive), send)

    def _check_head(self, scope: Any, headers: dict[bytes, list[str]]) -> None:
        self._check_host(scope, headers.get(b"host", []))
        if scope["method"] not in ("GET", "HEAD", "OPTIONS"):
            self._check_origin(headers.get(b"origin", []), headers.get(b"host", []))
        if self._key is not None and scope["path"] not in _OPEN:
            scheme, _, key = " ".join(headers.get(b"authorization", [])).partition(" ")
            if not key and b"x-api-key" in headers:  # Anthropic's clients
                scheme, key = "bearer", headers[b"x-api-key"][-1]
            same = hmac.compare_digest(key.strip().encode("latin-1"), self._key.encode())
            if not (same and scheme.lower() == "bearer"):
                fault = "the API key is wrong" if key else "there is no API key: send Authorization: Bearer KEY"
                raise Refused(fault, 401)
        coding = ", ".join(headers.get(b"content-encoding", ["identity"]))
        if coding.lower() != "identity":
            raise Refused(f"a body with Content-Encoding {shown(coding)} is not supported here", 415)

    async def _read(self, headers: dict[bytes, list[str]], receive: Any, *, kept: bool) -> bytes | None:
        """The body to its end, so that the next request of a connection begins behind it; nothing of it is `kept` if the
        request is refused anyway. None if the client has gone."""
        announced = max(map(int, headers.get(b"content-length", ["0"])))
        drained = 1 if b"expect" in headers else _DRAINED  # who expects an answer has sent nothing yet
        try:
            return await asyncio.wait_for(self._body(receive, announced, drained, kept), self._seconds)
        except (TimeoutError, asyncio.TimeoutError):
            raise _Broken(f"the body must arrive within {self._seconds:g} seconds", 408) from None

    async def _body(self, receive: Any, announced: int, drained: int, kept: bool) -> bytes | None:
        body, size, more = bytearray(), 0, True
        while more and announced <= drained * self._max_body and size <= _DRAINED * self._max_body:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            piece = message.get("body", b"")
            size += len(piece)
            if kept and size <= self._max_body:
                body.extend(piece)
            more = message.get("more_body", False)
        if max(announced, size) > self._max_body:
            raise _Broken(f"the body must have at most {self._max_body} bytes", 413)
        return bytes(body)

    def _check_host(self, scope: Any, hosts: list[str]) -> None:
        local = is_loopback((scope.get("server") or ("",))[0])
        if "*" in self._hosts or not (local or self._hosts):
            return
        for host in hosts:
            found = _AUTHORITY.fullmatch(host)
            name = found[1].lower().rstrip(".") if found else ""
            here = local and (is_loopback(name) or name == socket.gethostname().lower())
            if not (here or name in self._hosts or host.lower() in self._hosts):
                raise Refused(f"the host {shown(host)} is not served here", 403)

    def _check_origin(self, origins: list[str], hosts: list[str]) -> None:
        for origin in origins:
            if not (self._origins & {"*", origin} or (hosts and _same_site(origin, hosts[-1]))):
                raise Refused(f"pages of {shown(origin)} may not send requests here", 403)


def log_failure(method: str, path: str, error: BaseException) -> None:
    """One line of what an answer failed of, and where."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    reason = clipped(" ".join(str(error).split()), 400)
    LOG.error("%s %s failed: %s: %s%s", method, clipped(path, 100), type(error).__name__, reason, place)


def told(error: BaseException) -> tuple[str, int]:
    """What a stream says of its failure, and the status that would be; one of the server is in its log."""
    text, status = of_failure(error)
    if status == 500:
        log_failure("POST", "a stream", error)
    return text, status


def is_loopback(host: str) -> bool:
    """Whether a name or an address is of this machine alone.

    >>> [is_loopback(host) for host in ("localhost", "127.0.0.1", "[::1]", "example.org", "192.168.0.1")]
    [True, True, True, False, False]
    """
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def _same_site(origin: str, host: str) -> bool:
    """Whether a page's origin is this server, whose own page is at `/`. A proxy may speak TLS with the page."""
    try:
        page, here = urlsplit(origin), urlsplit(f"//{host}")
        port = _PORTS.get(page.scheme)
        return port is not None and (page.hostname, page.port or port) == (here.hostname, here.port or port)
    except ValueError:
        return False


def _in_origin_form(scope: Any) -> Any:
    """A request whose target is a whole URL, as one for its path at its host: RFC 9112, 3.2.2."""
    url = _URL.fullmatch(scope.get("raw_path") or b"")
    if url is None:
        return scope
    path = url[2] or b"/"
    headers = [(b"host", url[1]), *(field for field in scope["headers"] if field[0] != b"host")]
    return {**scope, "headers": headers, "raw_path": path, "path": unquote(path.decode("ascii"))}


def _replayed(body: bytes, receive: Any) -> Callable[[], Awaitable[Any]]:
    sent = False

    async def replayed() -> Any:
        nonlocal sent
        if not sent:
            sent = True
            return {"type": "http.request", "body": body, "more_body": False}
        return await receive()

    return replayed
