"""Who may write to an archive: one process for each subscription, and one subscription for each topic.

Locks are those of the operating system: they are for local folders alone, and end with their process.
"""

import fcntl
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from keylane.errors import InvalidArgument, Overloaded, SubscriptionBusy
from keylane_spark.files import Files, local_at


@contextmanager
def compacting(files: Files, root: str) -> Iterator[None]:
    """Keep another compaction out."""

    def busy(other: str) -> Exception:
        return Overloaded(f"{other} is compacting {root}: try again later")

    with _alone(files, f"{root}.keylane/compaction", busy):
        yield


@contextmanager
def archiving(files: Files, root: str, subscription: str) -> Iterator[None]:
    """Keep another archive with this subscription out."""

    def busy(other: str) -> Exception:
        return SubscriptionBusy(
            f"{other} is archiving into {root} with subscription {subscription!r}: stop it, or name all "
            "topics in one command"
        )

    with _alone(files, state_of(root, subscription), busy):
        yield


@contextmanager
def moving(files: Files, root: str) -> Iterator[None]:
    """Wait until nobody else moves files of the archive: who is doing so is done in a moment.

    A file that came into a folder while that is swapped with its compacted twin could be lost with the twin.
    """
    if not files.local:
        yield
        return
    folder = f"{root}.keylane"
    files.make_folder(folder)
    with Path(files.plain(f"{folder}/moving.lock")).open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def state_of(root: str, subscription: str) -> str:
    """The folder of what is known of an archive's subscription, however many topics it is of."""
    return f"{root}.keylane/subscriptions/{subscription}"


def check_writer(path: str, subscription: str, topics: Sequence[str]) -> None:
    """Check that topics can be archived now, as far as that can be told of a local folder without Java."""
    root, files = path.rstrip("/"), local_at(path)
    if files is not None and files.exists(f"{root}.keylane"):
        with archiving(files, root, subscription):
            check_topics(files, root, subscription, topics)


class Writer(msgspec.Struct, frozen=True):
    """Who archives a topic."""

    subscription: str


def check_topics(files: Files, root: str, subscription: str, topics: Sequence[str]) -> None:
    """Check that no topic is archived by another subscription, which would have its rows twice."""
    for topic in topics:
        path = _writer(root, topic)
        if text := files.read(path):
            other = msgspec.json.decode(text, type=Writer).subscription
            if other != subscription:
                raise InvalidArgument(
                    f"topic {topic!r} is archived into {root} by subscription {other!r}, and its rows would "
                    f"be there twice: continue with that one, or use another folder. If {other!r} is no "
                    f"longer used, delete {path}"
                )


def enter_topics(files: Files, root: str, subscription: str, topics: Sequence[str]) -> None:
    """Write down that these topics are archived by a subscription, and see that they are by no other."""
    text = msgspec.json.encode(Writer(subscription)).decode()
    for topic in topics:
        files.make_folder(f"{root}.keylane/topics")
        files.create(_writer(root, topic), text)
    check_topics(files, root, subscription, topics)


def _writer(root: str, topic: str) -> str:
    return f"{root}.keylane/topics/{topic}.json"


@contextmanager
def _alone(files: Files, folder: str, busy: Callable[[str], Exception]) -> Iterator[None]:
    files.make_folder(folder)
    if not files.local:
        yield
        return
    with Path(files.plain(f"{folder}/lock")).open("a+", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            lock.seek(0)
            raise busy(lock.read().strip() or "another process") from error
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        lock.flush()
        yield
