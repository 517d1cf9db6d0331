"""`magnetar topics`: how long a lost ordered consumer keeps its segments."""

from typing import Annotated

import typer

from broker.cli.rest_commands import (
    DEFAULT_ADMIN,
    Admin,
    NameArgument,
    OfNamespace,
    ask,
    asking,
    quoted_namespace,
    topic_path,
)


def _path(name: str, *, of_namespace: bool) -> str:
    if not of_namespace:
        return f"{topic_path(name)}/consumerSessionGracePeriod"
    return f"/admin/v2/namespaces/{quoted_namespace(name)}/scalableTopicConsumerSessionGracePeriod"


@asking
def get_grace_period(
    name: NameArgument,
    of_namespace: OfNamespace = False,
    applied: Annotated[
        bool, typer.Option("--applied", help="Show the value in force, whichever level sets it")
    ] = False,
    admin: Admin = DEFAULT_ADMIN,
) -> None:
    """Show the grace period that a topic, or a namespace, sets."""
    query = "?applied=true" if applied else ""
    answer = ask(admin, "GET", _path(name, of_namespace=of_namespace) + query)
    if answer is None:
        typer.echo(f"{name} sets none: the levels above decide (see --applied).")
    else:
        typer.echo(f"{answer} s")


@asking
def set_grace_period(
    name: NameArgument,
    seconds: Annotated[
        int, typer.Argument(min=0, help="Seconds; 0: others get the segments at once")
    ],
    of_namespace: OfNamespace = False,
    admin: Admin = DEFAULT_ADMIN,
) -> None:
    """Set how long lost ordered consumers of a topic, or of a namespace, keep their segments."""
    ask(admin, "POST", _path(name, of_namespace=of_namespace), seconds)
    typer.echo(f"A lost ordered consumer of {name} keeps its segments for {seconds} s.")


@asking
def remove_grace_period(
    name: NameArgument, of_namespace: OfNamespace = False, admin: Admin = DEFAULT_ADMIN
) -> None:
    """Remove the grace period of a topic, or of a namespace: the levels above decide again."""
    ask(admin, "DELETE", _path(name, of_namespace=of_namespace))
    typer.echo(f"Removed the grace period of {name}.")


def add_grace_period(group: typer.Typer) -> None:
    """Add the commands to `magnetar topics`."""
    group.command("get-grace-period")(get_grace_period)
    group.command("set-grace-period")(set_grace_period)
    group.command("remove-grace-period")(remove_grace_period)
