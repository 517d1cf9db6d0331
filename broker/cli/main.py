"""The `magnetar` command: finds its sub-commands in the entry-point group `magnetar.commands`.

Each entry point names a function that takes the Typer application and adds commands to it, so
that broker and client can ship in one wheel and never import each other.
"""

from importlib.metadata import entry_points

import typer


def build_app() -> typer.Typer:
    """The application with every installed sub-command."""
    app = typer.Typer(
        name="magnetar",
        help="A standalone broker for the Apache Pulsar protocol.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    for entry in sorted(entry_points(group="magnetar.commands"), key=lambda found: found.name):
        entry.load()(app)
    return app


def main() -> None:
    """Run the command line."""
    build_app()()


if __name__ == "__main__":
    main()
