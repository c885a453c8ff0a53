"""Names change in one step: two folders change places, or a file gets a name that nobody has."""

import ctypes
import errno
import os
import sys
from contextlib import suppress
from pathlib import Path

_HERE = -100  # AT_FDCWD: paths are as they are written
_FREE = 1  # RENAME_NOREPLACE
_EXCHANGE = 2  # RENAME_EXCHANGE
_CANNOT = (errno.ENOSYS, errno.EINVAL, errno.EXDEV, errno.EOPNOTSUPP)


def swap(one: Path, other: Path) -> bool:
    """Swap two folders; False where the system has no such step, and then nothing has changed."""
    return _rename(one, other, _EXCHANGE)


def move(source: Path, target: Path) -> None:
    """Move a file to a name that is free: FileExistsError if it is not, where a rename would go ahead."""
    if not _rename(source, target, _FREE):
        if target.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
        source.rename(target)


def _rename(one: Path, other: Path, how: int) -> bool:
    if sys.platform != "linux":
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        return False
    if libc.renameat2(_HERE, os.fsencode(one), _HERE, os.fsencode(other), how) == 0:
        return True
    code = ctypes.get_errno()
    if code in _CANNOT:
        return False
    raise OSError(code, os.strerror(code), str(one), None, str(other))


def link_into(folder: Path, other: Path, without: set[str]) -> None:
    """Let a folder have the files of another one as well, but for some; no byte is copied."""
    for file in other.iterdir():
        target = folder / file.name
        if file.name not in without and file.is_file() and not target.exists():
            with suppress(FileNotFoundError):  # somebody deletes old files
                os.link(file, target)
