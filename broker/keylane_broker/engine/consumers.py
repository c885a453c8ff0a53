"""Consumers of a subscription on one partition: their sessions, and what they hold."""

from collections.abc import Sequence
from typing import Any

import msgspec

from keylane.errors import SubscriptionBusy
from keylane.wire.ledgers import merge_ledgers
from keylane_broker.engine.addressing import addressed_to_others
from keylane_broker.engine.base import STEP, EngineBase
from keylane_broker.engine.checks import check_int
from keylane_broker.engine.codec import rows, to_flat
from keylane_broker.engine.entries import as_messages, read_entries, settle_missing
from keylane_broker.engine.settings import subscription_fields
from keylane_broker.engine.values import Delivery, Lease, Receipt, SubscriptionSettings
from keylane_broker.limits import MAX_MS
from keylane_broker.store.keys import PLACE, check_name


def place_name(subscription: str, consumer: str) -> str:
    """Return the name of a consumer's place in a multicast subscription, which no user can give."""
    return f"{subscription}{PLACE}{consumer}"


class ConsumerOperations(EngineBase):
    """Opening, renewing and ending the sessions of consumers."""

    async def join(self, lease: Lease, subscription: str, consumer: str, session_ms: int = 10_000) -> bool:
        """Open a consumer's session; returns whether one of that name was open, and may hold leases."""
        check_name("consumer", consumer)
        check_int("session_ms", session_ms, 1, MAX_MS)
        while True:
            answer = await self.run("join", lease, subscription, consumer, session_ms)
            if answer[0] == "BUSY":
                raise SubscriptionBusy(
                    f"subscription {subscription!r} of {lease.topic!r} is exclusive and has "
                    f"consumer {answer[1]!r}"
                )
            if answer[0] == "OK":
                return bool(answer[1])
            await self._leave(lease, subscription, answer[1], "ended")

    async def register(
        self,
        lease: Lease,
        subscription: str,
        consumer: str,
        settings: SubscriptionSettings,
        session_ms: int = 10_000,
    ) -> bool:
        """Open a session on a multicast subscription, with the consumer's place; returns as join()."""
        check_name("subscription", subscription)
        check_name("consumer", consumer)
        check_int("session_ms", session_ms, 1, MAX_MS)
        place = place_name(subscription, consumer)
        fields = subscription_fields(msgspec.structs.replace(settings, mode=settings.delivers_as))
        filter = fields.pop("filter")
        numbers = (str(lease.incarnation), str(settings.incarnation))
        while True:
            answer = await self.run(
                "register", lease, place, consumer, session_ms, *numbers, filter, *to_flat(fields)
            )
            if answer[0] == "OK":
                return bool(answer[1])
            await self._leave(lease, place, answer[1], "ended")

    async def renew_sessions(
        self, lease: Lease, subscription: str, consumers: Sequence[str], session_ms: int = 10_000
    ) -> list[str]:
        """Renew sessions; returns the consumers that no longer have one."""
        for consumer in consumers:
            check_name("consumer", consumer)
        check_int("session_ms", session_ms, 1, MAX_MS)
        answer = await self.run("renew_sessions", lease, subscription, session_ms, "more", *consumers)
        return list(answer[1])

    async def renew_all_sessions(
        self, lease: Lease, subscription: str, consumers: Sequence[str], session_ms: int = 10_000
    ) -> list[str]:
        """Renew the sessions of all consumers that are here; a new owner prolongs those of no others."""
        check_int("session_ms", session_ms, 1, MAX_MS)
        unknown, until = list[str](), ""
        for start in range(0, len(consumers) or 1, STEP):
            part = consumers[start : start + STEP]
            more = start + STEP < len(consumers)
            answer = await self.run(
                "renew_sessions", lease, subscription, session_ms, "more" if more else until, *part
            )
            unknown += answer[1]
            until = until or str(answer[2])
        return unknown

    async def prolong_sessions(self, lease: Lease, subscription: str, session_ms: int = 10_000) -> None:
        """Let no session end within `session_ms` whose consumer may be looking for the new owner."""
        check_int("session_ms", session_ms, 1, MAX_MS)
        done, until = 0, ""
        while not done:
            _, done, until = await self.run("prolong_sessions", lease, subscription, session_ms, STEP, until)

    async def leave(self, lease: Lease, subscription: str, consumer: str, *, crashed: bool = False) -> int:
        """Give back all that a consumer holds, uncharged unless it crashed; returns how many lanes."""
        return await self._leave(lease, subscription, consumer, "crashed" if crashed else "left")

    async def _leave(self, lease: Lease, subscription: str, consumer: str, how: str) -> int:
        check_name("consumer", consumer)
        released, done = 0, 0
        while not done:
            _, done, lanes, dead = await self.run("leave", lease, subscription, consumer, how, STEP)
            released += lanes
            self.note_dead(lease, subscription, dead)
            how = "ended"  # unless it has come back meanwhile
        if PLACE in subscription:
            await self.drop_unowed(lease.topic, lease.partition, subscription)
        return released

    async def list_leases(
        self, lease: Lease, subscription: str, consumer: str, *, at_ms: int | None = None
    ) -> list[Delivery]:
        """Return what a consumer holds, as it was delivered; for one that comes back under its name.

        The caller's clock shows `at_ms`: deadlines are by it instead of the partition's.
        """
        check_name("consumer", consumer)
        found: list[Any] = []
        retries: list[int] = []
        ledgers = ""
        to_do: list[tuple[str, str, str | int]] = [("0", "", "")]
        while to_do:
            position, lane, entry = to_do.pop()
            answer = await self.run("list_leases", lease, subscription, consumer, STEP, position, lane, entry)
            _, position, named, part, charged, now_ms, rest = answer
            if position != "0":
                to_do.append((position, "", ""))
            to_do += [("", lane, entry) for lane, entry in rows(rest, 2)]
            ledgers = merge_ledgers((ledgers, named))
            shift = now_ms - at_ms if at_ms is not None else 0
            part[4::5] = [deadline - shift for deadline in part[4::5]]
            found += part
            retries += charged
        # A scan may name a lane twice while others leave.
        held = list({row[:3]: row for row in rows(found, 5)}.values())
        ranges = [(row[2], row[3]) for row in held]
        parts, missing = await read_entries(self.store, self._tails.of(lease), lease, ledgers, ranges)
        if missing:
            await settle_missing(self, lease, subscription, missing)
        messages = as_messages(ledgers, ranges, parts, retries)
        abouts = [message.about for message in messages.values()]
        for place in reversed(addressed_to_others(subscription, abouts)):
            del messages[list(messages)[place]]  # a fetch that would have settled it was cut short
        return [
            Delivery(
                consumer,
                Receipt(lease.partition, lane, token, first, last),
                deadline,
                [messages[entry] for entry in range(first, last + 1) if entry in messages],
            )
            for lane, token, first, last, deadline in held
        ]
