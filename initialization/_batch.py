"""Many files: free space first, one run per folder, a pool of transfers, a bar, exit codes. Python >= 3.8."""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import NoReturn

from _fetch import Fetched, fetch
from _http import FetchError, MissingFileError, RemoteFile, Retry, StoppedError, UsageError, probe
from _progress import Progress, human_bytes

try:
    import fcntl
except ImportError:  # not POSIX: two runs at once are then the user's to avoid
    fcntl = None  # type: ignore[assignment]


def free_bytes(folder: Path) -> int:
    """Free bytes of the file system that `folder` is or will be on."""
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


def check_space(needed_bytes: int, folder: Path, unknown_files: int = 0) -> str:
    """One line with both numbers; UsageError when the space does not suffice."""
    free = free_bytes(folder)
    more = f" and {unknown_files} file(s) of unknown size" if unknown_files else ""
    numbers = f"needs {human_bytes(needed_bytes)}{more}, {human_bytes(free)} are free in {folder}"
    if needed_bytes > free:
        short = human_bytes(needed_bytes - free)
        raise UsageError(f"{numbers}: free {short} more or choose another --output")
    return numbers


def missing_bytes(file: RemoteFile) -> int:
    """What is still to be written for this file: nothing when a file of its size is there already."""
    size = file.bytes or 0
    if file.path.is_file() and file.path.stat().st_size == size:
        return 0
    part = file.path.with_name(file.path.name + ".part")
    return max(0, size - (part.stat().st_size if part.exists() else 0))


@contextlib.contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Only one run writes to a folder at a time; the lock goes with the process, however it ends."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = (folder / ".download.lock").open("a")
    except OSError as error:
        raise UsageError(f"cannot write to {folder}: {error.strerror}; choose another --output") from error
    with handle:
        if fcntl is not None:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise UsageError(f"another download is writing to {folder}; wait for it to end") from error
        yield


def _run_pool(
    work: Sequence[Callable[[], object]], jobs: int, retry: Retry, bar: Progress | None
) -> list[Future[object]]:
    """Runs everything on `jobs` threads, drawing in this one. Ctrl-C or a full disk ends all of it soon."""
    with ThreadPoolExecutor(max_workers=jobs) as pool:
        futures = [pool.submit(task) for task in work]
        pending = set(futures)
        try:
            while pending:
                done, pending = wait(pending, timeout=0.2, return_when=FIRST_COMPLETED)
                if any(isinstance(f.exception(), UsageError) for f in done):
                    retry.stopping.set()
                if bar is not None:
                    bar.draw()
        except BaseException:
            retry.stopping.set()
            for future in pending:
                future.cancel()
            raise
    if bar is not None:
        bar.draw(force=True)
    return futures


def _results(futures: list[Future[object]]) -> list[object]:
    """All results, or the most telling error: the user's before the network's, with the number of others."""
    errors = [e for e in (f.exception() for f in futures) if e is not None]
    for kind in (UsageError, FetchError):
        mine = [e for e in errors if isinstance(e, kind)]
        if mine:
            others = len([e for e in errors if not isinstance(e, StoppedError)]) - 1
            raise kind(f"{mine[0]} (and {others} more file(s) failed)" if others else str(mine[0]))
    return [f.result() for f in futures]


def probe_all(files: list[RemoteFile], jobs: int, retry: Retry, progress: Progress) -> list[RemoteFile]:
    """Sizes, digests and commits as servers announce them; optional files that do not exist are left out."""

    def ask(file: RemoteFile) -> RemoteFile | None:
        try:
            return probe(file, retry)
        except MissingFileError:
            if not file.optional:
                raise
            progress.note(f"{file.label}: not published, left out")
            return None

    answers = _results(_run_pool([functools.partial(ask, f) for f in files], jobs, retry, None))
    return [a for a in answers if isinstance(a, RemoteFile)]


def fetch_all(files: list[RemoteFile], jobs: int, retry: Retry, progress: Progress) -> list[Fetched]:
    """Fetches every file, largest first, and returns them in the given order."""
    for file in files:
        progress.expect(file.label, file.bytes)

    def get(file: RemoteFile) -> Fetched:
        result = fetch(file, retry, progress)
        progress.finish(file.label)
        state = "fetched" if result.fresh else "already there"
        progress.note(f"{file.label}: {state}, {human_bytes(result.bytes)}, {file.check}")
        return result

    order = sorted(range(len(files)), key=lambda i: -(files[i].bytes or 0))
    results = _results(_run_pool([functools.partial(get, files[i]) for i in order], jobs, retry, progress))
    found = {i: results[n] for n, i in enumerate(order)}
    return [f for f in (found[i] for i in range(len(files))) if isinstance(f, Fetched)]


class OneLineParser(argparse.ArgumentParser):
    """Argument errors are one line, as all others are."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}; see --help\n")


def add_transfer_options(parser: argparse.ArgumentParser) -> None:
    """The options that both tools share."""
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="only these (repeat or a,b)")
    parser.add_argument("--dry-run", action="store_true", help="show what would be done; no network")
    parser.add_argument("--jobs", type=int, default=4, help="parallel transfers (default 4)")
    parser.add_argument("--retries", type=int, default=6, help="attempts without progress per file (default 6)")
    parser.add_argument("--backoff-s", type=float, default=1.0, help="first pause between attempts (default 1)")
    parser.add_argument("--timeout-s", type=float, default=30.0, help="silence that counts as a cut (default 30)")
    parser.add_argument(
        "--hub-url",
        default=os.environ.get("HF_ENDPOINT") or "https://huggingface.co",
        help="model and dataset hub (default: HF_ENDPOINT or %(default)s)",
    )


def retry_from(args: argparse.Namespace) -> Retry:
    for name, least in (("jobs", 1), ("retries", 1), ("backoff_s", 0), ("timeout_s", 0.001)):
        value = getattr(args, name)
        if not value >= least:
            raise UsageError(f"--{name.replace('_', '-')} {value:g} is too small; {least:g} is the least")
    return Retry(args.retries, args.backoff_s, args.timeout_s)


def run_tool(run: Callable[[], None]) -> int:
    """Exit code of a command line: 0, 1 (network or verification), 2 (the user's side), 130 (interrupted)."""
    try:
        run()
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except FetchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"error: {error.filename or ''}: {error.strerror or error}; check --output", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; run the same command again: it continues where it stopped", file=sys.stderr)
        return 130
    return 0
