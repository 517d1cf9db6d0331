"""Access rules: what a command or a route asks for, what policies grant, and the decision.

The rules are Apache Pulsar's (PulsarAuthorizationProvider), but for two.  A role covers a
subscription in prefix mode if the name is the role or begins with the role and a hyphen: `a` does
not cover `ab-x`.  And a grant names a topic without its domain, so that one on `topic://t/n/x` and
one on its twin `persistent://t/n/x` are the same.
"""

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from magnetar.protocol.names import (
    InvalidTopicName,
    NamespaceName,
    TopicDomain,
    TopicName,
    parse_topic_name,
    segment_name,
)

SYSTEM_NAMESPACE: Final = NamespaceName("pulsar", "system")
_SYSTEM_PREFIXES: Final = ("__change_events", "__transaction_")
_PREFIX_MODE: Final = "Prefix"
Roles = frozenset[str]
_NOBODY: Final[Roles] = frozenset()


class Action(enum.Enum):
    """An action that a policy grants.  The values are Pulsar's; brokers check the first two."""

    PRODUCE = "produce"
    CONSUME = "consume"
    FUNCTIONS = "functions"
    SOURCES = "sources"
    SINKS = "sinks"
    PACKAGES = "packages"


class Need(enum.Enum):
    """The right that a command or a route asks for."""

    NOTHING = "nothing"
    """Served without credentials."""
    AUTHENTICATED = "any role"
    SUPERUSER = "a superuser"
    TENANT_ADMIN = "an admin of the tenant"
    PRODUCE = "produce"
    CONSUME = "consume"
    READ_ALL = "consume, by any subscription"
    """Reads that name no subscription: where subscriptions are restricted, for tenant admins."""
    LOOKUP = "produce or consume"


_OF_TOPIC: Final[Mapping[Need, frozenset[Action]]] = {
    Need.PRODUCE: frozenset({Action.PRODUCE}),
    Need.CONSUME: frozenset({Action.CONSUME}),
    Need.READ_ALL: frozenset({Action.CONSUME}),
    Need.LOOKUP: frozenset({Action.PRODUCE, Action.CONSUME}),
}
"""For each need that grants can satisfy, the actions of which one suffices."""


@dataclass(frozen=True, slots=True)
class Access:
    """One question: may a role have `need` on this tenant, namespace or topic.

    `topic` is None for the namespace as a whole, for which grants on its topics do not count.
    `subscription` is None if the question is about none, or about all of them.
    """

    need: Need
    tenant: str = ""
    namespace: NamespaceName | None = None
    topic: TopicName | None = None
    subscription: str | None = None

    @property
    def asks_policies(self) -> bool:
        """Whether the policies of the tenant, or of the namespace, take part in the answer."""
        return self.need not in (Need.NOTHING, Need.AUTHENTICATED, Need.SUPERUSER)


def on_topic(need: Need, topic: TopicName, subscription: str | None = None) -> Access:
    """A question about a topic; a segment and a partition go by their topic.

    Topics of the system are for superusers.
    """
    name = authorization_name(topic)
    if is_system_topic(name):
        return Access(Need.SUPERUSER)
    return Access(need, name.tenant, name.namespace_name, name, subscription)


def on_namespace(need: Need, namespace: NamespaceName, subscription: str | None = None) -> Access:
    """A question about a namespace as a whole; that of the system is for superusers."""
    if namespace == SYSTEM_NAMESPACE:
        return Access(Need.SUPERUSER)
    return Access(need, namespace.tenant, namespace, None, subscription)


def on_tenant(tenant: str) -> Access:
    """The question whether a role is an admin of the tenant."""
    return Access(Need.TENANT_ADMIN, tenant)


def authorization_name(topic: TopicName) -> TopicName:
    """The topic whose grants count: the parent of a segment, the whole of a partition."""
    if topic.domain is TopicDomain.SEGMENT:
        topic = segment_name(topic).parent
    return topic.partitioned


def is_system_topic(topic: TopicName) -> bool:
    """Whether brokers alone use the topic."""
    return topic.namespace_name == SYSTEM_NAMESPACE or topic.local_name.startswith(_SYSTEM_PREFIXES)


@dataclass(frozen=True, slots=True)
class Grants:
    """The grants of a namespace: `auth_policies` and `subscription_auth_mode` of its record."""

    of_namespace: Mapping[str, frozenset[Action]] = field(default_factory=dict)
    of_topics: Mapping[str, Mapping[str, frozenset[Action]]] = field(default_factory=dict)
    """By `topic_key`, then by role."""
    of_subscriptions: Mapping[str, Roles] = field(default_factory=dict)
    """Roles that alone may use a subscription.  None, or no entry: every role that may consume."""
    prefix_mode: bool = False
    """Whether a role may use only subscriptions that bear its name."""

    @property
    def restricts_subscriptions(self) -> bool:
        """Whether there is a subscription that not every consumer may use."""
        return self.prefix_mode or any(self.of_subscriptions.values())


def topic_key(topic: TopicName) -> str:
    """The key of a topic in `Grants.of_topics`: its name without the domain."""
    return f"{topic.tenant}/{topic.namespace}/{topic.local_name}"


def grants_of(policies: Mapping[str, object]) -> Grants:
    """Read the grants in a namespace's record.

    Members of another form than Pulsar's grant nothing, and a restricted subscription whose roles
    cannot be read is for nobody.
    """
    section = _mapping(policies.get("auth_policies"))
    topics: dict[str, dict[str, frozenset[Action]]] = {}
    for text, granted in _mapping(section.get("destination_auth")).items():
        try:
            key = topic_key(parse_topic_name(text))
        except InvalidTopicName:
            continue
        by_role = topics.setdefault(key, {})
        for role, actions in _actions_by_role(granted).items():
            by_role[role] = by_role.get(role, frozenset()) | actions
    return Grants(
        _actions_by_role(section.get("namespace_auth")),
        topics,
        {
            subscription: _roles(roles)
            for subscription, roles in _mapping(section.get("subscription_auth_roles")).items()
        },
        policies.get("subscription_auth_mode") == _PREFIX_MODE,
    )


@dataclass(frozen=True, slots=True)
class Rights:
    """All that decides about one question, besides the roles and the question itself."""

    superusers: Roles = _NOBODY
    tenant_admins: Roles = _NOBODY
    grants: Grants = field(default_factory=Grants)
    wildcards: bool = False
    """Whether a granted role `abc*` or `*abc` stands for all roles that begin or end so."""


def is_allowed(roles: Sequence[str], access: Access, rights: Rights) -> bool:
    """Whether every one of the roles may have that access: behind a proxy there are two.

    Without a role, what needs no credentials is allowed alone.
    """
    if access.need is Need.NOTHING:
        return True
    return bool(roles) and all(_is_role_allowed(role, access, rights) for role in roles)


def _is_role_allowed(role: str, access: Access, rights: Rights) -> bool:
    if access.need is Need.AUTHENTICATED or role in rights.superusers:
        return True
    if access.need is Need.SUPERUSER:
        return False
    if role in rights.tenant_admins:
        return True
    wanted = _OF_TOPIC.get(access.need)
    if wanted is None:
        return False
    if not _may_use_subscription(role, access, rights.grants):
        return False
    maps = [rights.grants.of_namespace]
    if access.topic is not None:
        maps.append(rights.grants.of_topics.get(topic_key(access.topic), {}))
    return any(_grants(each, role, wanted, wildcards=rights.wildcards) for each in maps)


def _grants(
    granted: Mapping[str, frozenset[Action]],
    role: str,
    wanted: frozenset[Action],
    *,
    wildcards: bool,
) -> bool:
    if granted.get(role, frozenset()) & wanted:
        return True
    return wildcards and any(
        actions & wanted and _matches(pattern, role) for pattern, actions in granted.items()
    )


def _matches(pattern: str, role: str) -> bool:
    """Whether a granted role with a `*` at one of its ends stands for this role."""
    if pattern.endswith("*"):
        return role.startswith(pattern[:-1])
    return pattern.startswith("*") and role.endswith(pattern[1:])


def _may_use_subscription(role: str, access: Access, grants: Grants) -> bool:
    if access.need is Need.READ_ALL:
        return not grants.restricts_subscriptions
    subscription = access.subscription
    if access.need is not Need.CONSUME or subscription is None:
        return True
    roles = grants.of_subscriptions.get(subscription)
    # As in Pulsar: the last role that is revoked leaves an empty list, which restricts nothing.
    if roles and role not in roles:
        return False
    if not grants.prefix_mode:
        return True
    return subscription == role or subscription.startswith(f"{role}-")


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, dict) else {}


def _actions_by_role(value: object) -> dict[str, frozenset[Action]]:
    return {role: frozenset(actions_of(names)) for role, names in _mapping(value).items()}


def actions_of(names: object) -> Iterable[Action]:
    """The actions with these names; unknown ones are left out."""
    known = {each.value: each for each in Action}
    listed = names if isinstance(names, list) else []
    return [known[name] for name in listed if isinstance(name, str) and name in known]


def _roles(value: object) -> Roles:
    """Roles of a subscription.  Of another form: one role that nobody has."""
    if isinstance(value, list) and all(isinstance(role, str) for role in value):
        return frozenset(value)
    return frozenset({""})
