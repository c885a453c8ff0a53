"""`keylane dlq`: list, show, redrive and purge dead letters."""

from collections.abc import AsyncIterable, Callable, Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from keylane import DeadLetter
from keylane.commandline.output import UsageError, progress_bar
from keylane.errors import MessageNotFound
from keylane_broker.commandline.arguments import TopicArgument
from keylane_broker.commandline.command import BrokerRun, command
from keylane_broker.commandline.confirming import YesOption, can_ask, confirm
from keylane_broker.commandline.subscribe import body_fields

__all__ = ["dead_letters"]

dead_letters = typer.Typer(
    no_args_is_help=True, help="Dead letters: list, show, redrive and purge what has failed too often."
)

SubscriptionOption = Annotated[
    str | None, typer.Option("--subscription", help="Only those of this subscription.", show_default=False)
]
IdArguments = Annotated[
    list[str] | None,
    typer.Argument(metavar="ID", help="Only these, by their ids or those they had.", show_default=False),
]
IdOption = Annotated[
    list[str] | None,
    typer.Option("--id", help="The same; may be repeated.", show_default=False),
]
ReasonOption = Annotated[
    str | None, typer.Option(help="Only those whose reason contains this.", show_default=False)
]
KeyOption = Annotated[str | None, typer.Option(help="Only of this key.", show_default=False)]
AllOption = Annotated[bool, typer.Option("--all", help="All of them.")]


@command(dead_letters, "list")
async def list_dead_letters(
    run: BrokerRun,
    topic: TopicArgument,
    subscription: SubscriptionOption = None,
    reason: ReasonOption = None,
    key: KeyOption = None,
    limit: Annotated[int, typer.Option("--max", help="Maximum to show.", min=1)] = 100,
) -> None:
    """List the dead letters of a topic."""
    found: list[DeadLetter] = []
    async with run.client() as client:
        async for letter in client.dead_letters(topic, subscription, reason=reason, key=key):
            if len(found) == limit:
                if not run.json:
                    run.note(f"note: there are more; --max {limit} has shown the first {limit}")
                break
            found.append(letter)
    rows = [
        (one.id, one.subscription, one.key, one.retries, one.last_failed_at, one.reason[:80]) for one in found
    ]
    run.table(found, ["id", "subscription", "key", "retries", "failed", "reason"], rows)


@command(dead_letters, "show")
async def show(
    run: BrokerRun,
    topic: TopicArgument,
    id: Annotated[str, typer.Argument(metavar="ID", help="Its id, or its original id.", show_default=False)],
) -> None:
    """Show a dead letter: its history, its attributes and its body."""
    async with run.client() as client:
        async for letter in client.dead_letters(topic, ids=[id]):
            bodies = await client.bodies(letter.dead_letter_topic, [letter.body] if letter.body else [])
            body = bodies[0] if bodies else b""
            text = "(missing)" if body is None else body.decode(errors="backslashreplace")
            data = body_fields(body) if run.json else {"data": text}
            run.properties({**{name: getattr(letter, name) for name in letter.__struct_fields__}, **data})
            return
    raise MessageNotFound(f"no dead letter {id!r} of topic {topic!r}")


@command(dead_letters, "redrive")
async def redrive(
    run: BrokerRun,
    topic: TopicArgument,
    ids: IdArguments = None,
    subscription: SubscriptionOption = None,
    id: IdOption = None,
    reason: ReasonOption = None,
    key: KeyOption = None,
    every: AllOption = False,
) -> None:
    """Redrive dead letters: send them back to the subscriptions that they failed in."""
    chosen = [*(ids or []), *(id or [])] or None
    _check_choice("redrive", every, subscription, chosen, reason, key)
    async with run.client() as client:
        with _progress(run, "redriven") as tell:
            count = await client.redrive(
                topic, subscription=subscription, ids=chosen, reason=reason, key=key, progress=tell
            )
        left = client.dead_letters(topic, subscription, ids=chosen, reason=reason, key=key)
        why = "" if count else await _why_none(left)
    run.say({"topic": topic, "redriven": count}, f"{count} dead letters of {topic!r} redriven{why}")


async def _why_none(left: AsyncIterable[DeadLetter]) -> str:
    """Return why there are dead letters of which none was redriven, if there are any."""
    async for letter in left:
        return (
            f": {letter.id} stays, for one. A consumer of {letter.dead_letter_topic!r} has it, it has failed "
            f"there again, the subscription is multicast and has no consumer {letter.consumer!r}, "
            f"or there is no subscription {letter.subscription!r} of {letter.topic!r}"
        )
    return ""


@command(dead_letters, "purge")
async def purge(
    run: BrokerRun,
    topic: TopicArgument,
    ids: IdArguments = None,
    subscription: SubscriptionOption = None,
    id: IdOption = None,
    reason: ReasonOption = None,
    key: KeyOption = None,
    every: AllOption = False,
    yes: YesOption = False,
) -> None:
    """Purge dead letters: delete them with their bodies, for good; at a terminal it asks first."""
    chosen = [*(ids or []), *(id or [])] or None
    _check_choice("purge", every, subscription, chosen, reason, key)
    if not yes and can_ask(run):
        await confirm(run, f"Purge {'all' if every else 'these'} dead letters of {topic!r}?")
    async with run.client() as client:
        with _progress(run, "purged") as tell:
            count = await client.purge_dead_letters(
                topic, subscription=subscription, ids=chosen, reason=reason, key=key, progress=tell
            )
    run.say({"topic": topic, "purged": count}, f"{count} dead letters of {topic!r} purged")


def _check_choice(what: str, every: bool, *chosen: object) -> None:
    if every == any(chosen):
        raise UsageError(
            f"which ones? {what} takes --all, or ids, --reason, --key and --subscription: all must fit"
        )


@contextmanager
def _progress(run: BrokerRun, word: str) -> Iterator[Callable[[int], None]]:
    """Show people how far it is."""
    if run.json:
        yield lambda _: None
        return
    with progress_bar() as bar:
        task = bar.add_task(word, total=None)
        yield lambda count: bar.update(task, completed=count)
