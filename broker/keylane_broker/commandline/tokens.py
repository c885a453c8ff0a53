"""`keylane token`: who is let in."""

from typing import Annotated

import typer

from keylane.types import TokenInfo
from keylane_broker.commandline.command import BrokerRun, command

__all__ = ["tokens"]

tokens = typer.Typer(no_args_is_help=True, help="Create, list and revoke tokens.")


@command(tokens, "create")
async def create(
    run: BrokerRun,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Whose token it is.", show_default=False)],
    allow: Annotated[
        list[str],
        typer.Option(
            metavar="ACTION:TOPICS",
            help="Permission, such as produce:orders.*; actions are produce, consume, observe and admin.",
            show_default=False,
        ),
    ],
    lifetime: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="How long it is valid.", min=1, show_default="for ever"),
    ] = None,
) -> None:
    """Create a token. It is shown once: the broker keeps only a hash."""
    async with run.client() as client:
        made = await client.create_token(name, allow, lifetime=lifetime)
    run.say({"id": made.id, "token": made.token}, made.token)


@command(tokens, "list")
async def list_tokens(run: BrokerRun) -> None:
    """List tokens, without their secrets."""
    async with run.client() as client:
        found = await client.tokens()
    run.table(found, ("id", "name", "allows", "created", "expires"), [_row(one) for one in found])


@command(tokens, "revoke")
async def revoke(
    run: BrokerRun,
    id: Annotated[
        str, typer.Argument(metavar="ID", help="As `keylane token list` shows it.", show_default=False)
    ],
) -> None:
    """Revoke a token; whoever uses it is disconnected within seconds."""
    async with run.client() as client:
        await client.revoke_token(id)
    run.say({"id": id, "revoked": True}, f"token {id} counts no more")


def _row(one: TokenInfo) -> tuple[str, ...]:
    expires = "never" if one.expires_at is None else f"{one.expires_at:%Y-%m-%d %H:%M}"
    return one.id, one.name, " ".join(one.allow), f"{one.created_at:%Y-%m-%d %H:%M}", expires
