"""Storing the bodies of frames, before these are sent."""

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from keylane.errors import BrokerError, ConnectionClosed
from keylane.payloads.bodies import Bodies
from keylane.produce.outgoing import StoredBody
from keylane.produce.publish_frame import PublishFrame
from keylane.tasks import Tasks

_TOGETHER = 1024 * 1024  # bytes that go in company: what is larger is not worth waiting for


class Upload:
    """The bodies of a frame on their way to the store, perhaps with those of others."""

    __slots__ = ("_ended", "cancelled", "company", "done", "frame", "insist", "place", "task")

    def __init__(
        self,
        topic: str,
        frame: PublishFrame,
        insist: Callable[[PublishFrame], Coroutine[Any, Any, Exception | None]],
        done: Callable[[PublishFrame, Exception | None], None],
    ) -> None:
        self.place = topic, frame.durability
        self.frame = frame
        self.insist = insist  # stores them alone, and sees to all that can go wrong; returns why it cannot be
        self.done = done  # hears of its end, with that error, once
        self.company: list[Upload] = []  # whom the same task stores
        self.task: asyncio.Task[None]
        self.cancelled = False
        self._ended = False

    def cancel(self) -> None:
        """Nobody wants it any more; it ends when the store is done with it."""
        self.cancelled = True
        if all(other.cancelled for other in self.company):
            self.task.cancel()

    def end(self, error: Exception | None) -> None:
        """The store is done with it."""
        if not self._ended:
            self._ended = True
            self.company = []
            self.done(self.frame, error)


class Uploads:
    """Stores the bodies of frames: of those that begin in one turn of the event loop in one go."""

    def __init__(self, bodies: Bodies, tasks: Tasks) -> None:
        self._bodies = bodies
        self._tasks = tasks
        self._open: dict[tuple[str, str], list[Upload]] = {}  # whom another may still join

    def start(self, upload: Upload) -> None:
        """Store the bodies of a frame."""
        if upload.frame.strict:  # many, of which one that is refused is the end
            self._run([upload], self._store_alone(upload))
            return
        company = self._open.get(upload.place)
        if company and _may_join(company, upload):
            company.append(upload)
            upload.company, upload.task = company, company[0].task
        else:
            self._open[upload.place] = company = [upload]
            self._run(company, self._store(company))

    def _run(self, company: list[Upload], work: Coroutine[Any, Any, None]) -> None:
        task = self._tasks.start(work)
        for upload in company:
            upload.company, upload.task = company, task
        # Not by itself: cancelled before its first step it would never get there.
        task.add_done_callback(partial(self._ended, company))

    def _ended(self, company: list[Upload], task: asyncio.Task[None]) -> None:
        self._close(company)
        for upload in company:
            if upload.task is task:
                error = None if task.cancelled() else task.exception()
                upload.end(
                    error if isinstance(error, Exception) else ConnectionClosed("the client was closed")
                )

    def _close(self, company: list[Upload]) -> None:
        """Let nobody join any more."""
        place = company[0].place
        if self._open.get(place) is company:
            del self._open[place]

    async def _store(self, company: list[Upload]) -> None:
        self._close(company)
        if len(company) == 1:
            await self._store_alone(company[0])
            return
        topic, durability = company[0].place
        wanted = [upload for upload in company if not upload.cancelled]
        bodies = [body for upload in wanted for body in upload.frame.bodies.values()]
        try:
            await self._bodies.put(topic, _not_stored(bodies), durability)
        except Exception:  # because of one of them, perhaps
            for upload in wanted:
                if not upload.cancelled:  # meanwhile
                    self._run([upload], self._store_alone(upload))
        else:
            for upload in company:
                upload.end(None)

    async def _store_alone(self, upload: Upload) -> None:
        upload.end(await upload.insist(upload.frame))


def _may_join(company: list[Upload], upload: Upload) -> bool:
    together = sum(each.frame.length for each in (*company, upload)) <= _TOGETHER
    return together and not company[0].task.cancelling()


def _not_stored(bodies: list[tuple[str, bytes]]) -> list[tuple[str, bytes]]:
    """Leave out what the store has already."""
    return [pair for pair in bodies if type(pair[1]) is not StoredBody]


async def store_bodies(bodies: Bodies, topic: str, frame: PublishFrame) -> dict[int, Exception]:
    """Store the bodies of a frame. Returns the errors of those that the store refuses for good, by place.

    Raises what concerns all of them: errors that are retriable, and any error where the frame is strict.
    """
    refused: dict[int, Exception] = {}
    rest = [list(frame.bodies)]
    while rest:
        places = rest.pop()
        try:
            some = _not_stored([frame.bodies[place] for place in places])
            await bodies.put(topic, some, frame.durability)
        except Exception as error:
            if frame.strict or (isinstance(error, BrokerError) and error.retriable):
                raise
            if len(places) == 1:
                refused[places[0]] = error
            else:  # which of them it is nobody says
                half = len(places) // 2
                rest += [places[half:], places[:half]]
    return refused
