"""Bodies as files in whatever fsspec opens: `<root>/<topic>/<time>/<name>`, the last two in hexadecimal.

Hexadecimal, since there are file systems that take A for a, where KSUIDs would overwrite each other. The
folder is the first 6 of the name's 40 digits: its time in steps of 256 s.
"""

import errno
import logging
import os
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence, Set
from contextlib import suppress
from secrets import token_hex
from typing import Any, TypeVar

import anyio
import fsspec  # type: ignore[import-untyped]
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]

from keylane.errors import (
    BrokerError,
    Forbidden,
    InvalidArgument,
    InvalidName,
    MessageTooLarge,
    Overloaded,
    Unavailable,
)
from keylane.ksuid import EPOCH, first_at, raw
from keylane.payloads.store import PART, Owed, PayloadStore, cannot_sync, gathered, public
from keylane.threads import in_threads

_AT_ONCE = 8  # threads
_TOPIC = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")  # this also keeps paths inside the root
_FOLDER_DIGITS = 6
_FOLDER_SECONDS = 256
_SWEPT_FOLDERS = 64  # in one sweep
_REMOVED_AT_ONCE = 1_000  # files, on behalf of a sweep
_DRIFT = 60.0  # seconds that two clocks may differ by, or an eighth of a lifetime
_SAFE = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az"}  # object stores: what they have confirmed stays
_ATTEMPTS = 100  # to write into a folder that others remove whenever it is empty

T = TypeVar("T")
_log = logging.getLogger("keylane.client")
_now = time.time  # which a test may replace


def open_files(url: str, *, lifetime: float) -> "FileStore":
    """Open the store at a URL. Raises InvalidArgument if fsspec cannot, or lacks a package."""
    shown = public(url)
    if url.startswith("file://") and not url.startswith("file:///"):
        raise InvalidArgument(
            f"the payload store {shown} is a folder that depends on where a program runs: use file:///folder"
        )
    try:
        # Listings are for sweeps, an hour apart: a remembered one is a wrong one.
        system, root = fsspec.core.url_to_fs(url, use_listings_cache=False)
    except ImportError as error:
        missing = getattr(error.__cause__, "name", None)
        hint = f"pip install {missing}" if missing else str(error)
        raise InvalidArgument(
            f"the payload store {shown} needs a package that is not installed: {hint}"
        ) from error
    except (ValueError, TypeError) as error:
        raise InvalidArgument(
            f"cannot open the payload store {shown}: {error}; use redis://host:port/0, file:///folder, "
            "s3://bucket/folder or another URL that fsspec knows (others may need a pip install of their own)"
        ) from error
    except Exception as error:  # some connect at once, and each has errors of its own
        raise Unavailable(f"the payload store {shown} cannot be reached: {error}") from error
    if set(root) & set("*?["):
        raise InvalidArgument(f"the payload store {shown} has a *, ? or [ in its path, which fsspec expands")
    files = LocalFiles(system) if isinstance(system, LocalFileSystem) else Files(system)
    return FileStore(shown, root.rstrip("/"), files, lifetime=lifetime)


class Files:
    """Files by the batch, by means of fsspec; all of it blocks."""

    def __init__(self, system: Any) -> None:
        self._system = system

    def write(self, files: Mapping[str, bytes]) -> None:
        """Write files, and the folders that they need."""
        try:
            self._system.pipe(dict(files))
        except FileNotFoundError:  # object stores have no folders, and would ask the server for each
            for folder in {os.path.dirname(path) for path in files}:
                self._system.makedirs(folder, exist_ok=True)
            self._system.pipe(dict(files))

    def sync(self, root: str, paths: Sequence[str]) -> bool:
        """Have files that were written outlive a crash; whether that can be said of them."""
        spoken = self._system.protocol  # one, or several that mean the same
        return not _SAFE.isdisjoint([spoken] if isinstance(spoken, str) else spoken)

    def read(self, paths: Sequence[str]) -> dict[str, bytes]:
        """Read those files that are there."""
        found: dict[str, bytes] = {}
        if not paths:
            return found
        for path, content in self._system.cat(list(paths), on_error="return").items():
            if isinstance(content, bytes):
                found[path] = content
            elif not isinstance(content, FileNotFoundError):
                raise content
        return found

    def there(self, paths: Sequence[str]) -> set[str]:
        """Return which files exist, with one request per folder."""
        found: set[str] = set()
        for folder in {os.path.dirname(path) for path in paths}:
            self._system.invalidate_cache(folder)
            with suppress(FileNotFoundError):
                names = self._system.ls(folder, detail=False)
                found.update(f"{folder}/{name.rpartition('/')[2]}" for name in names)
        return found.intersection(paths)

    def remove(self, paths: Sequence[str]) -> None:
        """Remove those files that are there."""
        if not paths:
            return
        try:
            self._system.rm(list(paths))
        except FileNotFoundError:  # the others may be there still
            for path in paths:
                with suppress(FileNotFoundError):
                    self._system.rm_file(path)

    def folders(self, folder: str) -> list[str]:
        """Return the names of the folders in a folder."""
        try:
            found = self._system.ls(folder, detail=True)
        except FileNotFoundError:
            return []
        return [os.path.basename(item["name"].rstrip("/")) for item in found if item["type"] == "directory"]

    def remove_folder(self, folder: str, needed: Set[str], until: Callable[[], bool]) -> None:
        """Remove what is in a folder but for files that are needed, unless it takes until then."""
        found = self._system.find(folder)
        paths = [path for path in found if path not in needed]
        for first in range(0, len(paths), _REMOVED_AT_ONCE):
            if until():
                return
            self.remove(paths[first : first + _REMOVED_AT_ONCE])
        if len(paths) == len(found):
            with suppress(FileNotFoundError):
                self._system.rm(folder, recursive=True)


class LocalFiles(Files):
    """Files of this machine: they appear whole or not at all, and no empty folder stays."""

    def write(self, files: Mapping[str, bytes]) -> None:
        """Write files, and the folders that they need."""
        for path, content in files.items():
            part = f"{path}.{token_hex(4)}"
            try:
                _write_into_folder(part, content)
                os.replace(part, path)
            except BaseException:
                with suppress(OSError):
                    os.remove(part)
                raise

    def sync(self, root: str, paths: Sequence[str]) -> bool:
        """Have files that were written outlive a crash: they, and the folders up to that of the root."""
        folders = {os.path.dirname(path) for path in paths}
        topics = {os.path.dirname(folder) for folder in folders}
        for path in (*paths, *folders, *topics, root, os.path.dirname(root)):
            _sync(path)
        return True

    def read(self, paths: Sequence[str]) -> dict[str, bytes]:
        """Read those files that are there."""
        found = {}
        for path in paths:
            with suppress(FileNotFoundError), open(path, "rb") as file:
                found[path] = file.read()
        return found

    def there(self, paths: Sequence[str]) -> set[str]:
        """Return which files exist."""
        return {path for path in paths if os.path.exists(path)}

    def remove(self, paths: Sequence[str]) -> None:
        """Remove those files that are there, and their folders if nothing is left in them."""
        for path in paths:
            with suppress(FileNotFoundError):
                os.remove(path)
        folders = {os.path.dirname(path) for path in paths}
        for folder in [*folders, *{os.path.dirname(folder) for folder in folders}]:
            with suppress(OSError):
                os.rmdir(folder)


def _sync(path: str) -> None:
    descriptor = os.open(path or "/", os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_into_folder(path: str, content: bytes) -> None:
    for _ in range(_ATTEMPTS):
        try:
            with open(path, "wb") as file:
                file.write(content)
            return
        except FileNotFoundError:
            with suppress(FileNotFoundError):
                os.makedirs(os.path.dirname(path), exist_ok=True)
    raise FileNotFoundError(errno.ENOENT, "somebody keeps removing the folder", os.path.dirname(path))


def _append(path: str, content: bytes) -> None:
    with open(path, "ab") as file:
        file.write(content)


def _read_at(path: str, start: int) -> bytes | None:
    """Return a part of a file, None if there is no such file."""
    try:
        with open(path, "rb") as file:
            file.seek(start)
            return file.read(PART)
    except FileNotFoundError:
        return None


class FileStore(PayloadStore):
    """Bodies as files; the work is done in threads."""

    def __init__(self, url: str, root: str, files: Files, *, lifetime: float) -> None:
        self._url = url
        self._root = root
        self._files = files
        self._lifetime = lifetime
        self._threads = anyio.CapacityLimiter(_AT_ONCE)
        self._closed = False

    async def put(self, topic: str, bodies: Sequence[tuple[str, bytes]]) -> None:
        """Store bodies under their names; all are stored when this returns."""
        folder = self._folder(topic)
        await self._work(self._files.write, {_path(folder, name): body for name, body in bodies})

    async def sync(self, topic: str, names: Sequence[str]) -> None:
        """Return when bodies outlive a crash of the machine; InvalidArgument if nobody can say."""
        paths = list(self._paths(topic, names).values())
        if not await self._work(self._files.sync, self._root, paths):
            raise cannot_sync(self._url, "it cannot tell when a file is on disk")

    async def get(self, topic: str, names: Sequence[str]) -> list[bytes | None]:
        """Read bodies, in the order of `names`; None for each that is missing."""
        paths = self._paths(topic, names)
        found = await self._work(self._files.read, list(set(paths.values())))
        return [found.get(paths.get(name, "")) for name in names]

    async def has(self, topic: str, names: Sequence[str]) -> list[bool]:
        """Return which bodies exist, in the order of `names`."""
        paths = self._paths(topic, names)
        found = await self._work(self._files.there, list(set(paths.values())))
        return [paths.get(name) in found for name in names]

    async def delete(self, topic: str, names: Sequence[str]) -> None:
        """Delete bodies; missing ones are not an error."""
        await self._work(self._files.remove, list(set(self._paths(topic, names).values())))

    async def write(self, topic: str, name: str, parts: AsyncIterator[bytes]) -> int:
        """Store a body that comes in parts; files of this machine have it on disk as it comes."""
        if not isinstance(self._files, LocalFiles):
            return await super().write(topic, name, parts)
        path, size = _path(self._folder(topic), name), 0
        unfinished = f"{path}.{token_hex(4)}"
        try:
            await self._work(_write_into_folder, unfinished, b"")
            async for part in gathered(parts):
                await self._work(_append, unfinished, part)
                size += len(part)
            await self._work(os.replace, unfinished, path)
        except BaseException:
            with suppress(OSError):
                self._files.remove([unfinished])
            raise
        return size

    async def read(self, topic: str, name: str) -> AsyncIterator[bytes] | None:
        """Return the parts of a body, None if it is missing."""
        path = self._paths(topic, [name]).get(name)
        if path is None or not isinstance(self._files, LocalFiles):
            return await super().read(topic, name)
        first = await self._work(_read_at, path, 0)
        return None if first is None else self._parts(path, first)

    async def _parts(self, path: str, part: bytes | None) -> AsyncIterator[bytes]:
        at = 0
        while part:
            yield part
            at += len(part)
            part = await self._work(_read_at, path, at)
            if part is None:
                raise Unavailable("a body was deleted while it was read")

    async def close(self) -> None:
        """Stop sweeping."""
        self._closed = True

    def _folder(self, topic: str) -> str:
        if not _TOPIC.fullmatch(topic):
            raise InvalidName(f"topic name {topic[:60]!r} is not allowed: letters, digits, '.', '_' or '-'")
        return f"{self._root}/{topic}"

    def _paths(self, topic: str, names: Sequence[str]) -> dict[str, str]:
        """Return where the bodies are; a name that no put can have stored has no place."""
        folder, paths = self._folder(topic), {}
        for name in names:
            with suppress(InvalidArgument):
                paths[name] = _path(folder, name)
        return paths

    async def _work(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run a function in a thread; whatever it raises gets a name."""
        try:
            return await in_threads(self._threads, function, *arguments)
        except Exception as error:  # each file system has errors of its own
            raise self._named(error) from error

    def _named(self, error: Exception) -> BrokerError:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return Overloaded(f"the payload store {self._url} is full: {error}")
        if isinstance(error, OSError) and error.errno == errno.EFBIG:
            return MessageTooLarge(f"the payload store {self._url} cannot store a body this large: {error}")
        if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            return Forbidden(f"the payload store {self._url} does not let this process write: {error}")
        return Unavailable(f"the payload store {self._url} cannot be used: {error or type(error).__name__}")

    async def tend(self, topic: str, owed: Owed, now: float) -> None:
        """Remove what has outlived its lifetime and is not owed: mostly what was never published.

        A body that is about to be published is not owed yet: it must not seem to be old.
        """
        if abs(drift := now - _now()) > max(_DRIFT, self._lifetime / 8):
            _log.warning(
                "old bodies of topic %s stay for now: the cluster's clock is %.0f s ahead of this machine's: "
                "one of the two is wrong",
                topic,
                drift,
            )
            return
        folder = self._folder(topic)
        newest = now - self._lifetime - _FOLDER_SECONDS
        expired = [name for name in await self._work(self._files.folders, folder) if _start(name) <= newest]
        if not expired:
            return
        needed = set(self._paths(topic, list(await owed(first_at(newest + 2 * _FOLDER_SECONDS)))).values())
        for name in sorted(expired)[:_SWEPT_FOLDERS]:
            place = f"{folder}/{name}"
            await self._work(self._files.remove_folder, place, needed, lambda: self._closed)


def _path(folder: str, name: str) -> str:
    digits = raw(name).hex()
    return f"{folder}/{digits[:_FOLDER_DIGITS]}/{digits}"


def _start(folder: str) -> float:
    """Return the unix time at which a folder's range begins; one that is not ours is of no time at all."""
    if not re.fullmatch(rf"[0-9a-f]{{{_FOLDER_DIGITS}}}", folder):
        return float("inf")
    return float(EPOCH + int(folder, 16) * _FOLDER_SECONDS)
