"""`magnetar txn`: list, show and end transactions, and find those that pin a topic."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated
from urllib.parse import quote

import typer

from broker.cli.rest_commands import DEFAULT_ADMIN, Admin, ask, asking, printable
from broker.cli.transaction_keys import register_keys
from config.bounds import TXN_LISTED

BASE = "/admin/v3/transactions"
_TXN = re.compile(r"\(?(\d+)[_,:] ?(\d+)\)?")
TxnArgument = Annotated[str, typer.Argument(help="Id of a transaction, as 3_42 or (3,42)")]
_COLUMNS = f"{'transaction':<16}  {'state':<9}  {'age':>8}  {'ends in':>8}  owner"


def txn_path(txn: str) -> str:
    """`most/least` of an id in the form of this command, Pulsar's tools or clients."""
    found = _TXN.fullmatch(txn.strip())
    if found is None:
        raise typer.BadParameter(f"{txn!r} is no transaction: write <most>_<least>, as 3_42.")
    return f"{found.group(1)}/{found.group(2)}"


def named_path(topic: str) -> str:
    """`domain/tenant/namespace/name` of a topic, in `topic://` if it has no domain."""
    domain, sign, local = topic.partition("://")
    if not sign:
        domain, local = "topic", topic
    parts = local.split("/", 2)
    if len(parts) == 1:
        parts = ["public", "default", local]
    if len(parts) != 3 or not all(parts):
        raise typer.BadParameter(f"{topic!r} is no topic: write topic://tenant/namespace/name.")
    return "/".join(quote(part, safe="") for part in (domain, *parts))


def duration(ms: object) -> str:
    """A duration in seconds, minutes or hours, from milliseconds."""
    if not isinstance(ms, int):
        return "-"
    seconds = abs(ms) // 1000
    sign = "-" if ms < 0 else ""
    if seconds < 120:
        return f"{sign}{seconds}s"
    if seconds < 7200:
        return f"{sign}{seconds // 60}m{seconds % 60:02d}s"
    return f"{sign}{seconds // 3600}h{seconds % 3600 // 60:02d}m"


def _mapping(answer: object) -> Mapping[str, object]:
    return answer if isinstance(answer, dict) else {}


def _rows(answer: object) -> Sequence[Mapping[str, object]]:
    return [_mapping(each) for each in answer] if isinstance(answer, list) else []


def _left_ms(row: Mapping[str, object]) -> int | None:
    """Time until the deadline, by the broker's clock; None if the transaction has ended."""
    age, created, deadline = (row.get(name) for name in ("ageMs", "createdMs", "deadlineMs"))
    if not (isinstance(age, int) and isinstance(created, int) and isinstance(deadline, int)):
        return None
    return deadline - created - age if row.get("status") == "OPEN" else None


def _line(row: Mapping[str, object]) -> str:
    group = row.get("groupId")
    return (
        f"{row.get('txnId')!s:<16}  {row.get('status', '?')!s:<9}  {duration(row.get('ageMs')):>8}"
        f"  {duration(_left_ms(row)):>8}  {row.get('owner') or '-'}"
        f"{f'  of group {group}' if group else ''}"
    )


def _group_lines(group: Mapping[str, object]) -> Iterator[str]:
    if not group:
        return
    nonce, reserved = printable(group.get("nonce")), group.get("attemptsReserved")
    yield f"  a group, of nonce {nonce}, with {reserved} attempts reserved"
    if "batch" not in group:
        return
    query, winners = printable(group.get("query")), group.get("winners")
    yield f"  committed batch {group.get('batch')} of query {query}, with {winners} attempts"
    for segment, messages in _mapping(group.get("messages")).items():
        yield f"  of which {messages} messages are on {printable(segment)}"


@asking
def list_open(
    coordinator: Annotated[int | None, typer.Option(help="Show those of one coordinator")] = None,
    older_than_s: Annotated[int, typer.Option(min=0, help="Show those open for longer")] = 0,
    limit: Annotated[int, typer.Option(min=1, max=TXN_LISTED, help="Show at most this many")] = 100,
    admin: Admin = DEFAULT_ADMIN,
) -> None:
    """List open transactions, the oldest first."""
    query = f"limit={limit}&olderThanMs={older_than_s * 1000}"
    if coordinator is not None:
        query += f"&coordinatorId={coordinator}"
    answer = _mapping(ask(admin, "GET", f"{BASE}/open?{query}"))
    rows = _rows(answer.get("transactions"))
    if rows:
        typer.echo(_COLUMNS)
    for row in rows:
        typer.echo(_line(row))
    typer.echo(f"{answer.get('open')} open, {len(rows)} shown.")


@asking
def show(txn: TxnArgument, admin: Admin = DEFAULT_ADMIN) -> None:
    """Show one transaction: its state, its owner, its writes and acknowledgements."""
    row = _mapping(ask(admin, "GET", f"{BASE}/transaction/{txn_path(txn)}"))
    typer.echo(_COLUMNS)
    typer.echo(_line(row))
    for line in _group_lines(_mapping(row.get("group"))):
        typer.echo(line)
    for write in _rows(row.get("writes")):
        typer.echo(f"  writes to {write.get('segment')} after {write.get('floor')}")
    for ack in _rows(row.get("acknowledgements")):
        positions = ack.get("positions")
        texts = [str(each) for each in positions] if isinstance(positions, list) else []
        how = "up to" if ack.get("cumulative") else "of"
        more = f" and {len(texts) - 5} more" if len(texts) > 5 else ""
        typer.echo(
            f"  acknowledgement {how} {', '.join(texts[:5])}{more} on {ack.get('segment')} "
            f"for {printable(ack.get('subscription'))}"
        )


@asking
def why(
    topic: Annotated[str, typer.Argument(help="topic://t/ns/x, persistent://..., segment://...")],
    admin: Admin = DEFAULT_ADMIN,
) -> None:
    """Show the open transactions on each segment that keep readers from the end of a topic."""
    answer = _mapping(ask(admin, "GET", f"{BASE}/why/{named_path(topic)}"))
    segments = _rows(answer.get("segments"))
    pinned = 0
    for segment in segments:
        rows = _rows(segment.get("transactions"))
        # Those of other roles are only counted.
        if not rows and not segment.get("open"):
            continue
        pinned += 1
        state = "is not loaded"
        if segment.get("loaded"):
            state = f"is read up to {segment.get('horizon')} of {segment.get('lastConfirmed')}"
        count = f"{segment.get('open')}{' or more' if segment.get('more') else ''}"
        typer.echo(f"{segment.get('segment')} {state}: {count} transaction(s), {len(rows)} shown")
        if rows:
            typer.echo(f"  {_COLUMNS}")
        for row in rows:
            at = row.get("firstPosition") or row.get("floor") or row.get("readableUpTo")
            typer.echo(f"  {_line(row)}  from {at or '(nothing written)'}")
    if not pinned:
        typer.echo(f"No open transaction on any of {len(segments)} segment(s) of {topic}.")
    else:
        typer.echo("End one by hand with `magnetar txn end TRANSACTION abort`.")


@asking
def end(
    txn: TxnArgument,
    action: Annotated[str, typer.Argument(help="commit or abort")],
    admin: Admin = DEFAULT_ADMIN,
) -> None:
    """End one transaction; its client gets an error when it goes on."""
    if action not in ("commit", "abort"):
        raise typer.BadParameter(f"{action!r} is no end of a transaction: write commit or abort.")
    ask(admin, "POST", f"{BASE}/end/{txn_path(txn)}?action={action}")
    typer.echo(f"Transaction {txn} is {'committed' if action == 'commit' else 'aborted'}.")


def register_transactions(app: typer.Typer) -> None:
    """Add the `txn` group."""
    group = typer.Typer(
        help="Transactions: list, show, end, and find those that hold readers back.",
        no_args_is_help=True,
    )
    group.command("list")(list_open)
    group.command("show")(show)
    group.command("why")(why)
    group.command("end")(end)
    register_keys(group)
    app.add_typer(group, name="txn")
