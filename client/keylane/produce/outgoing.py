"""Messages on their way out: checked, described, and sorted by partition."""

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from keylane import ksuid
from keylane.errors import InvalidArgument, MessageTooLarge
from keylane.times import instant_ms, milliseconds, now_ms
from keylane.types import Body, OutgoingMessage
from keylane.wire import MAX_ABOUT, MAX_KEY, MAX_UID, pack_about, partition_of, with_body

MAX_PRIORITY = 9


class StoredBody(bytes):
    """A body that the payload store has already, under a name that is a KSUID: only its length is here."""

    name: str
    _size: int

    @classmethod
    def of(cls, name: str, size: int) -> "StoredBody":
        """Return what stands for it."""
        body = cls()
        body.name, body._size = name, size
        return body

    def __len__(self) -> int:
        return self._size

    def __bool__(self) -> bool:
        return self._size > 0


class GroupedMessage(OutgoingMessage, frozen=True):
    """A message with a producer group of its own, "" for none: a worker publishes on behalf of many."""

    producer_group: str = ""


def with_durability(messages: Iterable[OutgoingMessage], durability: str | None) -> Iterable[OutgoingMessage]:
    """Return messages, those that do not say a durability with this one; a sequence stays one."""
    if durability is None or not isinstance(messages, Iterable):
        return messages

    def given(message: OutgoingMessage) -> OutgoingMessage:
        if not isinstance(message, OutgoingMessage) or message.durability is not None:
            return message
        return msgspec.structs.replace(message, durability=durability)

    return list(map(given, messages)) if isinstance(messages, Sequence) else map(given, messages)


class Slice:
    """Messages of one call for one partition and durability, and their places in the call.

    The slices of a partition are in the order of the call; what is for later is in slices of its own.
    """

    __slots__ = (
        "bodies",
        "dues",
        "durability",
        "extras",
        "flat",
        "incarnation",
        "named",
        "partition",
        "places",
        "text",
    )

    def __init__(self, partition: int, durability: str) -> None:
        self.partition = partition
        self.durability = durability
        self.dues: list[int] = []  # when each is due, by the cluster's clock; empty for now
        self.flat: list[str] = []
        self.bodies: dict[int, tuple[str, bytes]] = {}
        self.extras: dict[int, tuple[int, int]] = {}  # when it expires, by the cluster's clock; its priority
        self.places: list[int] = []
        self.text = 0  # characters, when they have been counted
        self.named = False  # with uids that somebody chose: who publishes one again need not be this producer
        self.incarnation = 0  # of the topic by whose number of partitions they were placed


def sort(messages: Sequence[OutgoingMessage], count: int, group: str, drift: float = 0.0) -> list[Slice]:
    """Messages by partition and durability, with uids, and with the text that describes them.

    The cluster's clock is `drift` seconds ahead of ours.
    """
    try:
        return _sort(messages, count, group, drift)
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"a message has text that is not valid Unicode: {error}") from error
    except AttributeError:
        raise _unusable(messages) from None


def sort_one(message: OutgoingMessage, count: int, group: str, drift: float = 0.0) -> Slice:
    """Do what `sort` does for the only message of a call."""
    if (
        message.partition is not None
        or message.data is not None
        or message.attributes
        or _is_special(message)
    ):
        (item,) = sort([message], count, group, drift)
        return item
    key, uid = message.key or "", message.uid
    if not key and message.key is not None:
        raise _empty_key(message.key)
    if uid is None:
        (uid,) = ksuid.take(1, drift)
    elif not uid:
        raise _empty_uid(uid)
    try:
        partition = partition_of(key or uid, count)
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"a message has text that is not valid Unicode: {error}") from error
    except AttributeError:
        raise _unusable([message]) from None
    item = Slice(partition, "memory" if message.durability is None else message.durability)
    item.named = message.uid is not None
    item.flat = [key, uid, pack_about(now_ms(), group)]
    item.places.append(0)
    return item


def _unusable(messages: Sequence[OutgoingMessage]) -> InvalidArgument:
    """Return why messages of the wrong type cannot be published."""
    for message in messages:
        if not isinstance(message, OutgoingMessage):
            return InvalidArgument(f"a message is {message!r:.80}: use OutgoingMessage(data, key=…)")
        for what, value in (("key", message.key), ("uid", message.uid)):
            if not isinstance(value, str | None):
                return InvalidArgument(f"{what} is {value!r:.80}: use text")
    return InvalidArgument("a message has a field of the wrong type")


def _empty_key(key: object) -> InvalidArgument:
    """Return why a key cannot be empty: on the wire that is no key, which has no lane and no order."""
    return InvalidArgument(f"key is {key!r}: use None for a message without a key, or non-empty text")


def _empty_uid(uid: object) -> InvalidArgument:
    """Return why a uid cannot be empty: all that have it would be one message."""
    return InvalidArgument(f"uid is {uid!r}: omit it to have one generated, or use non-empty text")


def _is_special(message: OutgoingMessage) -> bool:
    return _is_later(message) or _has_extras(message)


def _is_later(message: OutgoingMessage) -> bool:
    """Whether it is delayed; by 0 it is not, and has its id at once."""
    return bool(message.delay) or message.deliver_at is not None


def _has_extras(message: OutgoingMessage) -> bool:
    return message.ttl is not None or message.expires_at is not None or message.priority is not None


def _extras(message: OutgoingMessage, now: float) -> tuple[int, int]:
    """Return when a message expires, in ms, 0 where it does not say; and its priority."""
    priority = message.priority or 0
    if type(priority) is not int or not 0 <= priority <= MAX_PRIORITY:
        raise InvalidArgument(f"priority is {priority!r:.60}: use a number from 0 to {MAX_PRIORITY}")
    if message.ttl is None:
        return instant_ms("expires_at", message.expires_at) or 0, priority
    if message.expires_at is not None:
        raise InvalidArgument("a message has both ttl and expires_at: use one")
    return round(now) + (milliseconds("ttl", message.ttl) or 0), priority


def _due(message: OutgoingMessage, now: float) -> int:
    """Return when a delayed message is due, in ms."""
    if message.delay is None:
        return instant_ms("deliver_at", message.deliver_at) or 0
    if message.deliver_at is not None:
        raise InvalidArgument("a message has both delay and deliver_at: use one")
    return round(now) + (milliseconds("delay", message.delay) or 0)


def _sort(messages: Sequence[OutgoingMessage], count: int, group: str, drift: float) -> list[Slice]:
    now = now_ms()
    uids = ksuid.take(len(messages), drift)
    sticky = partition_of(uids[0], count) if uids else 0
    slices: list[Slice] = []
    open_slices: dict[tuple[int, bool], Slice] = {}  # the newest of a partition, for now and for later
    abouts: dict[int, str] = {}  # by size of the body, while attributes and group are the same
    same: Mapping[str, str] | None = None
    whose = group
    for place, message in enumerate(messages):
        uid, key = message.uid, message.key
        if not key and key is not None:
            raise _empty_key(key)
        if not uid and uid is not None:
            raise _empty_uid(uid)
        name = uids[place]
        if message.partition is not None:
            partition = check_partition(message.partition, count)
        elif key or uid:
            partition = partition_of(key or uid or "", count)
        else:
            partition = sticky
        if message.attributes is not same and message.attributes != same:
            same = message.attributes
            abouts = {}
        own = message.producer_group if isinstance(message, GroupedMessage) else group
        if own != whose:
            whose = own
            abouts = {}
        body = b"" if message.data is None else _bytes_of(message.data)
        size = len(body)
        if type(body) is StoredBody:
            name = body.name
        if uid and body:  # it may be a duplicate: the name of its body must not be that of the first
            about = pack_about(now, whose, texts(same), size=size, body=name)
        elif (known := abouts.get(size)) is not None:
            about = known
        else:
            about = abouts[size] = pack_about(now, whose, texts(same), size=size)
        durability = "memory" if message.durability is None else message.durability
        later = _is_later(message)
        item = open_slices.get((partition, later))
        if item is None or item.durability != durability or item.named != (uid is not None):
            item = open_slices[partition, later] = Slice(partition, durability)
            item.named = uid is not None
            slices.append(item)
        if later:
            item.dues.append(_due(message, now + drift * 1000))
        if message.ttl is not None or message.expires_at is not None or message.priority is not None:
            item.extras[len(item.places)] = _extras(message, item.dues[-1] if later else now + drift * 1000)
        if body:
            item.bodies[len(item.places)] = (name, body)
        item.flat += (key or "", uid or name, about)
        item.places.append(place)
    return slices


def _bytes_of(data: Body) -> bytes:
    if isinstance(data, bytes):
        return data
    if isinstance(data, str):
        return data.encode()
    if isinstance(data, bytearray | memoryview):
        return bytes(data)
    raise InvalidArgument(f"data is {type(data).__name__}: use bytes or str")


def texts(attributes: Mapping[str, str] | None) -> dict[str, str] | None:
    """Attributes as they are sent, None for none; InvalidArgument unless all of them is text."""
    if not attributes:
        return None
    if not isinstance(attributes, Mapping):
        raise InvalidArgument(f"attributes is {attributes!r:.80}: use a dict of str to str")
    found = dict(attributes)
    for name, value in found.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise InvalidArgument(f"attribute {name!r} is {value!r}: names and values must be str")
    return found


def check_partition(partition: int, count: int) -> int:
    """Return a given partition. Raises InvalidArgument if the topic has no such partition."""
    if type(partition) is not int:
        raise InvalidArgument(f"partition is {partition!r:.60}: use a number from 0 to {count - 1}")
    if not 0 <= partition < count:
        raise InvalidArgument(f"partition {partition!r} is out of range: the topic has 0 to {count - 1}")
    return partition


def put_inline(item: Slice, limit: int) -> None:
    """Put bodies of up to so many bytes into what is said about their messages: no store has to have them."""
    for place, (_, body) in list(item.bodies.items()):
        if len(body) <= limit and type(body) is not StoredBody:
            about = with_body(item.flat[place * 3 + 2], body)
            if about is not None:
                item.flat[place * 3 + 2] = about
                del item.bodies[place]


def check_texts(flat: list[str]) -> None:
    """Refuse here what the broker would refuse, together with all else in the same frame."""
    if len(flat) == 3 and _is_harmless(*flat):
        return  # a short message, as most that come alone are
    for column, limit, what in ((0, MAX_KEY, "key"), (1, MAX_UID, "uid"), (2, MAX_ABOUT, "attributes")):
        texts = flat[column::3]
        try:
            # A character has at most four bytes: mostly a look at the longest text is enough.
            if max(map(len, texts)) * 4 > limit:
                longest = max(len(text.encode()) for text in texts)
                if longest > limit:
                    raise MessageTooLarge(
                        f"{longest} bytes in a message's {what}; at most {limit} are allowed"
                    )
            joined = "".join(texts)
            if not joined.isascii():
                joined.encode()
        except UnicodeEncodeError as error:
            raise InvalidArgument(f"not Unicode text in a message's {what}: {error}") from error
        except TypeError as error:
            raise InvalidArgument(f"not text in a message's {what}: {error}") from error
        if column == 0 and "\0" in joined:
            raise InvalidArgument("a message's key has a NUL character")


def _is_harmless(key: object, uid: object, about: str) -> bool:
    if not isinstance(key, str) or not isinstance(uid, str):
        return False
    joined = key + uid + about
    return len(joined) < MAX_UID and joined.isascii() and "\0" not in key
