"""`magnetar ledgers orphans`."""

from datetime import UTC, datetime
from typing import Annotated

import typer

from broker.cli.rest_commands import DEFAULT_ADMIN, Admin, ask, asking, mapping, printable


@asking
def orphans(
    delete: Annotated[bool, typer.Option("--delete", help="Remove them from the bookies")] = False,
    admin: Admin = DEFAULT_ADMIN,
) -> None:
    """Show ledgers on bookies that crashed brokers left and no record names."""
    found = ask(admin, "DELETE" if delete else "GET", "/admin/v2/ledgers/orphans")
    ledgers = [mapping(each) for each in found] if isinstance(found, list) else []
    for each in ledgers:
        created_s = int(str(each["createdTimestamp"])) // 1000
        owner = each["managedLedger"] or "health check"
        cursor = f"  subscription {printable(each['cursor'])}" if each["cursor"] else ""
        created = datetime.fromtimestamp(created_s, UTC).isoformat()
        typer.echo(f"{each['ledgerId']:>12}  {created}  {owner}{cursor}")
    typer.echo(f"{len(ledgers)} ledger(s){' deleted' if delete else ''}.")


def register_ledgers(app: typer.Typer) -> None:
    """Add the `ledgers` group."""
    group = typer.Typer(help="Orphaned ledgers that crashes left on bookies.", no_args_is_help=True)
    group.callback()(_keep_group)
    group.command("orphans")(orphans)
    app.add_typer(group, name="ledgers")


def _keep_group() -> None:
    """Keep `orphans` a sub-command: without a callback Typer merges a single one into its group."""
