"""`magnetar topics`: scalable topics from the command line, over REST."""

import time
from collections.abc import Mapping
from typing import Annotated
from urllib.parse import quote

import typer

from broker.cli.offload import add_offload
from broker.cli.rest_commands import (
    DEFAULT_ADMIN,
    Admin,
    ask,
    asking,
    mapping,
    printable,
    topic_path,
)

TopicArgument = Annotated[str, typer.Argument(help="topic://tenant/namespace/name, or just a name")]


@asking
def create(
    topic: TopicArgument,
    segments: Annotated[int, typer.Option(min=1, help="Segments to begin with")] = 1,
    admin: Admin = DEFAULT_ADMIN,
) -> None:
    """Create a scalable topic."""
    ask(admin, "PUT", f"{topic_path(topic)}?numInitialSegments={segments}")
    typer.echo(f"Created {topic} with {segments} segment(s).")


@asking
def list_topics(
    namespace: Annotated[str, typer.Argument(help="tenant/namespace")] = "public/default",
    admin: Admin = DEFAULT_ADMIN,
) -> None:
    """List the scalable topics of a namespace."""
    parts = namespace.split("/")
    if len(parts) != 2 or not all(parts):
        raise typer.BadParameter(f"{namespace!r} is not a namespace: write tenant/namespace.")
    answer = ask(admin, "GET", f"/admin/v2/scalable/{quote(namespace)}")
    for name in answer if isinstance(answer, list) else []:
        typer.echo(printable(name))


@asking
def get(topic: TopicArgument, admin: Admin = DEFAULT_ADMIN) -> None:
    """Show the layout: every segment with its range, state, parents and children."""
    layout = mapping(ask(admin, "GET", topic_path(topic)))
    typer.echo(f"{topic}  epoch {layout.get('epoch')}")
    typer.echo(f"{'segment':>8}  {'range':<11}  {'state':<7}  parents   children")
    segments = mapping(layout.get("segments"))
    for identifier in sorted(segments, key=int):
        segment = mapping(segments[identifier])
        bounds = mapping(segment.get("hashRange"))
        low, high = int(str(bounds.get("start"))), int(str(bounds.get("end")))
        parents = _ids(segment.get("parentIds"))
        children = _ids(segment.get("childIds"))
        typer.echo(
            f"{identifier:>8}  {low:04x}-{high:04x}    {segment.get('state'):<7}  "
            f"{parents:<8}  {children}"
        )


def _ids(values: object) -> str:
    return ",".join(str(value) for value in values) if isinstance(values, list) and values else "-"


@asking
def delete(
    topic: TopicArgument,
    force: Annotated[bool, typer.Option(help="Even while clients are connected")] = False,
    admin: Admin = DEFAULT_ADMIN,
) -> None:
    """Delete a scalable topic and its data."""
    ask(admin, "DELETE", f"{topic_path(topic)}?force={str(force).lower()}")
    typer.echo(f"Deleted {topic}.")


@asking
def split(
    topic: TopicArgument,
    segment: Annotated[int, typer.Argument(help="Id of an active segment")],
    admin: Admin = DEFAULT_ADMIN,
) -> None:
    """Split one active segment in two."""
    ask(admin, "POST", f"{topic_path(topic)}/split/{segment}")
    typer.echo(f"Split segment {segment} of {topic}.")


@asking
def merge(
    topic: TopicArgument,
    first: Annotated[int, typer.Argument(help="Id of an active segment")],
    second: Annotated[int, typer.Argument(help="Id of an adjacent active segment")],
    admin: Admin = DEFAULT_ADMIN,
) -> None:
    """Merge two adjacent active segments into one."""
    ask(admin, "POST", f"{topic_path(topic)}/merge/{first}/{second}")
    typer.echo(f"Merged segments {first} and {second} of {topic}.")


@asking
def history(topic: TopicArgument, admin: Admin = DEFAULT_ADMIN) -> None:
    """Show the splits, merges and moves of a topic, oldest first."""
    answer = ask(admin, "GET", f"{topic_path(topic)}/history")
    for entry in answer if isinstance(answer, list) else []:
        event = mapping(entry)
        time_s = int(str(event.get("timeMs", 0))) / 1000
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(time_s))
        typer.echo(
            f"{at}Z  epoch {event.get('epoch'):>4}  {event.get('kind'):<7}"
            f"  {_ids(event.get('parents'))} -> {_ids(event.get('children'))}"
        )


@asking
def stats(topic: TopicArgument, admin: Admin = DEFAULT_ADMIN) -> None:
    """Show segments, traffic, and the backlog of each subscription."""
    answer = mapping(ask(admin, "GET", f"{topic_path(topic)}/stats"))
    typer.echo(
        f"{topic}  epoch {answer.get('epoch')}  {answer.get('activeSegments')} active segment(s)"
    )
    typer.echo(
        f"  stored {_size(answer, 'storageSize')}, "
        f"in {_rate(answer, 'msgRateIn', 'msgThroughputIn')}, "
        f"out {_rate(answer, 'msgRateOut', 'msgThroughputOut')}"
    )
    for name, value in mapping(answer.get("subscriptions")).items():
        subscription = mapping(value)
        typer.echo(
            f"  {printable(name)}: backlog {_backlog(subscription)}, "
            f"out {_rate(subscription, 'msgRateOut', 'msgThroughputOut')}, "
            f"{subscription.get('consumerCount', 0)} consumer(s)"
        )


def _backlog(subscription: Mapping[str, object]) -> str:
    """A backlog in entries, messages and bytes, and the age of its oldest message."""
    text = f"{subscription.get('msgBacklog', '?')} entries"
    if "messagesInBacklog" in subscription:
        size = _size(subscription, "backlogSize")
        text += f" ({subscription['messagesInBacklog']} messages, {size})"
    earliest_ms = subscription.get("earliestMsgPublishTimeInBacklog")
    if isinstance(earliest_ms, int):
        text += f", oldest {max(0, round(time.time() - earliest_ms / 1000))} s old"
    return text


def _rate(members: Mapping[str, object], messages: str, size: str) -> str:
    value = members.get(messages, 0)
    rate = value if isinstance(value, int | float) else 0
    return f"{rate:.1f} messages/s ({_size(members, size)}/s)"


def _size(members: Mapping[str, object], name: str) -> str:
    value = members.get(name, 0)
    size = float(value) if isinstance(value, int | float) else 0.0
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def register_topics(app: typer.Typer) -> None:
    """Add the `topics` group."""
    group = typer.Typer(help="Scalable topics: create, show, split, merge.", no_args_is_help=True)
    group.command("create")(create)
    group.command("list")(list_topics)
    group.command("get")(get)
    group.command("delete")(delete)
    group.command("split")(split)
    group.command("merge")(merge)
    group.command("history")(history)
    group.command("stats")(stats)
    add_offload(group)
    app.add_typer(group, name="topics")
