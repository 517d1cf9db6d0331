"""`magnetar topics skip`, `truncate`, `analyze-backlog`, `subscription-properties`, over REST.

They are for ordinary topics.  For those of scalable topics see `/admin/v2/scalable`.
"""

from typing import Annotated
from urllib.parse import quote

import typer

from broker.cli.rest_commands import (
    DEFAULT_ADMIN,
    Admin,
    OrdinaryTopic,
    ask,
    asking,
    mapping,
    ordinary_path,
    printable,
)

SubscriptionArgument = Annotated[str, typer.Argument(help="Name of the subscription")]


def _path(topic: str, subscription: str) -> str:
    return f"{ordinary_path(topic)}/subscription/{quote(subscription, safe='')}"


@asking
def skip(
    topic: OrdinaryTopic,
    subscription: SubscriptionArgument,
    count: Annotated[
        int | None, typer.Option("--count", "-n", min=1, help="Oldest entries; without it all")
    ] = None,
    admin: Admin = DEFAULT_ADMIN,
) -> None:
    """Count the oldest messages of a subscription as acknowledged; a batch is one entry."""
    path = _path(topic, subscription)
    ask(admin, "POST", f"{path}/skip_all" if count is None else f"{path}/skip/{count}")
    skipped = "all messages" if count is None else f"at most {count} entries"
    typer.echo(f"Skipped {skipped} of {subscription} on {topic}.")


@asking
def truncate(topic: OrdinaryTopic, admin: Admin = DEFAULT_ADMIN) -> None:
    """Move every subscription to the end, and delete all messages, also those that are kept."""
    ask(admin, "DELETE", f"{ordinary_path(topic)}/truncate")
    typer.echo(f"Truncated {topic}.")


@asking
def analyze(
    topic: OrdinaryTopic, subscription: SubscriptionArgument, admin: Admin = DEFAULT_ADMIN
) -> None:
    """Count the entries and messages of a backlog by reading it."""
    path, start = f"{_path(topic, subscription)}/analyzeBacklog", None
    entries = messages = 0
    first: object = None
    while True:
        found = mapping(ask(admin, "POST", path, start))
        entries += int(str(found.get("entries", 0)))
        messages += int(str(found.get("messages", 0)))
        first, last = first or found.get("firstMessageId"), found.get("lastMessageId")
        if not found.get("aborted") or last is None:
            break
        ledger_id, entry_id = str(last).split(":")
        start = {"ledgerId": int(ledger_id), "entryId": int(entry_id), "excluded": True}
    more = "  (not counted to the end: ask again)" if found.get("aborted") else ""
    typer.echo(f"{entries} entries, {messages} messages, from {first or '-'}{more}")


@asking
def properties(
    topic: OrdinaryTopic,
    subscription: SubscriptionArgument,
    replace: Annotated[
        list[str] | None,
        typer.Option("--set", help="key=value, in place of all that there are; repeat for more"),
    ] = None,
    admin: Admin = DEFAULT_ADMIN,
) -> None:
    """Show the properties of a subscription, or replace them."""
    path = f"{_path(topic, subscription)}/properties"
    if replace:
        ask(admin, "PUT", path, dict(_pair(text) for text in replace))
    for key, text in sorted(mapping(ask(admin, "GET", path)).items()):
        typer.echo(f"{printable(key)}={printable(text)}")


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise typer.BadParameter(f"{text!r} is no property: write key=value.")
    return key, value


def add_backlogs(group: typer.Typer) -> None:
    """Add the commands to the `topics` group."""
    group.command("skip")(skip)
    group.command("truncate")(truncate)
    group.command("analyze-backlog")(analyze)
    group.command("subscription-properties")(properties)
