"""`magnetar topics`: the policy of automatic splits and merges, and its decisions."""

import json
import time
from collections.abc import Mapping
from typing import Annotated

import typer

from broker.cli.rest_commands import (
    DEFAULT_ADMIN,
    Admin,
    NameArgument,
    OfNamespace,
    TopicArgument,
    ask,
    asking,
    mapping,
    printable,
    quoted_namespace,
    topic_path,
)


def _path(name: str, *, of_namespace: bool) -> str:
    if not of_namespace:
        return f"{topic_path(name)}/autoScalePolicy"
    return f"/admin/v2/namespaces/{quoted_namespace(name)}/scalableTopicAutoScalePolicy"


@asking
def get_auto_scale(
    name: NameArgument, of_namespace: OfNamespace = False, admin: Admin = DEFAULT_ADMIN
) -> None:
    """Show the members of the policy that a topic, or a namespace, sets."""
    answer = ask(admin, "GET", _path(name, of_namespace=of_namespace))
    if not isinstance(answer, dict) or not answer:
        typer.echo(f"{name} sets nothing: the levels above decide (see `why-scale TOPIC`).")
        return
    for member, value in answer.items():
        typer.echo(f"{printable(member)} = {json.dumps(value)}")


@asking
def set_auto_scale(
    name: NameArgument,
    members: Annotated[
        list[str],
        typer.Argument(
            metavar="MEMBER=VALUE...",
            help="maxSegments=8 splitMsgRateInThreshold=500 enabled=false ...",
        ),
    ],
    of_namespace: OfNamespace = False,
    admin: Admin = DEFAULT_ADMIN,
) -> None:
    """Set the policy of a topic, or a namespace; other members come from the level above."""
    policy: dict[str, object] = {}
    for member in members:
        key, sign, text = member.partition("=")
        try:
            policy[key] = json.loads(text)
        except ValueError:
            sign = ""
        if not (key and sign):
            raise typer.BadParameter(f"{member!r} is not MEMBER=VALUE: write maxSegments=8.")
    ask(admin, "POST", _path(name, of_namespace=of_namespace), policy)
    typer.echo(f"Set the policy of automatic splits and merges of {name}.")


@asking
def remove_auto_scale(
    name: NameArgument, of_namespace: OfNamespace = False, admin: Admin = DEFAULT_ADMIN
) -> None:
    """Remove the policy of a topic, or a namespace: the levels above decide again."""
    ask(admin, "DELETE", _path(name, of_namespace=of_namespace))
    typer.echo(f"Removed the policy of automatic splits and merges of {name}.")


@asking
def why_scale(
    topic: TopicArgument,
    admin: Admin = DEFAULT_ADMIN,
) -> None:
    """Show whether a topic would be split, merged or rebucketed now, and why or why not."""
    answer = mapping(ask(admin, "GET", f"{topic_path(topic)}/scaling"))
    typer.echo(
        f"{topic}  {answer.get('activeSegments')} active segment(s), "
        f"{answer.get('consumers')} ordered consumer(s) of the largest subscription"
    )
    decision = mapping(answer.get("decision"))
    if decision:
        text = f"{decision.get('action')} by {decision.get('rule')}. {decision.get('reason')}"
        typer.echo(f"  now: {printable(text)}")
    else:
        typer.echo("  now: nothing")
    refusals = answer.get("refusals")
    for each in refusals if isinstance(refusals, list) else []:
        refusal = mapping(each)
        mark = "!" if refusal.get("wanted") else " "
        typer.echo(f"  {mark} {refusal.get('rule')}: {printable(str(refusal.get('reason')))}")
    if answer.get("failure"):
        typer.echo(f"  the last evaluation failed: {printable(str(answer['failure']))}")
    typer.echo(
        f"  {'segment':>8}  {'in, msg/s':>10}  {'out, msg/s':>10}  {'backlog':>8}  quiet for"
    )
    for segment_id, members in mapping(answer.get("segments")).items():
        typer.echo(f"  {segment_id:>8}  {load_text(mapping(members))}")
    last = mapping(answer.get("lastDecision"))
    if last:
        reason = printable(str(last.get("reason")))
        ago = _ago(answer.get("lastDecisionMs"))
        typer.echo(f"  last decision, {ago} ago: {last.get('action')}. {reason}")
    typer.echo(
        f"  last split {_when(answer.get('lastSplitMs'))}, last merge "
        f"{_when(answer.get('lastMergeMs'))}, last rebucket {_when(answer.get('lastRebucketMs'))}"
    )


def load_text(members: Mapping[str, object]) -> str:
    """The load of a segment, as one line shows it."""
    if not members:
        return "no report yet"
    rate_in, rate_out = members.get("msgRateIn"), members.get("msgRateOut")
    quiet = members.get("quietSinceMs")
    text = f"{rate_in:>10}  {rate_out:>10}  {members.get('backlog'):>8}  "
    text += "-" if quiet is None else _ago(quiet)
    shares = [
        f"{float(str(members[name])):.0%} of the {unit}"
        for name, unit in (("topKeyShare", "messages"), ("topKeyBytesShare", "bytes"))
        if name in members
    ]
    # The two may be different keys.
    return f"{text}  (one key has {', one '.join(shares)})" if shares else text


def _ago(time_ms: object) -> str:
    return f"{max(0, round(time.time() - int(str(time_ms)) / 1000))} s"


def _when(time_ms: object) -> str:
    return "never" if time_ms is None else f"{_ago(time_ms)} ago"


def add_auto_scale(group: typer.Typer) -> None:
    """Add the commands to `magnetar topics`."""
    group.command("get-auto-scale")(get_auto_scale)
    group.command("set-auto-scale")(set_auto_scale)
    group.command("remove-auto-scale")(remove_auto_scale)
    group.command("why-scale")(why_scale)
