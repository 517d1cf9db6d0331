"""Print `docs/access.md`: who may send which command, and who may ask which path."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from broker.admin.access import TABLE
from broker.wire.handlers.access import RULES
from magnetar.protocol.pulsar_pb2 import BaseCommand

PAGE: Final = Path(__file__).parent.parent / "docs" / "access.md"
_HEAD: Final = """\
# Who may do what

This page is printed from the tables that the broker decides by, with `python -m
scripts.print_access_rules`; a test holds it to them. It counts where `authorization` is `on`.

A superuser may do everything, and an admin of a tenant everything that is asked of a tenant admin,
or of a grant there. *Produce* and *consume* are grants on the topic or on its namespace. Where a
subscription is named, its roles and the mode `Prefix` count too; *consume by any subscription* is
for tenant admins alone where the namespace restricts subscriptions.

Segments and partitions go by their topic. Topics whose names begin with `__change_events` or
`__transaction_`, and all of `pulsar/system`, are for superusers.

## Commands of the binary protocol

SEND has no line: it goes by the producer that it names, which PRODUCER has opened.

| command | who |
|---|---|
"""
_REST: Final = """
## REST

| methods | path | who |
|---|---|---|
"""


def page() -> str:
    """The text of the page."""
    return _HEAD + "".join(_commands()) + _REST + "".join(_paths())


def _commands() -> Iterator[str]:
    names = {BaseCommand.Type.Name(kind): rule for kind, rule in RULES.items()}
    for name in sorted(names):
        yield f"| {name} | {names[name].described} |\n"


def _paths() -> Iterator[str]:
    for line in filter(None, TABLE.splitlines()):
        *methods, path, who = line.split()
        yield f"| {', '.join(methods)} | `{path}` | {who.replace('-', ' ')} |\n"


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
