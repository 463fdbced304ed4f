"""The two kinds of error that leave the engine, and what a command line makes of them."""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable

FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
BAD_PATH = (
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.EEXIST,
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.ENAMETOOLONG,
)


class UserError(ValueError):
    """Bad input. The message is one line: both values and the remedy. Command lines print it and exit with code 2."""


class WrongExpertError(RuntimeError):
    """A slot's trailer names another expert than the one that was asked for; the result would have been wrong."""


def exit_code(body: Callable[[], int], where: str = "") -> int:
    """What a command line ends with: the code that `body` returns, or 2 and one line on stderr for bad input, a full
    disk, and a file or folder that cannot be read or written. where: what a full disk is called if the system does not
    say it. A SystemExit with a line (figures/ raises it) counts as bad input. Everything else is our bug and is
    raised."""
    try:
        return body()
    except UserError as error:
        line = f"error: {error}"
    except SystemExit as end:
        if not isinstance(end.code, str):
            raise
        line = end.code
    except OSError as error:
        if error.errno in FULL_DISK:
            place = error.filename or where or "the disk"
            line = f"error: {place}: {error.strerror}; free some space, what is recorded stays"
        elif error.errno in BAD_PATH and error.filename:
            line = f"error: {error.filename}: {error.strerror}; name a file or folder that can be used"
        else:
            raise
    print(line, file=sys.stderr)
    return 2
