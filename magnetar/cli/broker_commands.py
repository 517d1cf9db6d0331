"""The commands that the distribution `magnetar-broker` adds, where it is not installed."""

from importlib.metadata import entry_points
from typing import Final

import typer

BROKER_COMMANDS: Final = (
    "backup",
    "broker",
    "config",
    "health",
    "ledgers",
    "permissions",
    "standalone",
    "tokens",
    "topics",
    "txn",
)
"""The names of its commands; a test compares them with its `pyproject.toml`."""


def has_broker() -> bool:
    """Whether `magnetar-broker` is installed."""
    return bool(entry_points(group="magnetar.commands", name="standalone"))


def install_advice(command: str) -> str:
    """The sentence for a command that needs `magnetar-broker`, which is not installed."""
    return (
        f"`magnetar {command}` needs the distribution magnetar-broker, which is not installed; "
        "install it (pip install ./magnetar_broker in a checkout of the project)."
    )


def register_missing(app: typer.Typer) -> None:
    """Add each of the broker's commands, hidden from the help; it ends with what to install."""
    for name in BROKER_COMMANDS:
        app.command(
            name,
            hidden=True,
            add_help_option=False,
            context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
        )(_end_with_advice)


def _end_with_advice(context: typer.Context) -> None:
    """End with status 1, whatever the arguments."""
    typer.echo(f"magnetar: {install_advice(context.info_name or '')}", err=True)
    raise typer.Exit(1)
