"""`magnetar topics compact` and `compaction-status`: compaction of ordinary topics."""

import time
from typing import Annotated

import typer

from broker.cli.rest_commands import (
    DEFAULT_ADMIN,
    Admin,
    OrdinaryTopic,
    ask,
    asking,
    mapping,
    ordinary_path,
)

_POLL_S = 0.5


def _path(topic: str) -> str:
    """REST path of the compaction of an ordinary topic."""
    return f"{ordinary_path(topic)}/compaction"


@asking
def compact(
    topic: OrdinaryTopic,
    wait: Annotated[bool, typer.Option(help="Return when it is done")] = False,
    admin: Admin = DEFAULT_ADMIN,
) -> None:
    """Keep the newest message of each key of an ordinary topic, for readers that ask for it."""
    path = _path(topic)
    ask(admin, "PUT", path)
    while wait and mapping(ask(admin, "GET", path)).get("status") == "RUNNING":
        time.sleep(_POLL_S)
    if wait:
        _show(topic, admin)
    else:
        typer.echo(f"Compacting {topic}: see `magnetar topics compaction-status`.")


@asking
def status(topic: OrdinaryTopic, admin: Admin = DEFAULT_ADMIN) -> None:
    """Show how the last compaction of an ordinary topic went, since the topic was loaded."""
    _show(topic, admin)


def _show(topic: str, admin: Admin) -> None:
    found = mapping(ask(admin, "GET", _path(topic)))
    error = found.get("lastError")
    typer.echo(f"{topic}  {found.get('status')}" + (f"  {error}" if error else ""))
    if error:
        raise typer.Exit(1)


def add_compaction(group: typer.Typer) -> None:
    """Add the commands to the `topics` group."""
    group.command("compact")(compact)
    group.command("compaction-status")(status)
