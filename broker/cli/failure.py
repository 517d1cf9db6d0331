"""How a command of the broker fails."""

import typer


def fail(message: object) -> typer.Exit:
    """Print the message to standard error; raise the result to end with status 1."""
    typer.echo(f"magnetar: {message}", err=True)
    return typer.Exit(1)
