"""The entry of the broker's commands: puts the broker's packages on the path of a process.

Installed, `broker`, `config`, `security`, `storage` and `txn` lie inside this package, for
site-packages is everybody's: a user's own `config.py` must neither hide ours nor be hidden by it.
In a checkout they lie beside it.  Only the process that runs one of the broker's commands gets
them, before all else on its path, so that neither its working directory nor PYTHONPATH can hide
them.
"""

import sys
from pathlib import Path

import typer

__all__ = ["register", "register_for_operators"]


def register(app: typer.Typer) -> None:
    """Entry point of the group `magnetar.commands`: add the commands that run a broker."""
    _find_packages()
    from broker.cli.commands import register as register_commands

    register_commands(app)


def register_for_operators(app: typer.Typer) -> None:
    """Entry point of the group `magnetar.commands`: add the commands that ask a broker."""
    _find_packages()
    from broker.cli.operator_commands import register as register_commands

    register_commands(app)


def _find_packages() -> None:
    """Put the broker's packages on the path, once."""
    inside = Path(__file__).resolve().parent
    home = str(inside if (inside / "broker").is_dir() else inside.parent)
    if sys.path[:1] != [home]:
        sys.path.insert(0, home)
