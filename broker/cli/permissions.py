"""`magnetar permissions`: what roles may do on a namespace or a topic, over REST."""

from typing import Annotated, Final
from urllib.parse import quote

import typer

from broker.cli.rest_commands import DEFAULT_ADMIN, Admin, ask, asking, mapping, printable

ResourceArgument = Annotated[
    str,
    typer.Argument(
        metavar="NAMESPACE_OR_TOPIC",
        help="tenant/namespace; or topic://tenant/namespace/name, persistent://..., or just a name",
    ),
]
RoleOption = Annotated[str, typer.Option("--role", "-r", help="The role, byte for byte")]
_PATHS: Final = {"topic": "scalable", "persistent": "persistent"}
"""The part of a REST path that stands for a topic's domain."""


def permissions_path(resource: str) -> str:
    """REST path of the permissions of a namespace (two parts) or a topic.

    Raises typer.BadParameter.
    """
    domain, sign, local = resource.partition("://")
    if not sign:
        domain, local = "topic", resource
    parts = local.split("/", 2)
    if len(parts) == 1:
        parts = ["public", "default", local]
    if domain not in _PATHS or not all(parts) or (sign and len(parts) != 3):
        raise typer.BadParameter(
            f"{resource!r} is no namespace and no topic: write tenant/namespace, "
            "topic://tenant/namespace/name or persistent://tenant/namespace/name."
        )
    kind = "namespaces" if len(parts) == 2 else _PATHS[domain]
    return "/".join(("/admin/v2", kind, *(quote(part, safe="") for part in parts), "permissions"))


@asking
def grant(
    resource: ResourceArgument,
    role: RoleOption,
    actions: Annotated[
        str,
        typer.Option("--actions", "-a", help="produce, consume, or both with a comma between them"),
    ],
    admin: Admin = DEFAULT_ADMIN,
) -> None:
    """Grant a role these actions, in place of those that it has there."""
    wanted = [each.strip() for each in actions.split(",")]
    if not all(wanted):
        raise typer.BadParameter(f"{actions!r} has an empty action: write produce,consume.")
    ask(admin, "POST", f"{permissions_path(resource)}/{quote(role, safe='')}", wanted)
    typer.echo(f"Granted {', '.join(wanted)} on {resource} to {printable(role)}.")


@asking
def revoke(resource: ResourceArgument, role: RoleOption, admin: Admin = DEFAULT_ADMIN) -> None:
    """Revoke all that a role was granted there, and close what it has open by that."""
    ask(admin, "DELETE", f"{permissions_path(resource)}/{quote(role, safe='')}")
    typer.echo(f"Revoked what was granted on {resource} to {printable(role)}.")


@asking
def list_permissions(resource: ResourceArgument, admin: Admin = DEFAULT_ADMIN) -> None:
    """List roles with their actions; of a topic, those of its namespace too."""
    granted = mapping(ask(admin, "GET", permissions_path(resource)))
    for role, actions in sorted(granted.items()):
        names = sorted(map(str, actions)) if isinstance(actions, list) else []
        typer.echo(f"{printable(role)}: {', '.join(map(printable, names)) or '-'}")


def register_permissions(app: typer.Typer) -> None:
    """Add `magnetar permissions` and its sub-commands."""
    permissions = typer.Typer(
        help="Grant, revoke and list what roles may do.", no_args_is_help=True
    )
    permissions.command("grant")(grant)
    permissions.command("revoke")(revoke)
    permissions.command("list")(list_permissions)
    app.add_typer(permissions, name="permissions")
