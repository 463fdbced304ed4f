"""One HTTP(S) request: redirects, the hub's headers, refusals in one line, retries with backoff.

Standard library only and Python >= 3.8: this runs before anything is installed.
"""

from __future__ import annotations

import contextlib
import http.client
import random
import re
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from email.message import Message
from pathlib import Path
from typing import Any

HUB_HEADERS = ("X-Repo-Commit", "X-Linked-Size", "X-Linked-ETag", "X-Error-Code")


class UsageError(Exception):
    """The user's side: arguments, manifest, disk. One line; exit code 2."""


class FetchError(Exception):
    """The network's side: no answer, or not the bytes that were promised. One line; exit code 1."""


class MissingFileError(FetchError):
    """The server has no such file (404)."""


class StoppedError(Exception):
    """The run is ending (Ctrl-C); what has arrived is kept."""


class CutError(Exception):
    """The connection failed in a way that another attempt may cure."""

    def __init__(self, reason: str, retry_after_s: float = 0.0) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s


@dataclass(frozen=True)
class RemoteFile:
    """A file to have at `path`. Unknown values are None; `probe` fills in what the server announces.

    sha256, git_sha1: expected digests (git_sha1: id of the git blob, which hubs announce for small files).
    digest_from: where the digest comes from when that is not the manifest: "hub" (its headers), "record".
    commit: the hub commit that every answer has to name.
    """

    label: str
    url: str
    path: Path
    bytes: int | None = None
    sha256: str | None = None
    git_sha1: str | None = None
    digest_from: str = ""
    commit: str | None = None
    optional: bool = False

    @property
    def check(self) -> str:
        """How the file's content is checked, for the user to read."""
        if not (self.sha256 or self.git_sha1):
            return "size only"
        name = "sha256" if self.sha256 else "git sha1"
        return f"{name} ({self.digest_from})" if self.digest_from else name


@dataclass(frozen=True)
class Retry:
    """How patient the transfers of a run are. `stopping` ends all of them soon; they keep what they have."""

    attempts: int = 6
    backoff_s: float = 1.0
    timeout_s: float = 30.0
    stopping: threading.Event = field(default_factory=threading.Event)

    def pause(self, failures: int, at_least_s: float = 0.0) -> None:
        """Exponential with jitter, 30 s at most; a server's Retry-After is honoured up to 60 s."""
        wait_s = min(30.0, self.backoff_s * 2 ** (failures - 1)) * random.uniform(0.7, 1.3)
        self.stopping.wait(max(wait_s, min(60.0, at_least_s)))
        self.check()

    def check(self) -> None:
        """Called between blocks: ends a transfer whose run is ending."""
        if self.stopping.is_set():
            raise StoppedError


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Keeps the hub's headers, which only the first answers of a chain carry; never leaves HTTPS for HTTP.

    A HEAD request stops where the hub has told the linked size: the signed URL behind it is for GET alone.
    """

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        _keep_hub_headers(req.hub_headers, headers)
        if req.get_method() == "HEAD" and headers.get("X-Linked-Size"):
            return None
        if req.full_url.startswith("https:") and not newurl.startswith("https:"):
            raise FetchError(f"{req.full_url} redirects from HTTPS to {newurl}: refused; use another source")
        kept = {k: v for k, v in req.header_items() if k.lower() != "host"}
        target = newurl.replace(" ", "%20")
        new = urllib.request.Request(target, headers=kept, method=req.get_method(), unverifiable=True)
        new.hub_headers = req.hub_headers  # type: ignore[attr-defined]
        return new

    http_error_308 = urllib.request.HTTPRedirectHandler.http_error_302


@dataclass
class Answer:
    """An HTTP answer; `header` prefers what the hub said before it redirected."""

    status: int
    headers: Message
    hub_headers: dict[str, str]
    body: Any

    def header(self, name: str) -> str:
        return self.hub_headers.get(name) or self.headers.get(name) or ""

    @property
    def length(self) -> int | None:
        """Bytes of the whole file as announced (of a partial answer: of the file, not of the part)."""
        if self.status == 206:
            match = re.fullmatch(r"bytes \d+-\d+/(\d+)", self.header("Content-Range"))
            return int(match.group(1)) if match else None
        value = self.header("X-Linked-Size") or self.header("Content-Length")
        return int(value) if value.isdigit() else None

    @property
    def tag(self) -> str:
        """Names the version of the file: ETag, else Last-Modified, else empty."""
        return self.header("X-Linked-ETag") or self.header("ETag") or self.header("Last-Modified")


def _keep_hub_headers(kept: dict[str, str], headers: Any) -> None:
    for name in HUB_HEADERS:
        if headers.get(name):
            kept.setdefault(name, headers[name])


@contextlib.contextmanager
def open_url(file: RemoteFile, retry: Retry, method: str = "GET", start: int = 0) -> Iterator[Answer]:
    """One request. CutError: may pass; MissingFileError: 404; FetchError: every other refusal."""
    headers = {"User-Agent": "specter-download/1", "Accept-Encoding": "identity"}
    if start:
        headers["Range"] = f"bytes={start}-"
    request = urllib.request.Request(file.url, headers=headers, method=method)
    request.hub_headers = {}  # type: ignore[attr-defined]
    opener = urllib.request.build_opener(_Redirects)
    try:
        response = opener.open(request, timeout=retry.timeout_s)
    except urllib.error.HTTPError as error:
        response = error
    except (OSError, http.client.HTTPException) as error:
        raise CutError(reason_of(error)) from error
    with response:
        kept = request.hub_headers  # type: ignore[attr-defined]
        _keep_hub_headers(kept, response.headers)
        answer = Answer(int(response.code or 0), response.headers, kept, response)
        linked = method == "HEAD" and answer.header("X-Linked-Size")
        if answer.status >= 300 and answer.status != 416 and not (linked and answer.status < 400):
            raise _refusal(file, answer)
        answered = answer.header("X-Repo-Commit")
        if file.commit and answered and answered != file.commit:
            raise _moved(file, f"the hub answers with commit {answered}")
        yield answer


def _refusal(file: RemoteFile, answer: Answer) -> Exception:
    status, code = answer.status, answer.header("X-Error-Code")
    if status in (408, 425, 429) or status >= 500:
        seconds = answer.header("Retry-After")
        return CutError(f"HTTP {status}", float(seconds) if seconds.isdigit() else 0.0)
    if status in (401, 403):
        return FetchError(
            f"{file.label}: HTTP {status} from {file.url}: private, gated or misspelt; "
            "fetch it by hand with an account that may read it"
        )
    if status in (404, 410):
        if code == "RevisionNotFound" or (file.commit and not code and not file.optional):
            return _moved(file, f"the hub answers HTTP {status}")
        return MissingFileError(f"{file.label}: HTTP {status}: no {file.url}; correct the manifest")
    return FetchError(f"{file.label}: HTTP {status} from {file.url}; try again later or use another source")


def _moved(file: RemoteFile, found: str) -> FetchError:
    wanted = f"commit {file.commit}" if file.commit else "the revision in its URL"
    return FetchError(
        f"{file.label}: the revision moved: {wanted} is wanted, {found} for {file.url}; name a revision that "
        "exists in the manifest, or delete download.json beside the files to begin again at the present one"
    )


def reason_of(error: BaseException) -> str:
    inner = getattr(error, "reason", error)
    return str(inner).splitlines()[0] if str(inner) else type(inner).__name__


def attempts(file: RemoteFile, retry: Retry) -> Iterator[Attempt]:
    """Yields attempts until one succeeds (`done`), pausing between them; FetchError when they are used up."""
    failures = 0
    while True:
        attempt = Attempt()
        yield attempt
        if attempt.cut is None:
            return
        failures = 1 if attempt.steady else failures + 1
        if failures >= retry.attempts:
            raise FetchError(
                f"{file.label}: {attempt.cut} ({file.url}, {failures} attempts); check the network or proxy "
                "and run the same command again: it continues where it stopped"
            )
        retry.pause(failures, attempt.cut.retry_after_s)


@dataclass
class Attempt:
    """One try: as a context it catches CutError and remembers it."""

    cut: CutError | None = None
    steady: bool = False

    def __enter__(self) -> Attempt:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        self.cut = error if isinstance(error, CutError) else None
        return self.cut is not None


def probe(file: RemoteFile, retry: Retry) -> RemoteFile:
    """Asks for size, digest and commit, not for content; fills in those that the manifest does not know."""
    for attempt in attempts(file, retry):
        with attempt, open_url(file, retry, method="HEAD") as answer:
            known = replace(file, bytes=answer.length if file.bytes is None else file.bytes)
            if file.bytes is not None and answer.length not in (None, file.bytes):
                raise wrong_size(file, answer.length or 0)
            commit = answer.header("X-Repo-Commit")
            if commit and not (file.sha256 or file.git_sha1):
                digest = re.fullmatch(r'(?:W/)?"?([0-9a-f]{40}|[0-9a-f]{64})"?', answer.tag)
                if digest and len(digest.group(1)) == 64:
                    known = replace(known, digest_from="hub", sha256=digest.group(1))
                elif digest:
                    known = replace(known, digest_from="hub", git_sha1=digest.group(1))
            return replace(known, commit=file.commit or commit or None)
    raise AssertionError("unreachable: attempts raises")


def wrong_size(file: RemoteFile, offered: int) -> FetchError:
    return FetchError(
        f"{file.label}: the server offers {offered:,} bytes, {file.bytes:,} are expected ({file.url}); "
        "another version is published there: correct the manifest or the source"
    )
