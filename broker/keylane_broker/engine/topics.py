"""Creating, changing, listing and deleting topics."""

import msgspec

from keylane.errors import InvalidArgument, TopicExists
from keylane_broker.engine.answers import checked
from keylane_broker.engine.base import STEP, EngineBase
from keylane_broker.engine.codec import to_dict, to_flat
from keylane_broker.engine.settings import (
    check_topic_settings,
    partition_fields,
    topic_fields,
    topic_settings,
)
from keylane_broker.engine.values import TopicSettings
from keylane_broker.store.keys import (
    ALL_SUFFIXES,
    HOLDERS,
    TOPICS,
    PartitionKeys,
    check_name,
    partition_keys,
    records_key,
    topic_key,
)
from keylane_broker.store.store import Call


class TopicOperations(EngineBase):
    """Topics as a whole; this needs no partition lease."""

    async def create_topic(
        self, topic: str, settings: TopicSettings | None = None, *, exist_ok: bool = False
    ) -> TopicSettings:
        """Create a topic and its partitions; what a crash left half-created is finished first."""
        check_name("topic", topic)
        settings = settings or TopicSettings()
        check_topic_settings(settings)
        while True:
            fields, number = topic_fields(settings), str(await self.next_incarnation())
            answer = await self.store.run("topic/create", [topic_key(topic)], number, *to_flat(fields))
            registered = answer[0] == "OK"
            stored = to_dict(answer[1]) if not registered else {**fields, "incarnation": number}
            state, made = stored.get("state"), topic_settings(stored)
            if state == "deleting":
                await self._unmake_topic(topic, made)
                continue
            there = state == "ready" or await self._make_topic(topic, made)
            if there and not registered and not exist_ok:
                raise TopicExists(f"topic {topic!r} already exists; exist_ok accepts that")
            if there or registered:  # else it was deleted while we finished what another had begun
                return made

    async def _make_topic(self, topic: str, made: TopicSettings) -> bool:
        """List a topic and create its partitions; returns False, and leaves nothing, if it was deleted."""
        await self.store.read_all([("HSET", TOPICS, str(made.incarnation), topic)])
        fields = partition_fields(made)

        def create(_: int, keys: PartitionKeys) -> Call:
            return "partition/create", [keys.meta], [str(made.incarnation), *to_flat(fields)]

        key, number = topic_key(topic), str(made.incarnation)
        while True:
            answers = await self.in_partitions(topic, made.partitions, create)
            others = {answer[1] for answer in answers if answer[0] == "OTHER"}
            if not others:
                answer = await self.store.run("topic/transition", [key], "ready", number, "creating", "ready")
                if answer[0] == "OK":
                    return True
                break
            [(state, registered)] = await self.store.read_all([("HMGET", key, "state", "incarnation")])
            if state == "deleting" or registered != number:
                break
            # It was there when they were: they are of topics deleted before, whose makers came late.
            for other in others:
                await self._delete_partitions(topic, made.partitions, other)
        await self._unmake_topic(topic, made)
        return False

    async def change_topic(
        self,
        topic: str,
        *,
        journal: int | None = None,
        retention_ms: int | None = None,
        retention_bytes: int | None = None,
        ttl_ms: int | None = None,
        backlog_quota: int | None = None,
        backlog_quota_bytes: int | None = None,
        spread: int | None = None,
        dedupe_ms: int | None = None,
    ) -> TopicSettings:
        """Change settings of a topic, those that are not None; what is no longer retained goes."""
        given = {
            "journal": journal,
            "retention_ms": retention_ms,
            "retention_bytes": retention_bytes,
            "ttl_ms": ttl_ms,
            "backlog_quota": backlog_quota,
            "backlog_quota_bytes": backlog_quota_bytes,
            "spread": spread,
            "dedupe_ms": dedupe_ms,
        }
        changes = {name: value for name, value in given.items() if value is not None}
        about = await self.describe_topic(topic)
        wanted = msgspec.structs.replace(about, **changes)
        check_topic_settings(wanted)
        before = topic_fields(about)
        fields = {name: text for name, text in topic_fields(wanted).items() if text != before[name]}
        fields = fields or {"journal": before["journal"]}  # what a crash has left in partitions is mended
        answer = await self.store.run("topic/change", [topic_key(topic)], *to_flat(fields))
        if answer[0] == "NO_TOPIC":
            raise await self._no_topic(topic)
        made = topic_settings(to_dict(answer[1]))
        for_each = partition_fields(made)
        answers = await self.in_partitions(
            topic,
            made.partitions,
            lambda _, keys: (
                "partition/configure",
                [keys.meta, keys.journal, keys.retained],
                [for_each[name] for name in ("journal", "retain", "ttl_ms", "quota", "dedupe_ms")],
            ),
        )
        for partition, answer in enumerate(answers):
            if answer[-1] == 1:
                await self.drop_unowed(topic, partition)
        return made

    async def delete_topic(self, topic: str) -> None:
        """Delete a topic with all that is in it; whoever serves a partition of it is fenced."""
        check_name("topic", topic)
        listed = await self.store.fields(TOPICS)
        answer = await self.store.run(
            "topic/transition", [topic_key(topic)], "deleting", "", "creating", "ready", "deleting"
        )
        if answer[0] == "NO_TOPIC":
            for number in [number for number, name in listed.items() if name == topic]:
                await self.store.read_all([("HDEL", TOPICS, number)])  # a crash may have left it
        checked(answer, topic)
        await self._unmake_topic(topic, topic_settings(to_dict(answer[1])))

    async def _unmake_topic(self, topic: str, made: TopicSettings) -> None:
        """Delete what there is of a topic that is being deleted, and nothing of one created since."""
        number = str(made.incarnation)
        await self._delete_partitions(topic, made.partitions, number)
        await self.store.run("topic/delete", [topic_key(topic), records_key(topic)], number)
        await self.store.read_all([("HDEL", TOPICS, number)])

    async def _delete_partitions(self, topic: str, partitions: int, incarnation: str) -> None:
        """Delete partitions with all that is in them, except those of another topic of this name."""
        while await self._delete_step(topic, partitions, incarnation, STEP):
            pass  # each takes a part
        await self.delete_bodies(topic, partitions)
        await self._delete_step(topic, partitions, incarnation, 0)

    async def _delete_step(self, topic: str, partitions: int, incarnation: str, limit: int) -> bool:
        """Delete `limit` messages of each partition, if 0 empty lists of bodies; returns whether to go on."""
        answers = await self.in_partitions(
            topic,
            partitions,
            lambda _, keys: (
                "partition/delete",
                [
                    *keys,
                    keys.delayed,
                    keys.delayed_data,
                    keys.bodies,
                    keys.retained,
                    keys.expiring,
                    keys.overdue,
                ],
                [incarnation, limit, keys.subscription_prefix, HOLDERS, *ALL_SUFFIXES],
            ),
        )
        return any(answer[-1] == 1 for answer in answers)

    async def topics(self) -> list[str]:
        """Return the names of all topics, sorted, without those half-created or half-deleted."""
        [found] = await self.store.read_all([("HVALS", TOPICS)])
        names = sorted(set(found))
        states = await self.store.field_of_each([topic_key(name) for name in names])
        return [name for name, state in zip(names, states, strict=True) if state == "ready"]

    async def partition_counts(self) -> dict[str, int]:
        """Return how many partitions each topic has, without those half-created or half-deleted."""
        return {name: partitions for name, (partitions, _) in (await self.shapes()).items()}

    async def shapes(self) -> dict[str, tuple[int, int]]:
        """Return partitions and spread of each topic, without those half-created or half-deleted."""
        [found] = await self.store.read_all([("HVALS", TOPICS)])
        names = sorted(set(found))
        stored = await self.store.read_all(
            [("HMGET", topic_key(name), "state", "partitions", "spread") for name in names]
        )
        return {
            name: (int(partitions), int(spread or 1))
            for name, (state, partitions, spread) in zip(names, stored, strict=True)
            if state == "ready"
        }

    async def forget_topics(self) -> None:
        """Remove topics from the list whose creators crashed after the topic was deleted."""
        listed = await self.store.fields(TOPICS)
        newest: dict[str, int] = {}
        for number, name in listed.items():
            newest[name] = max(newest.get(name, 0), int(number))
        names = sorted(newest)
        states = dict(
            zip(names, await self.store.field_of_each([topic_key(name) for name in names]), strict=True)
        )
        for number, name in listed.items():  # a topic is there before it is listed, and longer
            if int(number) < newest[name] or states[name] is None:
                await self.store.read_all([("HDEL", TOPICS, number)])

    async def check_ledger(self, topic: str, partition: int, ledger: int) -> None:
        """Raise InvalidArgument for a ledger older than the partition, which is another topic's."""
        self.check_partition(topic, partition, (await self.describe_topic(topic)).partitions)
        [first] = await self.store.read_all([("HGET", partition_keys(topic, partition).meta, "first_epoch")])
        if first is None or ledger < int(first):
            raise InvalidArgument(
                f"ledger {ledger} is not of partition {partition} of {topic!r}, but of an earlier topic of "
                "that name: its messages are gone"
            )
