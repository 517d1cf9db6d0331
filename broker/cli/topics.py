"""`magnetar topics`: scalable topics from the command line, over REST."""

import time
from collections.abc import Mapping
from typing import Annotated

import typer

from broker.cli.auto_scale import add_auto_scale
from broker.cli.backlogs import add_backlogs
from broker.cli.compaction import add_compaction
from broker.cli.grace_period import add_grace_period
from broker.cli.offload import add_offload
from broker.cli.rest_commands import (
    DEFAULT_ADMIN,
    Admin,
    TopicArgument,
    ask,
    asking,
    mapping,
    printable,
    quoted_namespace,
    topic_path,
)


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
    answer = ask(admin, "GET", f"/admin/v2/scalable/{quoted_namespace(namespace)}")
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
def migrate(
    topic: TopicArgument,
    force: Annotated[
        bool, typer.Option(help="Even while v4 clients are connected: they get TopicTerminated")
    ] = False,
    admin: Admin = DEFAULT_ADMIN,
) -> None:
    """Make an ordinary topic, partitioned or not, scalable in place."""
    ask(admin, "POST", f"{topic_path(topic)}/migrate?force={str(force).lower()}")
    typer.echo(f"{topic} is scalable now. v5 clients go on; the old partitions are read first.")


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
    segments: Annotated[list[int], typer.Argument(help="Ids of adjacent active segments")],
    admin: Admin = DEFAULT_ADMIN,
) -> None:
    """Merge adjacent active segments, two or more, into one."""
    ask(admin, "POST", f"{topic_path(topic)}/merge/{'/'.join(str(each) for each in segments)}")
    *others, last = segments
    named = f"{', '.join(str(each) for each in others)} and {last}" if others else str(last)
    typer.echo(f"Merged segments {named} of {topic}.")


@asking
def rebucket(
    topic: TopicArgument,
    segment: Annotated[int, typer.Argument(help="Id of an active segment")],
    buckets: Annotated[int, typer.Argument(help="Number of entry buckets that it gets")],
    admin: Admin = DEFAULT_ADMIN,
) -> None:
    """Let more consumers share one active segment, which gets another number of entry buckets."""
    ask(admin, "POST", f"{topic_path(topic)}/rebucket/{segment}?bucketCount={buckets}")
    typer.echo(f"Segment {segment} of {topic} has a successor with {buckets} entry buckets.")


@asking
def history(topic: TopicArgument, admin: Admin = DEFAULT_ADMIN) -> None:
    """Show the changes of a topic's layout and their reasons, oldest first."""
    answer = ask(admin, "GET", f"{topic_path(topic)}/history")
    events = [mapping(entry) for entry in answer] if isinstance(answer, list) else []
    width = max((len(str(event.get("kind"))) for event in events), default=0)
    for event in events:
        time_s = int(str(event.get("timeMs", 0))) / 1000
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(time_s))
        cause = f"  {printable(str(event['cause']))}" if event.get("cause") else ""
        typer.echo(
            f"{at}Z  epoch {event.get('epoch'):>4}  {event.get('kind'):<{width}}"
            f"  {_ids(event.get('parents'))} -> {_ids(event.get('children'))}{cause}"
        )


@asking
def stats(topic: TopicArgument, admin: Admin = DEFAULT_ADMIN) -> None:
    """Show segments, traffic, and the backlog of each subscription."""
    answer = mapping(ask(admin, "GET", f"{topic_path(topic)}/stats"))
    typer.echo(
        f"{topic}  epoch {answer.get('epoch')}  {answer.get('activeSegments')} active segment(s)"
    )
    _show_traffic(answer)


@asking
def segment_stats(
    topic: TopicArgument,
    segment: Annotated[int, typer.Argument(help="Id of a segment")],
    admin: Admin = DEFAULT_ADMIN,
) -> None:
    """Show the owner of one segment, its traffic, and the backlog of each subscription."""
    answer = mapping(ask(admin, "GET", f"{topic_path(topic)}/segments/{segment}/stats"))
    typer.echo(
        f"{topic}  segment {segment}  at {printable(str(answer.get('ownerBroker')))}  "
        f"{_length(answer.get('producers'))} producer(s)"
    )
    _show_traffic(answer)


def _show_traffic(answer: Mapping[str, object]) -> None:
    typer.echo(
        f"  stored {_size(answer, 'storageSize')}, "
        f"in {_rate(answer, 'msgRateIn', 'msgThroughputIn')}, "
        f"out {_rate(answer, 'msgRateOut', 'msgThroughputOut')}"
    )
    for name, value in mapping(answer.get("subscriptions")).items():
        subscription = mapping(value)
        consumers = subscription.get("consumerCount", _length(subscription.get("consumers")))
        typer.echo(
            f"  {printable(name)}: backlog {_backlog(subscription)}, "
            f"out {_rate(subscription, 'msgRateOut', 'msgThroughputOut')}, "
            f"{consumers} consumer(s)"
        )


def _length(value: object) -> int:
    return len(value) if isinstance(value, list) else 0


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
    group = typer.Typer(
        help="Scalable topics: create, show, split, merge, migrate.", no_args_is_help=True
    )
    group.command("create")(create)
    group.command("list")(list_topics)
    group.command("get")(get)
    group.command("delete")(delete)
    group.command("migrate")(migrate)
    group.command("split")(split)
    group.command("merge")(merge)
    group.command("rebucket")(rebucket)
    group.command("history")(history)
    group.command("stats")(stats)
    group.command("segment-stats")(segment_stats)
    add_auto_scale(group)
    add_grace_period(group)
    add_offload(group)
    add_compaction(group)
    add_backlogs(group)
    app.add_typer(group, name="topics")
