"""`magnetar topics offload`, `offload-status`, `drop-hot` and `offload-orphans`."""

import time
from collections.abc import Mapping
from typing import Annotated
from urllib.parse import quote, urlencode

import typer

from broker.cli.rest_commands import DEFAULT_ADMIN, Admin, ask, asking, mapping, topic_path

TopicOrSegment = Annotated[
    str,
    typer.Argument(
        help="topic://tenant/namespace/name, persistent://..., segment://..., or just a name"
    ),
]
UrlOption = Annotated[
    str, typer.Option(help="URL below offload_url; the broker's offload_url if not given")
]
_POLL_S = 0.5
_RESOURCES = {"persistent": ("/admin/v2/persistent/", 3), "segment": ("/admin/v2/segments/", 4)}
"""REST resource of each domain, and the number of parts of its names."""


def _path(topic: str) -> str:
    """REST path of the offload of a topic or segment."""
    domain, _, local = topic.rpartition("://")
    if domain not in _RESOURCES:
        return topic_path(topic) + "/offload"
    base, count = _RESOURCES[domain]
    parts = local.split("/", count - 1)
    if len(parts) != count or not all(parts):
        raise typer.BadParameter(f"{topic!r} has too few parts: write it whole, as {domain}://...")
    return base + "/".join(quote(part, safe="") for part in parts) + "/offload"


def _query(url: str) -> str:
    return "?" + urlencode({"url": url}) if url else ""


@asking
def offload(
    topic: TopicOrSegment,
    url: UrlOption = "",
    wait: Annotated[bool, typer.Option(help="Return when it is done")] = False,
    admin: Admin = DEFAULT_ADMIN,
) -> None:
    """Copy the closed ledgers of a topic to the broker's storage of copies."""
    path = _path(topic)
    ask(admin, "PUT", path + _query(url))
    while wait and any(
        part.get("status") == "RUNNING" for part in _parts(ask(admin, "GET", path + "/manifest"))
    ):
        time.sleep(_POLL_S)
    if wait:
        _show_status(topic, admin)
    else:
        typer.echo(f"Offloading {topic}: see `magnetar topics offload-status`.")


def _parts(answer: object) -> list[Mapping[str, object]]:
    """The manifest of a topic, or those of its segments."""
    found = mapping(answer)
    segments = found.get("segments")
    if isinstance(segments, dict):
        return [mapping(segments[each]) for each in sorted(segments, key=int)]
    return [found]


@asking
def status(topic: TopicOrSegment, admin: Admin = DEFAULT_ADMIN) -> None:
    """Show which ledgers of a topic are copied, and which of them are deleted."""
    _show_status(topic, admin)


def _show_status(topic: str, admin: Admin) -> None:
    failed = False
    for part in _parts(ask(admin, "GET", _path(topic) + "/manifest")):
        error = part.get("lastError")
        failed = failed or bool(error)
        typer.echo(f"{part.get('topic')}  {part.get('status')}" + (f"  {error}" if error else ""))
        ledgers = part.get("ledgers")
        for each in ledgers if isinstance(ledgers, list) else []:
            typer.echo(_line(mapping(each)))
    if failed:
        raise typer.Exit(1)


def _line(ledger: Mapping[str, object]) -> str:
    if ledger.get("bookkeeperDeleted"):
        state = "copy only"
    elif ledger.get("offloaded"):
        state = "copied"
    elif ledger.get("requested"):
        state = "to be copied"
    else:
        state = "-" if ledger.get("closedTimestamp") else "being written"
    return (
        f"  ledger {ledger.get('ledgerId'):>8}  {ledger.get('entries'):>9} entries  "
        f"{ledger.get('size'):>12} bytes  {state:<13}  {ledger.get('url', '')}"
    )


@asking
def drop_hot(topic: TopicOrSegment, admin: Admin = DEFAULT_ADMIN) -> None:
    """Delete the ledgers of a topic that have a complete copy now, not some time later."""
    dropped = ask(admin, "POST", _path(topic) + "/dropHot")
    lists = dropped.values() if isinstance(dropped, dict) else [dropped]
    count = sum(len(each) for each in lists if isinstance(each, list))
    typer.echo(f"Deleted {count} ledger(s) of {topic}; they are read from their copies.")


@asking
def orphans(
    url: UrlOption = "",
    delete: Annotated[
        bool,
        typer.Option("--delete", help="Delete them: only if no other cluster uses the location"),
    ] = False,
    admin: Admin = DEFAULT_ADMIN,
) -> None:
    """Show objects that crashes left in the storage of copies and no topic names."""
    path = "/admin/v2/offload/orphans" + _query(url)
    found = ask(admin, "DELETE" if delete else "GET", path)
    objects = found if isinstance(found, list) else []
    for each in objects:
        typer.echo(
            each if delete else f"{mapping(each).get('size'):>12}  {mapping(each)['object']}"
        )
    typer.echo(f"{len(objects)} object(s){' deleted' if delete else ''}.")


def add_offload(group: typer.Typer) -> None:
    """Add the commands of offloading to `topics`."""
    group.command("offload")(offload)
    group.command("offload-status")(status)
    group.command("drop-hot")(drop_hot)
    group.command("offload-orphans")(orphans)
