"""`magnetar txn keys`: list, show and delete transaction keys."""

from collections.abc import Mapping
from typing import Annotated
from urllib.parse import urlencode

import typer

from broker.cli.rest_commands import DEFAULT_ADMIN, Admin, ask, asking, or_dash, printable
from config.bounds import TXN_KEYS_LISTED

BASE = "/admin/v2/transactions/transaction-keys"
KeyArgument = Annotated[str, typer.Argument(help="Name of the key")]
OwnerOption = Annotated[
    str, typer.Option(help="Role that owns the key; yours if not given, for superusers anonymous")
]
_COLUMNS = (
    f"{'key':<24}  {'owner':<12}  {'epoch':>6}  {'transaction':<16}  {'state':<9}  "
    f"{'age':>8}  {'idle':>8}  connections"
)


def _seconds(ms: object) -> str:
    return f"{ms // 1000}s" if isinstance(ms, int) else "-"


def _line(row: Mapping[str, object]) -> str:
    return (
        f"{printable(row.get('key')):<24}  {printable(row.get('owner')):<12}  "
        f"{or_dash(row.get('epoch')):>6}  {or_dash(row.get('transactionId')):<16}  "
        f"{or_dash(row.get('transactionState')):<9}  {_seconds(row.get('ageMs')):>8}  "
        f"{_seconds(row.get('idleMs')):>8}  {or_dash(row.get('connections'))}"
    )


def _mapping(answer: object) -> Mapping[str, object]:
    return answer if isinstance(answer, dict) else {}


def _path(key: str, owner: str) -> str:
    return f"{BASE}?{urlencode({'key': key, **({'owner': owner} if owner else {})})}"


@asking
def list_keys(
    limit: Annotated[
        int, typer.Option(min=1, max=TXN_KEYS_LISTED, help="Show at most this many")
    ] = 100,
    after: Annotated[str, typer.Option(help="Continue an earlier list after its `next`")] = "",
    admin: Admin = DEFAULT_ADMIN,
) -> None:
    """List transaction keys, with the last transaction of each."""
    query = urlencode({"limit": limit, "after": after})
    answer = _mapping(ask(admin, "GET", f"{BASE}?{query}"))
    rows = answer.get("keys")
    rows = rows if isinstance(rows, list) else []
    if rows:
        typer.echo(_COLUMNS)
    for row in rows:
        typer.echo(_line(row))
    more = answer.get("next")
    typer.echo(f"{len(rows)} shown{f'; more with --after {more!r}' if more else ''}.")


@asking
def get(key: KeyArgument, owner: OwnerOption = "", admin: Admin = DEFAULT_ADMIN) -> None:
    """Show one key: its epoch, its last transaction, and how many connections use it."""
    typer.echo(_COLUMNS)
    row = _mapping(ask(admin, "GET", _path(key, owner)))
    typer.echo(_line(row))
    last = _mapping(row.get("lastGroup"))
    if last:
        typer.echo(
            f"  last committed: batch {last.get('batch')} of query {printable(last.get('query'))}, "
            f"by group {last.get('groupId')}"
        )
        if last.get("positions") is not None:
            typer.echo(f"  with positions {printable(last.get('positions'))}")


@asking
def delete(key: KeyArgument, owner: OwnerOption = "", admin: Admin = DEFAULT_ADMIN) -> None:
    """Delete a key: abort its open transaction, and close connections that use it."""
    ask(admin, "DELETE", _path(key, owner))
    typer.echo(f"Transaction key {printable(key)} is deleted.")


def register_keys(group: typer.Typer) -> None:
    """Add `keys` to the `txn` group."""
    keys = typer.Typer(help="Transaction keys: list, show, delete.", no_args_is_help=True)
    keys.command("list")(list_keys)
    keys.command("get")(get)
    keys.command("delete")(delete)
    group.add_typer(keys, name="keys")
