"""Bodies that several messages have: a dead letter holds the entry that it was, while others are owed that.

Its name for the body says so:
`@orders:3:<incarnation>:<entry>:<incarnation of the subscription>.<note>/<name>`, and `@orders/<name>` where
it is the body's one owner. What is redriven with such a name, and fails again, has one name around the other.
When the dead letter goes, the entry is let go.
"""

from collections.abc import Callable, Sequence

from keylane.wire.about import INLINE, home_of
from keylane_broker.engine.values import Place
from keylane_broker.store.keys import partition_keys
from keylane_broker.store.store import Store

_AT_ONCE = 50  # entries in one call, which asks all subscriptions about each


async def let_go(
    store: Store, topic: str, names: Sequence[str], on_doomed: Callable[[str, int], None]
) -> dict[str, list[str]]:
    """Let go of what messages of a topic held that are gone; returns the bodies to delete, by topic.

    Where an entry is left that has the body, it is deleted with that: `on_doomed` hears where it may be so.
    """
    doomed: dict[str, list[str]] = {}
    held: dict[tuple[str, int, str], list[str]] = {}  # place and incarnation -> names
    handed_on: dict[str, list[str]] = {}  # topic -> names there, which may hold something in their turn
    for name in names:
        if name[:1] != "@" or name[1:2] in ("@", INLINE):
            doomed.setdefault(topic, []).append(home_of(topic, name)[1])
            continue
        owner, _, inner = name[1:].partition("/")
        if owner.count(":") == 4:
            home, number, incarnation, _, _ = owner.split(":")
            held.setdefault((home, int(number), incarnation), []).append(name)
        else:
            handed_on.setdefault(owner.partition(":")[0], []).append(inner)
    for (home, partition, incarnation), some in held.items():
        place: Place = home, partition
        for first in range(0, len(some), _AT_ONCE):
            left = await _release(store, place, incarnation, some[first : first + _AT_ONCE], on_doomed)
            handed_on.setdefault(home, []).extend(name.partition("/")[2] for name in left)
    for home, its_names in handed_on.items():
        for where, plain_names in (await let_go(store, home, its_names, on_doomed)).items():
            doomed.setdefault(where, []).extend(plain_names)
    return doomed


async def _release(
    store: Store, place: Place, incarnation: str, names: list[str], on_doomed: Callable[[str, int], None]
) -> list[str]:
    """Let go of entries of a partition; returns the names of bodies that are not deleted with these."""
    entries = [part for name in names for part in name[1:].partition("/")[0].split(":")[3:]]
    keys = partition_keys(*place).subscription("")
    answer = await store.run("subscription/release_held", keys, "", "", incarnation, *entries)
    if answer[0] != "OK":
        return names  # that topic is gone
    on_doomed(*place)
    orphans = set(map(str, answer[2]))
    return [name for name in names if name.split(":")[3] in orphans]
