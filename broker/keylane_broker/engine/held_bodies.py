"""Bodies that several messages have: a dead letter holds the entry that it was, while others are owed that.

Its name for the body says so:
`@orders:3:<incarnation>:<entry>:<incarnation of the subscription>.<note>/<name>`, and `@orders/<name>` where
it is the body's one owner. When the dead letter goes, the entry is let go.
"""

from collections.abc import Callable, Sequence

from keylane.wire.about import home_of
from keylane_broker.engine.values import Place
from keylane_broker.store.keys import partition_keys
from keylane_broker.store.store import Store


async def let_go(
    store: Store, topic: str, names: Sequence[str], on_doomed: Callable[[str, int], None]
) -> dict[str, list[str]]:
    """Let go of what messages of a topic held that are gone; returns the bodies to delete, by topic.

    Where an entry is left that has the body, it is deleted with that: `on_doomed` hears where it may be so.
    """
    doomed: dict[str, list[str]] = {}
    held: dict[tuple[str, int, str], list[str]] = {}  # place and incarnation -> names
    for name in names:
        owner = name[1:].partition("/")[0].split(":") if name[:1] == "@" and name[:2] != "@@" else []
        if len(owner) == 5:
            held.setdefault((owner[0], int(owner[1]), owner[2]), []).append(name)
        else:
            home, plain = home_of(topic, name)
            doomed.setdefault(home, []).append(plain)
    for (home, number, incarnation), some in held.items():
        place: Place = home, number
        entries = [part for name in some for part in name[1:].partition("/")[0].split(":")[3:]]
        answer = await store.run(
            "subscription/release_held",
            partition_keys(*place).subscription(""),
            "",
            "",
            incarnation,
            *entries,
        )
        left = some  # if that topic is gone
        if answer[0] == "OK":
            on_doomed(*place)
            orphans = set(map(str, answer[2]))
            left = [name for name in some if name.split(":")[3] in orphans]
        for name in left:
            inner = await let_go(store, home, [name.partition("/")[2]], on_doomed)
            for where, plain_names in inner.items():
                doomed.setdefault(where, []).extend(plain_names)
    return doomed
