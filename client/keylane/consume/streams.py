"""All streams of a consumer: which worker serves which of its partitions, and who does when that changes."""

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from time import monotonic

import msgspec

from keylane import wire
from keylane.connect.cluster import Cluster
from keylane.connect.connection import Redirected
from keylane.connect.partition_map import TopicMap
from keylane.connect.pool import Peer
from keylane.consume.permits import Permits
from keylane.consume.worker_stream import WorkerStream, final
from keylane.errors import BrokerError, ConnectionClosed, TopicReplaced, Unavailable
from keylane.tasks import Tasks
from keylane.wire import Frame


class Streams:
    """The workers' side of a consumer.

    `on_opening` is entered while a worker is asked for partitions. `on_open` hears which are open, and what
    the worker said; `on_cut_off` which are not any more, and until when what is held of them is ours;
    `on_void` for which partitions all leases have ended; `on_end` the error that ends the consumer for good.
    """

    def __init__(
        self,
        cluster: Cluster,
        numbers: Iterator[int],
        request: wire.Subscribe,
        *,
        on_opening: Callable[[Collection[int]], AbstractContextManager[None]],
        on_open: Callable[[Collection[int], wire.SubscribeReply], None],
        on_data: Callable[[Frame, wire.Data], None],
        on_leases_ended: Callable[[Frame, wire.Ended], None],
        on_cut_off: Callable[[Collection[int], float], None],
        on_void: Callable[[Collection[int]], None],
        on_end: Callable[[BrokerError], None],
    ) -> None:
        self.topic = request.topic
        self.timeout = cluster.timeout
        self.opening = on_opening
        self.received = on_data
        self.leases_ended = on_leases_ended
        self.paused = False
        self._cluster = cluster
        self._numbers = numbers
        self._request = request
        self._on_open = on_open
        self._on_cut_off = on_cut_off
        self._on_void = on_void
        self._on_end = on_end
        self._tasks = Tasks()
        self._begin()

    def _begin(self) -> None:
        """Nothing was asked yet."""
        self.number = next(self._numbers)  # another each time: what comes late for the last one is not for us
        self._request = msgspec.structs.replace(self._request, stream=self.number)
        self.opened_all = False
        self.error: BrokerError | None = None
        self._map: TopicMap | None = None
        self._incarnation = 0  # of the topic that was subscribed to: another one of its name ends all
        self._of_subscription = 0  # and that of the subscription, once a worker has said
        self._streams: dict[Peer, WorkerStream] = {}
        self._to_serve: dict[int, WorkerStream | None] = {}  # partition -> who is to serve it
        self._serving: dict[int, WorkerStream] = {}  # partition -> who does
        self._epochs: dict[int, int] = {}  # partition -> that of the newest lease under which it was open
        self._exclusive = False
        self._last_error: BrokerError | None = None  # what went wrong last
        self._news = asyncio.Event()  # something was opened, or all has ended
        self._asking: asyncio.Task[None] | None = None
        self.permits = Permits[WorkerStream](self._request.permits, self._tasks)

    # What the consumer calls

    async def open(self) -> None:
        """Subscribe for the first time: all partitions."""
        try:
            async with asyncio.timeout(self.timeout):
                while not await self._open_all():
                    await self._close_again()
        except TimeoutError:
            late = self._late()
            await self._close_again()
            raise late from None
        except BaseException:
            await self._close_again()
            raise

    async def _open_all(self) -> bool:
        """Subscribe by the map as it is known; False if the topic that is there is another one."""
        self._map = await self._cluster.map(self.topic)
        self._map.watchers[self._place] = None
        self._place()
        while not self.opened_all and self.error is None:
            self._news.clear()
            await self._news.wait()
        if isinstance(self.error, TopicReplaced):
            await self._map.refresh()
            return False
        if self.error is not None:
            raise self.error.again()
        return True

    async def _close_again(self) -> None:
        """It could not be opened: leave nothing, so that it can be tried once more."""
        await self.close()
        self._begin()

    async def leave(self) -> None:
        """Tell the workers that the consumer is closed: what it holds goes back."""
        self._forget_map()
        await asyncio.gather(*(stream.leave() for stream in self._streams.values()))

    async def close(self) -> None:
        """Do not subscribe again; what is still open is closed, and nobody waits for the answer."""
        self._forget_map()
        await self._tasks.cancel()
        for stream in self._streams.values():
            stream.close()

    def _forget_map(self) -> None:
        if self._map is not None:
            self._map.watchers.pop(self._place, None)
            self._cluster.forget(self._map)

    def offer_permits(self, held: Mapping[int, int], more: int) -> None:
        """Let each worker have out what is held of its partitions, and as many more."""
        holders: Counter[WorkerStream] = Counter()
        for partition, count in held.items():
            if (stream := self.serving(partition)) is not None:
                holders[stream] += count
        self.permits.offer(holders, more)

    def serving(self, partition: int) -> WorkerStream | None:
        """Return who serves a partition."""
        return self._serving.get(partition)

    async def reach(self, partition: int, within: float) -> WorkerStream:
        """Return who serves a partition, waiting for it if need be."""
        end = monotonic() + within
        while (stream := self.serving(partition)) is None:
            if self.error is not None:
                raise self.error.again()
            self._news.clear()
            try:
                async with asyncio.timeout(max(0.0, end - monotonic())):
                    await self._news.wait()
            except TimeoutError:
                raise self._late() from None
        return stream

    def doubt(self, partition: int, error: BrokerError) -> None:
        """A request about a partition was refused: perhaps another worker has it."""
        if self._map is not None:
            if isinstance(error, Redirected):
                self._map.redirected(partition, error.address)
            self._map.renew()

    def pause(self, paused: bool) -> None:
        """Have the workers stop or go on."""
        self.paused = paused
        for stream in self._streams.values():
            stream.pause(paused)

    def credit(self, partition: int, count: int) -> None:
        """Messages ended without an ACK or NACK: there is room for others."""
        stream = self.serving(partition)
        if count and stream is not None:
            stream.credit(partition, count)

    # What streams call

    def request(self, partitions: Collection[int], permits: int) -> wire.Subscribe:
        """Return what to ask of a worker."""
        return msgspec.structs.replace(
            self._request,
            incarnation=self._incarnation,
            subscription_incarnation=self._of_subscription,
            partitions=sorted(partitions),
            permits=permits,
        )

    def may_open(self, stream: WorkerStream) -> bool:
        """Return whether to subscribe now, or once the worker of the lowest partition has answered.

        That one decides who is alone on an exclusive subscription.
        """
        lowest = min(self._to_serve)
        first = self._exclusive or not self.opened_all
        return not first or lowest in self._serving or lowest in stream.wanted

    def opened(self, stream: WorkerStream, partitions: frozenset[int], reply: wire.SubscribeReply) -> None:
        """A worker serves partitions."""
        # What another worker has opened after it: the larger epoch is the newer.
        late = {at for at in partitions if reply.epochs.get(at, 0) < self._epochs.get(at, 0)}
        self._epochs.update({at: epoch for at, epoch in reply.epochs.items() if at not in late})
        stream.open -= late
        before = {at: self._serving[at] for at in partitions - late if at in self._serving}
        for other in {other for other in before.values() if other is not stream}:
            # It has not said that it serves them no more, or cannot.
            self.permits.departed(other, [at for at in before if before[at] is other], reply.held or 0)
        self._serving.update(dict.fromkeys(partitions - late, stream))
        for partition, other in before.items():
            if other is not stream:
                other.release(partition)
        self._exclusive = reply.mode == "exclusive"
        self._of_subscription = self._of_subscription or reply.subscription_incarnation
        self._last_error = None
        self.permits.opened(stream, partitions - late, reply.held or 0)
        if late:
            reply = msgspec.structs.replace(reply, held=None)
        self._on_open(partitions - late, reply)
        if self._serving.keys() >= self._to_serve.keys():
            self.opened_all = True
        self._share()
        self._news.set()
        for other in self._streams.values():
            other.wake()

    def moved(self, stream: WorkerStream, partition: int, address: str, permits: int) -> None:
        """A worker serves a partition no more; what is held of it stays so, and takes permits along."""
        if self._serving.get(partition) is not stream:  # another has it already: only the permits are news
            if permits:
                self.permits.repeat(stream)
            return
        del self._serving[partition]
        self._on_cut_off([partition], stream.certain_until)
        self.permits.departed(stream, [partition], permits)
        self._share()
        stream.release(partition)
        if self._map is not None:
            self._map.redirected(partition, address)
            self._map.renew()

    def closed(self, stream: WorkerStream, partitions: set[int], void: bool) -> None:
        """A worker has ended its part, or its connection has ended."""
        served = [partition for partition in partitions if self._serving.get(partition) is stream]
        for partition in served:
            del self._serving[partition]
        self._on_cut_off(served, stream.certain_until)
        self.permits.lost(stream, partitions)
        if void:
            self._on_void(partitions)

    async def look_again(self, error: BrokerError) -> None:
        """Something could not be opened: perhaps another worker has it."""
        self._last_error = error
        assert self._map is not None
        try:
            if isinstance(error, Redirected) and error.address and self._map.owners:
                self._map.redirected(error.partition, error.address)
                self._map.renew()
            else:
                await self._map.refresh()
        except BrokerError as problem:
            self._last_error = problem
            if final(problem):
                self.end(problem)

    def drop(self, stream: WorkerStream) -> None:
        """A stream has nothing to serve any more."""
        if self._streams.get(stream.peer) is stream:
            del self._streams[stream.peer]
            self._share()

    def end(self, error: BrokerError) -> None:
        """The consumer has ended for good."""
        if self.error is None:
            self.error = error
            self._forget_map()
            self._news.set()
            self._on_end(error)

    # Below: how

    def _place(self) -> None:
        """The map is known, or has changed: have each partition served by its owner."""
        assert self._map is not None
        if self.error is not None:
            return
        self._incarnation = self._incarnation or self._map.incarnation
        if self._map.known and self._map.incarnation != self._incarnation:
            self.end(TopicReplaced(f"topic {self.topic!r} was deleted and recreated"))
            return
        if not self._to_serve:
            chosen = self._request.partitions
            self._to_serve = dict.fromkeys(range(len(self._map.owners)) if chosen is None else sorted(chosen))
        for partition, before in self._to_serve.items():
            peer = self._map.owner(partition)
            stream = before if peer is None else self._stream_to(peer)
            if stream is not before and stream is not None:
                self._to_serve[partition] = stream
                stream.wanted.add(partition)
                stream.wake()
                if before is not None:
                    before.wanted.discard(partition)
                    before.wake()
        self._share()
        if None in self._to_serve.values() and self._asking is None:
            self._asking = self._tasks.start(self._await_owners())

    def _stream_to(self, peer: Peer) -> WorkerStream:
        stream = self._streams.get(peer)
        if stream is None:
            stream = self._streams[peer] = WorkerStream(self, peer, self.topic, self.number)
            asyncio.get_running_loop().call_soon(self._start, stream)
        return stream

    def _start(self, stream: WorkerStream) -> None:
        if self.error is None:
            self._tasks.start(stream.run())

    def _share(self) -> None:
        """By what each serves, or is to: a partition that is about to move counts until it has moved."""
        weights = dict.fromkeys(self._streams.values(), 0)
        for partition, to_serve in self._to_serve.items():
            if (stream := self._serving.get(partition, to_serve)) in weights:
                weights[stream] += 1
        self.permits.share(weights)

    async def _await_owners(self) -> None:
        """Ask until every partition has somebody to serve it."""
        assert self._map is not None
        try:
            while None in self._to_serve.values() and self.error is None:
                await self.look_again(Unavailable(f"some partitions of {self.topic!r} have no worker yet"))
        finally:
            self._asking = None

    def _late(self) -> BrokerError:
        return (self._last_error and self._last_error.again()) or ConnectionClosed(
            f"no worker that serves {self.topic!r} has answered in {self.timeout:g} s"
        )
