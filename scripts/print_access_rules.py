"""Print `docs/access.md`: who may send which command, and who may make which request.

The columns are decided by the broker's own code, for roles with one grant each.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from broker.admin.access import TABLE, question_of, rules
from broker.wire.handlers.access import RULES
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.commands import FIELD_OF_TYPE
from security.access import Access, Need, Rights, grants_of, is_allowed

PAGE: Final = Path(__file__).parent.parent / "docs" / "access.md"
PATH_PARTS: Final[Mapping[str, str]] = {
    "tenant": "acme",
    "namespace": "orders",
    "topic": "new",
    "domain": "persistent",
    "subscription": "billing",
}
"""What stands in the places of a path, in the page and in its test."""
TOPIC: Final = "persistent://acme/orders/new"
ROLES: Final[Mapping[str, str | None]] = {
    "nobody": None,
    "other": "other",
    "consume": "consumer",
    "produce": "producer",
    "admin": "acme-admin",
    "superuser": "root",
}
"""The role of each column; None: without credentials."""
POLICIES: Final[Mapping[str, object]] = {
    "auth_policies": {"namespace_auth": {"consumer": ["consume"], "producer": ["produce"]}}
}
PROXIES: Final = ("gate", "weak-gate")
"""Roles of proxies: a superuser, and one without grants."""
REFUSED: Final[Mapping[str, str]] = {
    "wrong": "credentials that prove nothing",
    "expired": "credentials that have expired",
    "foreign": "a token that another key has signed",
    "claim": "a role that is no proxy, and names an original principal",
    "bare proxy": "a proxy that names no original principal",
    "proxy for a proxy": "a proxy that names a proxy as the original principal",
}
"""Callers that are refused whatever they ask for."""
_RIGHTS: Final = Rights(
    superusers=frozenset({"root", "gate"}),
    tenant_admins=frozenset({"acme-admin"}),
    grants=grants_of(POLICIES),
)
_YES: Final = "yes"
_OWN: Final = "own"
_PLACE: Final = re.compile(r"\{(\w+)\}")
_HEAD: Final = """\
# Who may do what

This page is printed from the tables that the broker decides by, with `python -m
scripts.print_access_rules`, and tests ask a live broker each cell. It counts where `authorization`
is `on`. The columns: no credentials; a role without grants here; a role with *consume* on the
namespace, and one with *produce*; an admin of the tenant; a superuser.

In a line with *own* each role sees and changes what it owns itself, in lists too. Of anything else
it gets the answer for what does not exist.

A grant on the topic counts as one on the namespace does, where a topic is named. Where a
subscription is named, its roles and the mode `Prefix` count too; reads without a subscription
(PLAN_RANGE, READ_ENTRIES) are for tenant admins alone where the namespace restricts subscriptions.
Segments and partitions go by their topic. Topics whose names begin with `__change_events` or
`__transaction_`, and all of `pulsar/system`, are for superusers. The line of `/metrics` is that of
the default of `metrics_access`. Paths of Apache Pulsar that are not served
([pulsar-admin.md](pulsar-admin.md)) have no lines: they answer 501 to every role.

Other callers get the same in every line, so they have no columns; the tests ask for them in every
line too. Behind a proxy that is a superuser, the column of its client counts. Behind a proxy with
fewer rights, both columns must say yes. Refused everywhere, also where nobody may ask (CONNECT gets
AuthenticationError, REST answers 401), are:

{refused}

## Commands of the binary protocol

SEND has no line: it goes by the producer that it names, which PRODUCER has opened. A transaction
that it names must be the role's own, as in ACK.

"""
_REST: Final = """
## REST

"""


def page() -> str:
    """The text of the page."""
    head = ["who", *ROLES]
    commands = [f"| command | {' | '.join(head)} |\n", f"|{'---|' * (len(head) + 1)}\n"]
    paths = [f"| methods | path | {' | '.join(ROLES)} |\n", f"|{'---|' * (len(ROLES) + 2)}\n"]
    intro = _HEAD.format(refused="\n".join(f"- {each}" for each in REFUSED.values()))
    return "".join([intro, *commands, *_commands(), _REST, *paths, *_paths()])


def may(roles: Sequence[str], questions: Sequence[Access]) -> bool:
    """Whether a peer with these roles may have all these accesses: two behind a proxy."""
    return all(is_allowed(roles, each, _RIGHTS) for each in questions)


def example(kind: int) -> pb.BaseCommand:
    """A command of that type on the topic, the namespace and the subscription of the page."""
    command = pb.BaseCommand(type=kind)  # type: ignore[arg-type]
    body = getattr(command, FIELD_OF_TYPE[kind])
    values = {
        "topic": TOPIC,
        "namespace": "acme/orders",
        "subscription": PATH_PARTS["subscription"],
    }
    for name, text in values.items():
        field = body.DESCRIPTOR.fields_by_name.get(name)
        if field is not None and field.message_type is None:
            setattr(body, name, text)
    if kind == pb.BaseCommand.ADD_PARTITION_TO_TXN:
        body.partitions.append(TOPIC)
    elif kind == pb.BaseCommand.ADD_SUBSCRIPTION_TO_TXN:
        body.subscription.add(topic=TOPIC, subscription=PATH_PARTS["subscription"])
    return command


def questions_of(kind: int) -> Sequence[Access]:
    """The questions of a command's rule; of one without any: whether there is a role."""
    rule = RULES[kind]
    if rule.questions is not None:
        return rule.questions(example(kind))
    return (Access(Need.NOTHING if rule.described == "anybody" else Need.AUTHENTICATED),)


def filled(path: str) -> str:
    """A path with names in its places; places of other kinds get a number."""
    return _PLACE.sub(lambda place: PATH_PARTS.get(place[1], "1"), path)


def _commands() -> Iterator[str]:
    by_name = {pb.BaseCommand.Type.Name(kind): kind for kind in RULES}
    for name, kind in sorted(by_name.items()):
        marks = _marks(questions_of(kind))
        yield f"| {name} | {RULES[kind].described} | {' | '.join(marks)} |\n"


def _paths() -> Iterator[str]:
    needs = rules()
    for line in filter(None, TABLE.splitlines()):
        *methods, path, who = line.split()
        marks = _marks((question_of(needs[methods[0], path], PATH_PARTS),))
        if who == "own":
            marks = [_OWN if mark == _YES else mark for mark in marks[:-1]] + marks[-1:]
        yield f"| {', '.join(methods)} | `{path}` | {' | '.join(marks)} |\n"


def _marks(questions: Sequence[Access]) -> list[str]:
    columns = [() if role is None else (role,) for role in ROLES.values()]
    return [_YES if may(roles, questions) else "-" for roles in columns]


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
