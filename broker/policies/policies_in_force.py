"""The policies in force for the topics of this broker, and their changes."""

from collections.abc import Callable, Mapping

from broker.policies.applied_policies import (
    AppliedPolicies,
    applied_policies,
    applied_value,
    values_of_broker,
)
from broker.policies.backlog_quotas import require_retention_above_quotas
from broker.policies.namespaces import Namespaces, Policies
from broker.policies.persistence import persistence_in, require_one_copy
from broker.policies.policy_kinds import BACKLOG_QUOTAS, PERSISTENCE, RETENTION, PolicyKind
from broker.policies.topic_policies import (
    UNSET,
    PoliciesOfTopic,
    TopicPolicies,
    policy_name,
)
from config.settings import Settings
from magnetar.protocol.names import (
    InvalidNamespaceName,
    NamespaceName,
    TopicDomain,
    TopicName,
    parse_ledger_path,
    parse_namespace_name,
)
from storage.managed_ledger.types import Persistence


class PoliciesInForce:
    """Combines the policies of topics, namespaces and the broker.

    Topics that set no policies share the result of their namespace.
    """

    def __init__(self, namespaces: Namespaces, topics: TopicPolicies, settings: Settings) -> None:
        self._namespaces = namespaces
        self._topics = topics
        self._has_bookies = settings.in_cluster
        self._of_broker: Mapping[PolicyKind, object] = values_of_broker(settings)
        self._persistence = persistence_in(self._of_broker[PERSISTENCE])
        self._of_namespaces: dict[NamespaceName, tuple[Policies, AppliedPolicies]] = {}

    async def require(self, name: TopicName) -> Policies:
        """The policies of a topic's namespace; the records of its topics are followed from now on.

        Raises `NamespaceNotFound`, `MetadataError`.
        """
        policies = await self._namespaces.require(name.namespace_name)
        await self._topics.follow(name.namespace_name)
        return policies

    def of(self, name: TopicName) -> AppliedPolicies:
        """The policies in force for a topic; `require` was called for its namespace before."""
        namespace = self._namespaces.known(name.namespace_name)
        # Policies are stored by local name, and no request sets those of a non-persistent topic.
        stores = name.domain is not TopicDomain.NON_PERSISTENT
        own = self._topics.known(name) if stores else UNSET
        if own != UNSET:
            return applied_policies(self._of_broker, namespace, own)
        known = self._of_namespaces.get(name.namespace_name)
        if known is None or known[0] is not namespace:
            known = (namespace, applied_policies(self._of_broker, namespace, UNSET))
            self._of_namespaces[name.namespace_name] = known
        return known[1]

    async def require_of(self, name: TopicName) -> AppliedPolicies:
        """The policies in force for a topic, whose namespace is followed from now on.

        Raises `NamespaceNotFound`, `MetadataError`.
        """
        await self.require(name)
        return self.of(name)

    async def read(self, name: TopicName) -> AppliedPolicies:
        """The policies in force for a topic, read anew.

        Raises `NamespaceNotFound`, `MetadataError`.
        """
        namespace = await self._namespaces.require(name.namespace_name)
        return applied_policies(self._of_broker, namespace, await self._topics.get(name))

    async def value(self, kind: PolicyKind, name: TopicName) -> object:
        """The value of a policy in force for a topic; its own one is read anew.

        Raises `NamespaceNotFound`, `MetadataError`.
        """
        namespace = await self._namespaces.require(name.namespace_name)
        own = UNSET if kind.topic_path is None else await self._topics.get(name)
        return applied_value(kind, self._of_broker, namespace, own)

    def value_of(self, kind: PolicyKind, namespace: Policies) -> object:
        """The value of a policy in force for topics of a namespace that set none."""
        return applied_value(kind, self._of_broker, namespace, UNSET)

    def persistence(self, ledger_path: str) -> Persistence:
        """How a topic's stream is stored; `require` was called for its namespace before."""
        name = parse_ledger_path(ledger_path)
        namespace = self._namespaces.known(name.namespace_name)
        own = self._topics.known(name)
        if own is UNSET and PERSISTENCE.member not in namespace.raw:
            # It is asked for each write of a cursor.
            return self._persistence
        return persistence_in(applied_value(PERSISTENCE, self._of_broker, namespace, own))

    def require_copies(self, value: object) -> None:
        """Raise `CopiesNotServed` if a valid persistence policy asks for copies that none makes."""
        if not self._has_bookies:
            require_one_copy(value)

    def require_retention_above_quotas(
        self, namespace: Policies, topic: PoliciesOfTopic = UNSET
    ) -> None:
        """Raise `RetentionTooSmall` unless retention is more than the backlog quotas.

        Both are those in force with these policies, which are to be set.
        """
        retention, quotas = (
            applied_value(kind, self._of_broker, namespace, topic)
            for kind in (RETENTION, BACKLOG_QUOTAS)
        )
        require_retention_above_quotas(retention, quotas)

    def of_broker(self, kind: PolicyKind) -> object:
        """The broker's value of a policy, as REST shows it; None if it has no setting."""
        return self._of_broker.get(kind)

    def on_change(self, listener: Callable[[NamespaceName, str | None], None]) -> None:
        """Call `listener` at each change, with a namespace and the local name of a topic.

        The local name is as `policy_name` has it, or None: all topics of the namespace are
        concerned.
        """
        self._topics.on_change(listener)

        def namespace_changed(text: str) -> None:
            try:
                name = parse_namespace_name(text)
            except InvalidNamespaceName:
                return  # The record is a tenant's.
            self._of_namespaces.pop(name, None)
            listener(name, None)

        self._namespaces.on_change(namespace_changed)


def concerns(namespace: NamespaceName, local_name: str | None, name: TopicName) -> bool:
    """Whether a change that `PoliciesInForce.on_change` reports concerns a topic."""
    return name.namespace_name == namespace and (
        local_name is None or policy_name(name) == local_name
    )
