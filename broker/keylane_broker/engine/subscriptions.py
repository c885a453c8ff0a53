"""Subscriptions as a whole: a record beside the topic says how far each is made or deleted.

A subscription is made and deleted partition by partition. Whoever comes next finishes what a crash, or
somebody who is still at it, has left: the record has all that it takes, and is changed only by those who know
it as it is.
"""

from datetime import datetime
from typing import Any

import msgspec

from keylane.errors import (
    InvalidArgument,
    SubscriptionExists,
    SubscriptionNotFound,
    TopicNotFound,
    did_you_mean,
)
from keylane_broker.engine.answers import checked
from keylane_broker.engine.base import EngineBase
from keylane_broker.engine.checks import place_of
from keylane_broker.engine.codec import to_flat
from keylane_broker.engine.settings import (
    check_dead_letter,
    check_subscription_settings,
    next_topic,
    subscription_fields,
    subscription_settings,
)
from keylane_broker.engine.values import SubscriptionSettings, TopicSettings
from keylane_broker.store.keys import (
    PLACE,
    PartitionKeys,
    check_name,
    partition_keys,
    records_key,
    subscription_keys,
    topic_key,
)
from keylane_broker.store.store import Call, Store


class SubscriptionRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is known of a subscription as a whole: its state is creating, ready or deleting."""

    state: str
    incarnation: int
    settings: dict[str, str]
    start: str  # "latest", "earliest", "time" or "entry"
    at: int | str = ""  # ms, or an entry
    partition: int | None = None  # that `start` is about: the others start at the end

    @property
    def text(self) -> str:
        """As it is stored."""
        return msgspec.json.encode(self).decode()

    @property
    def as_settings(self) -> SubscriptionSettings:
        """What it was made with."""
        settings = subscription_settings(self.settings)
        return msgspec.structs.replace(settings, incarnation=self.incarnation)


_decode = msgspec.json.Decoder(SubscriptionRecord).decode


def check_same(topic: str, name: str, there: SubscriptionSettings, asked: SubscriptionSettings) -> None:
    """Raise SubscriptionExists, saying what differs, where a subscription is not as somebody asks for it."""
    differences = [
        (what, before, wanted)
        for what, before, wanted in (
            ("mode", there.mode, asked.mode),
            ("keys", there.filter.keys, asked.filter.keys),
            ("filter", there.filter.filter, asked.filter.filter),
        )
        if before != wanted
    ]
    for what, before, wanted in differences:
        raise SubscriptionExists(
            f"subscription {name!r} of {topic!r} has {what} {before}, not {wanted}: "
            f"use what it has, or another subscription"
        )


async def read_records(store: Store, topic: str) -> dict[str, SubscriptionRecord]:
    """Return the records of all subscriptions of a topic, by name."""
    found = await store.fields(records_key(topic))
    return {name: _decode(text) for name, text in sorted(found.items())}


class SubscriptionOperations(EngineBase):
    """Subscriptions as a whole; this needs no partition lease."""

    async def create_subscription(
        self,
        topic: str,
        name: str,
        settings: SubscriptionSettings | None = None,
        *,
        start: str | int | datetime = "latest",
        partition: int | None = None,
        exist_ok: bool = False,
    ) -> None:
        """Create a subscription on every partition; an existing one is left as it is, and repaired.

        `start` is "latest", "earliest", an entry number (inclusive) or an aware datetime; with `partition` it
        is about that one, and the others start at the end.
        """
        check_name("subscription", name)
        settings = settings or SubscriptionSettings()
        check_subscription_settings(settings)
        check_dead_letter(topic, settings)
        if settings.mode == "multicast" and start != "latest":
            raise InvalidArgument(
                f"start {start!r:.40}: use 'latest': a multicast consumer begins when it registers"
            )
        fields = subscription_fields(settings)
        kind, at = place_of(start)
        about = await self.describe_topic(topic)
        self.check_partition(topic, partition, about.partitions)
        record = SubscriptionRecord("creating", await self.next_incarnation(), fields, kind, at, partition)
        if await self._record(topic, name) is None:
            await self._check_cycle(topic, settings)
        while not await self._change(topic, about, name, "", record.text):
            found = await self._finish(topic, name)
            about = await self.describe_topic(topic)
            if found is None:
                continue  # it was being deleted, or the topic was
            await self.mend_subscription(topic, name)
            check_same(topic, name, found.as_settings, settings)
            if not exist_ok:
                raise SubscriptionExists(
                    f"subscription {name!r} of {topic!r} already exists; exist_ok accepts that"
                )
            return
        try:
            await self._check_cycle(topic, settings)  # once more: another may have been made meanwhile
        except InvalidArgument:
            await self.delete_subscription(topic, name)
            raise
        await self._finish(topic, name)

    async def mend_subscription(self, topic: str, name: str) -> bool:
        """Create a subscription in partitions that have lost it; returns False if it does not exist.

        On a cluster the record is not where the partitions are: when one of these nodes fails over and loses
        what was written last, and the others do not, only some know of a subscription that is ready.
        """
        about = await self.describe_topic(topic)
        record = await self._record(topic, name)
        if record is not None and record.state == "ready":
            after = await self._make_everywhere(topic, about, name, record)
            if after == record.text:
                return True
            await self._change(topic, about, name, record.text, after)
        return await self._finish(topic, name) is not None

    async def delete_subscription(self, topic: str, name: str) -> None:
        """Delete a subscription, and from the log what was owed to it alone."""
        check_name("subscription", name)
        while True:
            about = await self.describe_topic(topic)
            record = await self._record(topic, name)
            if record is None:
                raise await self._not_found(topic, name)
            deleting = msgspec.structs.replace(record, state="deleting")
            if record == deleting or await self._change(topic, about, name, record.text, deleting.text):
                await self._finish(topic, name)
                return

    async def change_subscription(self, topic: str, name: str, changes: dict[str, Any]) -> None:
        """Give a subscription other settings, by their names in SubscriptionSettings.

        Partition by partition: whoever comes next finishes what a crash has left.
        """
        while True:
            settings = msgspec.structs.replace(await self.describe_subscription(topic, name), **changes)
            check_subscription_settings(settings)
            check_dead_letter(topic, settings)
            await self._check_cycle(topic, settings)
            about, record = await self.describe_topic(topic), await self._record(topic, name)
            if record is None or record.state != "ready":
                continue
            changed = msgspec.structs.replace(
                record, state="creating", settings=subscription_fields(settings)
            )
            if await self._change(topic, about, name, record.text, changed.text):
                try:
                    await self._check_cycle(topic, settings)  # as above
                except InvalidArgument:
                    before = msgspec.structs.replace(record, state="creating").text
                    ready = msgspec.structs.replace(changed, state="ready").text
                    if not await self._change(topic, about, name, changed.text, before):
                        await self._change(topic, about, name, ready, before)  # somebody has finished it
                    await self._finish(topic, name)
                    raise
                await self._finish(topic, name)
                return

    async def _check_cycle(self, topic: str, settings: SubscriptionSettings) -> None:
        """Raise InvalidArgument where what fails would come back by the dead letters of other topics.

        Once more when they are stored: of two that are asked for at once each sees the other then.
        """
        first = next_topic(topic, settings)
        ways = {first: [topic, first]} if first else {}  # topic -> how dead letters get there
        ahead = list(ways)
        for here in ahead:
            for record in (await read_records(self.store, here)).values():
                to = next_topic(here, record.as_settings) if record.state != "deleting" else None
                if to == topic:
                    way = " to ".join(map(repr, [*ways[here], topic]))
                    raise InvalidArgument(
                        f"dead letters would go round from {way}: what fails would come back without end; "
                        "use another dead_letter topic, or no max_retries"
                    )
                if to is not None and to not in ways:
                    ways[to] = [*ways[here], to]
                    ahead.append(to)

    async def describe_subscription(self, topic: str, name: str) -> SubscriptionSettings:
        """Return a subscription's settings; one that is half-created is finished."""
        check_name("topic", topic)
        check_name("subscription", name)
        commands = [("HGET", topic_key(topic), "state"), ("HGET", records_key(topic), name)]
        state, text = await self.store.read_all(commands)
        record = _decode(text) if text else None
        if state != "ready" or record is None or record.state != "ready":
            record = await self._finish(topic, name)
        if record is None:
            raise await self._not_found(topic, name)
        return record.as_settings

    async def subscriptions(self, topic: str) -> list[str]:
        """Return the names of a topic's subscriptions, sorted, without those half-created or half-deleted."""
        records = await read_records(self.store, topic)
        return [name for name, record in records.items() if record.state == "ready"]

    async def pause_subscription(self, topic: str, name: str, paused: bool) -> None:
        """Stop a subscription's deliveries on every partition, or let them go on."""
        check_name("subscription", name)
        answers = await self.in_partitions(
            topic,
            (await self.describe_topic(topic)).partitions,
            lambda _, keys: (
                "subscription/pause",
                keys.subscription(name),
                ["", name, "1" if paused else ""],
            ),
        )
        for answer in answers:
            if answer[0] == "BY_POSITION":
                raise InvalidArgument(
                    f"subscription {name!r} of {topic!r} is read by position and has no deliveries "
                    "to pause; stop its reader instead"
                )
            checked(answer, topic, name)

    async def seek(
        self, topic: str, name: str, position: str | int | datetime, partition: int | None = None
    ) -> None:
        """Move a subscription, on one partition or all; leases and retry counts end.

        `position` is as in create_subscription; an entry number needs its partition.
        """
        if isinstance(position, int) and partition is None:
            raise InvalidArgument("seeking to an entry needs a partition")
        check_name("topic", topic)
        kind, value = place_of(position)
        count = (await self.describe_topic(topic)).partitions
        self.check_partition(topic, partition, count)
        for number in range(count) if partition is None else (partition,):
            keys = subscription_keys(topic, number, name)
            answer = await self.store.run("subscription/seek", keys, "", name, kind, value)
            checked(answer, topic, name, partition=number)
            await self.compare(topic, number, name)
            await self.drop_unowed(topic, number, name)

    async def compare(self, topic: str, partition: int, name: str) -> None:
        """Look through a log for what a filtered subscription is owed, step by step."""
        while await self.compare_some(topic, partition, name):
            pass

    async def compare_all(self, topic: str, partition: int) -> None:
        """Do that for all filtered subscriptions of a partition."""
        for name in await self.store.command("HKEYS", partition_keys(topic, partition).filters):
            await self.compare(topic, partition, name)

    async def _not_found(self, topic: str, name: str) -> SubscriptionNotFound:
        others = await self.subscriptions(topic)
        return SubscriptionNotFound(f"no subscription {name!r} on {topic!r}{did_you_mean(name, others)}")

    async def _record(self, topic: str, name: str) -> SubscriptionRecord | None:
        [text] = await self.store.read_all([("HGET", records_key(topic), name)])
        return _decode(text) if text else None

    async def _change(self, topic: str, about: TopicSettings, name: str, before: str, after: str) -> bool:
        """Change a record; returns False if the record or the topic is not as it was read."""
        keys = [topic_key(topic), records_key(topic)]
        answer = await self.store.run("topic/record", keys, str(about.incarnation), name, before, after)
        return bool(answer[0] == "OK")

    async def _finish(self, topic: str, name: str) -> SubscriptionRecord | None:
        """Finish creating or deleting a subscription; returns its record then."""
        while True:
            about = await self.describe_topic(topic)
            record = await self._record(topic, name)
            if record is None or record.state == "ready":
                return record
            step = self._make_everywhere if record.state == "creating" else self._delete_everywhere
            after = await step(topic, about, name, record)
            await self._change(topic, about, name, record.text, after)

    async def _make_everywhere(
        self, topic: str, about: TopicSettings, name: str, record: SubscriptionRecord
    ) -> str:
        """Create it in every partition where it is missing; returns its next record."""

        def call(partition: int, keys: PartitionKeys) -> Call:
            here = record.partition in (None, partition)
            place = [record.start, record.at] if here else ["latest", ""]
            numbers = [str(about.incarnation), str(record.incarnation)]
            settings = dict(record.settings)
            arguments = ["", name, *numbers, *place, settings.pop("filter", ""), *to_flat(settings)]
            return "subscription/create", keys.subscription(name), arguments

        if record.settings["mode"] == "multicast":  # its consumers make their places when they come
            return msgspec.structs.replace(record, state="ready").text
        answers = await self.in_partitions(topic, about.partitions, call)
        await self._check_there(topic, about, answers)
        if record.settings.get("filter") and record.start != "latest":
            for partition, answer in enumerate(answers):
                if answer[0] in ("OK", "EXISTS"):
                    await self.compare(topic, partition, name)
        if {answer[0] for answer in answers} <= {"OK", "EXISTS"}:
            return msgspec.structs.replace(record, state="ready").text
        # Another was deleted meanwhile whose number is larger: a new one, and once more.
        return msgspec.structs.replace(
            record, state="creating", incarnation=await self.next_incarnation()
        ).text

    async def _delete_everywhere(
        self, topic: str, about: TopicSettings, name: str, record: SubscriptionRecord
    ) -> str:
        """Delete it in every partition, with what was owed to it alone; returns no next record."""
        numbers = [str(about.incarnation), str(record.incarnation)]
        answers = await self.in_partitions(
            topic,
            about.partitions,
            lambda _, keys: ("subscription/delete", keys.subscription(name), ["", name, *numbers]),
        )
        await self._check_there(topic, about, answers)
        for partition, answer in enumerate(answers):
            if record.settings["mode"] == "multicast":
                await self._delete_places(topic, partition, name, numbers)
            if answer[0] == "OK" and answer[1]:
                await self.drop_unowed(topic, partition, name)
        return ""

    async def places(self, topic: str, partition: int, name: str) -> list[str]:
        """Return the names of the places that consumers have in a multicast subscription."""
        found = await self.store.command("HKEYS", partition_keys(topic, partition).subs)
        return sorted(place for place in found if place.startswith(name + PLACE))

    async def _delete_places(self, topic: str, partition: int, name: str, numbers: list[str]) -> None:
        for place in await self.places(topic, partition, name):
            keys = subscription_keys(topic, partition, place)
            await self.store.run("subscription/delete", keys, "", place, *numbers)
            await self.drop_unowed(topic, partition, place)

    async def _check_there(self, topic: str, about: TopicSettings, answers: list[list[Any]]) -> None:
        """Raise unless all partitions exist, or the topic is another one by now."""
        missing = [number for number, answer in enumerate(answers) if answer[0] == "NO_TOPIC"]
        if missing and (await self.describe_topic(topic)).incarnation == about.incarnation:
            raise TopicNotFound(
                f"partition {missing[0]} of topic {topic!r} is missing: its keys were lost or deleted by "
                "hand. Delete the topic and create it again"
            )
