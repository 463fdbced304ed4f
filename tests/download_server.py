"""A local file server with the faults of real ones: cuts, missing ranges, wrong hashes, a hub that moves."""

from __future__ import annotations

import contextlib
import hashlib
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple


class Seen(NamedTuple):
    method: str
    path: str
    range: str


@dataclass
class Item:
    """What the server has under a path.

    cuts: the bodies of the next GETs end after so many bytes although the full length was promised.
    statuses: the next answers (any method) have these statuses instead. meet: GETs wait here for each other.
    block_s: pause after every 16 kB. get_only: HEAD is forbidden, as it is behind signed URLs.
    """

    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    ranges: bool = True
    etag: str | None = None
    cuts: list[int] = field(default_factory=list)
    statuses: list[tuple[int, dict[str, str]]] = field(default_factory=list)
    redirect: str | None = None
    meet: threading.Barrier | None = None
    block_s: float = 0.0
    get_only: bool = False


class FileServer:
    def __init__(self) -> None:
        self.items: dict[str, Item] = {}
        self.seen: list[Seen] = []
        self.pause = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                outer._answer(self)

            do_HEAD = do_GET

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    def close(self) -> None:
        self.pause.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=10)

    def put(self, path: str, body: bytes, **more: Any) -> Item:
        self.items[path] = Item(body, **more)
        return self.items[path]

    def gets(self, path: str) -> list[str]:
        """The Range headers ("" for none) of the GETs of a path, in order."""
        return [s.range for s in self.seen if s.method == "GET" and s.path == path]

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        item = self.items.get(request.path)
        wanted = request.headers.get("Range", "")
        self.seen.append(Seen(request.command, request.path, wanted))
        if item is None:
            self._send(request, 404, {"X-Error-Code": "EntryNotFound"}, b"")
        elif item.statuses:
            status, headers = item.statuses.pop(0)
            self._send(request, status, headers, b"")
        elif request.command == "HEAD" and item.get_only:
            self._send(request, 403, {}, b"")
        elif item.redirect is not None:
            self._send(request, 302, {**item.headers, "Location": item.redirect}, b"")
        else:
            self._serve(request, item, wanted)

    def _serve(self, request: BaseHTTPRequestHandler, item: Item, wanted: str) -> None:
        etag = item.etag if item.etag is not None else f'"{hashlib.md5(item.body).hexdigest()}"'
        headers = {**item.headers, **({"ETag": etag} if etag else {})}
        match = re.fullmatch(r"bytes=(\d+)-", wanted)
        start = int(match.group(1)) if match and item.ranges else 0
        if start > 0 and start >= len(item.body):
            self._send(request, 416, {**headers, "Content-Range": f"bytes */{len(item.body)}"}, b"")
            return
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(item.body) - 1}/{len(item.body)}"
        body = item.body[start:]
        if request.command == "GET" and item.meet is not None:
            with contextlib.suppress(threading.BrokenBarrierError):
                item.meet.wait(timeout=5)
        cut = item.cuts.pop(0) if request.command == "GET" and item.cuts else None
        self._send(request, 206 if start else 200, headers, body, cut, item.block_s)

    def _send(
        self,
        request: BaseHTTPRequestHandler,
        status: int,
        headers: dict[str, str],
        body: bytes,
        cut: int | None = None,
        block_s: float = 0.0,
    ) -> None:
        request.send_response(status)
        for name, value in headers.items():
            request.send_header(name, value)
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        if request.command == "HEAD":
            return
        with contextlib.suppress(OSError):
            sent = body[:cut]
            for i in range(0, len(sent), 16384):
                request.wfile.write(sent[i : i + 16384])
                if block_s:
                    self.pause.wait(block_s)
        if cut is not None:
            request.close_connection = True


@contextlib.contextmanager
def file_server() -> Iterator[FileServer]:
    server = FileServer()
    try:
        yield server
    finally:
        server.close()
