"""The `magnetar` command: finds its sub-commands in the entry-point group `magnetar.commands`.

An entry point has the name of a command.  It names a function that takes the Typer application and
adds that command to it, perhaps with others.  The distribution `magnetar-broker` adds its commands
this way.
"""

import sys
from importlib.metadata import EntryPoints, entry_points
from importlib.metadata import version as installed_version
from typing import Annotated

import typer

from magnetar.cli.broker_commands import has_broker, register_missing

_HELP = "A client for the Apache Pulsar protocol, and a broker for it, alone or one of a cluster."
_NO_BROKER = "The commands that run a broker, and ask it, come with magnetar-broker: install that."


def build_app(command: str | None = None) -> typer.Typer:
    """The application with this command, or with all if it is None or unknown."""
    found = entry_points(group="magnetar.commands")
    broker_installed = has_broker()
    app = typer.Typer(
        name="magnetar",
        help=_HELP,
        epilog=None if broker_installed else _NO_BROKER,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.callback()(_global_options)
    # Only the wanted command is loaded: a broker starts without the client, and the client's
    # commands find nothing of the broker on their path.
    _register(app, found.select(name=command or "") or found)
    if not broker_installed:
        register_missing(app)
    return app


def _register(app: typer.Typer, points: EntryPoints) -> None:
    """Call each function that the entry points name, once, to add its commands.

    If one cannot be imported, only its commands are missing.
    """
    for target in sorted({each.value for each in points}):
        entry, *_ = sorted(each for each in points if each.value == target)
        try:
            register = entry.load()
        except ImportError as error:
            typer.echo(
                f"magnetar: the commands of `{entry.name}` cannot be loaded ({error}). "
                "Install magnetar again to have them.",
                err=True,
            )
            continue
        register(app)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"magnetar {installed_version('magnetar')}")
        raise typer.Exit


def _global_options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_print_version, help="Print the version and end."
        ),
    ] = False,
) -> None:
    """Options before the command."""


def main() -> None:
    """Run the command line."""
    build_app(sys.argv[1] if len(sys.argv) > 1 else None)()


if __name__ == "__main__":
    main()
