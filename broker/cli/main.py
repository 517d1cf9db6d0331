"""The `magnetar` command: finds its sub-commands in the entry-point group `magnetar.commands`.

Each entry point names a function that takes the Typer application and adds commands to it, so
that broker and client can ship in one wheel and never import each other.  The command that is asked
for is looked for one entry point after the other: a broker starts without loading the client.
"""

import sys
from importlib.metadata import entry_points
from importlib.metadata import version as installed_version
from typing import Annotated

import typer


def build_app(command: str | None = None) -> typer.Typer:
    """The application with every installed sub-command, or at least with this one."""
    app = typer.Typer(
        name="magnetar",
        help="A broker for the Apache Pulsar protocol, alone or one of a cluster, and its client.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.callback()(_of_all_commands)
    for entry in sorted(entry_points(group="magnetar.commands"), key=lambda found: found.name):
        entry.load()(app)
        if command is not None and command in _names(app):
            break
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"magnetar {installed_version('magnetar')}")
        raise typer.Exit


def _of_all_commands(
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_print_version, help="Print the version and end."
        ),
    ] = False,
) -> None:
    """What comes before a command."""


def _names(app: typer.Typer) -> set[str | None]:
    """Of the commands and groups that it has."""
    commands = {each.name for each in app.registered_commands}
    return commands | {each.name for each in app.registered_groups}


def main() -> None:
    """Run the command line."""
    build_app(sys.argv[1] if len(sys.argv) > 1 else None)()


if __name__ == "__main__":
    main()
