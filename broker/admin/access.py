"""The access rule of every REST path, and the check of each request against it.

One table, `TABLE`: methods, path, and who may ask.  `produce`, `consume` and `lookup` (either of
the two) are asked on the topic in the path, or else on its namespace; `consume` by the subscription
in the path, if there is one: for the position of a replicator it is `tenant-admin`.  Every role may
look up the name of v4 coordinators.  `own` admits every role: each sees and changes what it owns
itself, and of anything else it gets the answer for what does not exist; superusers see and change
everything.  For `/metrics` the setting `metrics_access` may ask more than the table.  Paths that
are refused to all (`not_served`) need a role.  An application with a route that has no rule is not
built.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import Final

from aiohttp import hdrs, web

from broker.admin import not_served
from broker.admin.keys import BROKER
from broker.admin.rest import Handler, RestError, status_of_failure
from broker.policies.authorizer import (
    DENIALS_SHOWN,
    DENIED,
    DENIED_IN_DRY_RUN,
    AccessDenied,
    access_denied,
    described,
)
from broker.topics.replication import is_replicator_cursor
from broker.topics.reserved_names import names_coordinators
from magnetar.protocol.names import NamespaceName, TopicDomain, parse_topic_name
from security.access import Access, Need, on_namespace, on_tenant, on_topic
from security.identity import Principal

PRINCIPAL: Final = web.RequestKey("principal", Principal)
"""For whom a request acts; not there without authentication."""
_PERMITTED: Final = web.RequestKey("permitted", list[str])
"""The accesses that a request was allowed, in words."""

_NEEDS: Final[Mapping[str, Need]] = {
    "anybody": Need.NOTHING,
    "any-role": Need.AUTHENTICATED,
    "own": Need.AUTHENTICATED,
    "superuser": Need.SUPERUSER,
    "tenant-admin": Need.TENANT_ADMIN,
    "produce": Need.PRODUCE,
    "consume": Need.CONSUME,
    "lookup": Need.LOOKUP,
}

_EVERYTHING: Final = Access(Need.SUPERUSER)
_METRICS: Final = (hdrs.METH_GET, "/metrics")

TABLE: Final = """
GET                  /metrics                                                            anybody
GET                  /status.html                                                        anybody
GET                  /admin/v2                                                           any-role

GET                  /admin/v2/brokers/ready                                             anybody
GET                  /admin/v2/brokers/version                                           any-role
GET                  /admin/v2/brokers                                                   superuser
GET                  /admin/v2/brokers/health                                            superuser
GET                  /admin/v2/brokers/leaderBroker                                      superuser
GET                  /admin/v2/brokers/configuration/runtime                             superuser
GET                  /admin/v2/brokers/internal-configuration                            superuser
GET                  /admin/v2/brokers/backlog-quota-check                               superuser
GET                  /admin/v2/brokers/{cluster}                                         superuser
GET                  /admin/v2/brokers/{cluster}/{broker}/ownedNamespaces                superuser
GET                  /admin/v2/broker-stats/load-report                                  superuser
GET                  /admin/v2/broker-stats/topics                                       superuser
GET                  /admin/v2/broker-channel                                            superuser
GET                  /admin/v2/clusters                                                  any-role
GET PUT POST DELETE  /admin/v2/clusters/{cluster}                                        superuser
GET POST             /admin/v2/clusters/{cluster}/peers                                  superuser
GET DELETE           /admin/v2/ledgers/orphans                                           superuser
GET DELETE           /admin/v2/offload/orphans                                           superuser

GET                  /admin/v2/tenants                                                   superuser
PUT                  /admin/v2/tenants/{tenant}                                          superuser
GET POST DELETE      /admin/v2/tenants/{tenant}                                          tenant-admin

GET                  /admin/v2/namespaces/{tenant}                                       tenant-admin
GET PUT DELETE       /admin/v2/namespaces/{tenant}/{namespace}                           tenant-admin
GET                  /admin/v2/namespaces/{tenant}/{namespace}/topics                    lookup
GET                  /admin/v2/namespaces/{tenant}/{namespace}/bundles                   lookup
PUT                  /admin/v2/namespaces/{tenant}/{namespace}/unload                    superuser
GET POST DELETE      /admin/v2/namespaces/{tenant}/{namespace}/scalableTopicAutoScalePolicy tenant-admin
GET POST PUT DELETE  /admin/v2/namespaces/{tenant}/{namespace}/persistence               tenant-admin
GET POST PUT DELETE  /admin/v2/namespaces/{tenant}/{namespace}/retention                 tenant-admin
GET POST PUT DELETE  /admin/v2/namespaces/{tenant}/{namespace}/deduplication             tenant-admin
GET POST PUT DELETE  /admin/v2/namespaces/{tenant}/{namespace}/transactionCoordinatorEnabled tenant-admin
GET POST PUT DELETE  /admin/v2/namespaces/{tenant}/{namespace}/autoTopicCreation         tenant-admin
GET                  /admin/v2/namespaces/{tenant}/{namespace}/backlogQuotaMap           tenant-admin
POST DELETE          /admin/v2/namespaces/{tenant}/{namespace}/backlogQuota              tenant-admin
GET POST PUT DELETE  /admin/v2/namespaces/{tenant}/{namespace}/compactionThreshold       tenant-admin
GET POST PUT DELETE  /admin/v2/namespaces/{tenant}/{namespace}/offloadDeletionLagMs      tenant-admin
GET POST PUT DELETE  /admin/v2/namespaces/{tenant}/{namespace}/offloadThreshold          tenant-admin
GET POST PUT DELETE  /admin/v2/namespaces/{tenant}/{namespace}/scalableTopicConsumerSessionGracePeriod tenant-admin
GET POST PUT DELETE  /admin/v2/namespaces/{tenant}/{namespace}/schemaCompatibilityStrategy tenant-admin
GET POST PUT DELETE  /admin/v2/namespaces/{tenant}/{namespace}/schemaAutoUpdateCompatibilityStrategy tenant-admin
GET POST PUT DELETE  /admin/v2/namespaces/{tenant}/{namespace}/isAllowAutoUpdateSchema   tenant-admin
GET POST PUT DELETE  /admin/v2/namespaces/{tenant}/{namespace}/schemaValidationEnforced  tenant-admin
GET POST PUT DELETE  /admin/v2/namespaces/{tenant}/{namespace}/autoSubscriptionCreation  tenant-admin
GET POST PUT DELETE  /admin/v2/namespaces/{tenant}/{namespace}/maxProducersPerTopic      tenant-admin
GET POST PUT DELETE  /admin/v2/namespaces/{tenant}/{namespace}/maxConsumersPerTopic      tenant-admin
GET POST PUT DELETE  /admin/v2/namespaces/{tenant}/{namespace}/maxConsumersPerSubscription tenant-admin
GET POST PUT DELETE  /admin/v2/namespaces/{tenant}/{namespace}/maxSubscriptionsPerTopic  tenant-admin
GET POST PUT DELETE  /admin/v2/namespaces/{tenant}/{namespace}/maxTopicsPerNamespace     tenant-admin
GET POST             /admin/v2/namespaces/{tenant}/{namespace}/replication               tenant-admin
GET POST             /admin/v2/namespaces/{tenant}/{namespace}/allowedClusters           tenant-admin
GET PUT DELETE       /admin/v2/namespaces/{tenant}/{namespace}/properties                tenant-admin
GET DELETE           /admin/v2/namespaces/{tenant}/{namespace}/property/{key}            tenant-admin
PUT                  /admin/v2/namespaces/{tenant}/{namespace}/property/{key}/{value}    tenant-admin
POST                 /admin/v2/namespaces/{tenant}/{namespace}/clearBacklog              tenant-admin
POST                 /admin/v2/namespaces/{tenant}/{namespace}/clearBacklog/{subscription} tenant-admin
POST                 /admin/v2/namespaces/{tenant}/{namespace}/unsubscribe/{subscription} tenant-admin
GET POST PUT DELETE  /admin/v2/namespaces/{tenant}/{namespace}/encryptionRequired        tenant-admin
GET POST PUT DELETE  /admin/v2/namespaces/{tenant}/{namespace}/maxUnackedMessagesPerConsumer tenant-admin
GET POST PUT DELETE  /admin/v2/namespaces/{tenant}/{namespace}/maxUnackedMessagesPerSubscription tenant-admin
GET POST PUT DELETE  /admin/v2/namespaces/{tenant}/{namespace}/subscriptionTypesEnabled  tenant-admin
GET POST PUT DELETE  /admin/v2/namespaces/{tenant}/{namespace}/messageTTL                tenant-admin
GET POST PUT DELETE  /admin/v2/namespaces/{tenant}/{namespace}/publishRate               tenant-admin
GET POST PUT DELETE  /admin/v2/namespaces/{tenant}/{namespace}/dispatchRate              tenant-admin
GET POST PUT DELETE  /admin/v2/namespaces/{tenant}/{namespace}/subscriptionDispatchRate  tenant-admin
GET POST PUT DELETE  /admin/v2/namespaces/{tenant}/{namespace}/subscribeRate             tenant-admin
GET POST PUT DELETE  /admin/v2/namespaces/{tenant}/{namespace}/replicatorDispatchRate    tenant-admin
GET POST PUT DELETE  /admin/v2/namespaces/{tenant}/{namespace}/subscriptionExpirationTime tenant-admin
GET POST PUT DELETE  /admin/v2/namespaces/{tenant}/{namespace}/inactiveTopicPolicies     tenant-admin
GET POST PUT DELETE  /admin/v2/namespaces/{tenant}/{namespace}/delayedDelivery           tenant-admin
GET POST DELETE      /admin/v2/namespaces/{tenant}/{namespace}/deduplicationSnapshotInterval tenant-admin
GET                  /admin/v2/namespaces/{tenant}/{namespace}/permissions               tenant-admin
POST DELETE          /admin/v2/namespaces/{tenant}/{namespace}/permissions/{role}        tenant-admin
GET                  /admin/v2/namespaces/{tenant}/{namespace}/permissions/subscription  tenant-admin
POST                 /admin/v2/namespaces/{tenant}/{namespace}/permissions/subscription/{subscription} tenant-admin
DELETE               /admin/v2/namespaces/{tenant}/{namespace}/permissions/{subscription}/{role} tenant-admin
GET POST             /admin/v2/namespaces/{tenant}/{namespace}/subscriptionAuthMode      tenant-admin
POST                 /admin/v2/namespaces/grantPermissionsOnTopics                       any-role
POST                 /admin/v2/namespaces/revokePermissionsOnTopics                      any-role

GET                  /admin/v2/non-persistent/{tenant}/{namespace}                       lookup
GET                  /admin/v2/non-persistent/{tenant}/{namespace}/partitioned           lookup
PUT DELETE           /admin/v2/non-persistent/{tenant}/{namespace}/{topic}               tenant-admin
GET                  /admin/v2/non-persistent/{tenant}/{namespace}/{topic}/partitions    lookup
PUT POST DELETE      /admin/v2/non-persistent/{tenant}/{namespace}/{topic}/partitions    tenant-admin
GET                  /admin/v2/non-persistent/{tenant}/{namespace}/{topic}/partitioned-stats lookup
GET                  /admin/v2/non-persistent/{tenant}/{namespace}/{topic}/stats         lookup
GET                  /admin/v2/non-persistent/{tenant}/{namespace}/{topic}/internalStats lookup
PUT                  /admin/v2/non-persistent/{tenant}/{namespace}/{topic}/unload        tenant-admin
GET                  /admin/v2/non-persistent/{tenant}/{namespace}/{topic}/permissions   tenant-admin
POST DELETE          /admin/v2/non-persistent/{tenant}/{namespace}/{topic}/permissions/{role} tenant-admin
GET                  /admin/v2/non-persistent/{tenant}/{namespace}/{topic}/subscriptions consume
PUT DELETE           /admin/v2/non-persistent/{tenant}/{namespace}/{topic}/subscription/{subscription} consume
GET                  /admin/v2/non-persistent/{tenant}/{namespace}/{topic}/lastMessageId lookup
POST                 /admin/v2/non-persistent/{tenant}/{namespace}/{topic}/terminate     tenant-admin
DELETE               /admin/v2/non-persistent/{tenant}/{namespace}/{topic}/truncate      tenant-admin
GET PUT              /admin/v2/non-persistent/{tenant}/{namespace}/{topic}/compaction    tenant-admin
GET                  /admin/v2/non-persistent/{tenant}/{namespace}/{topic}/offload       tenant-admin
PUT                  /admin/v2/non-persistent/{tenant}/{namespace}/{topic}/offload       superuser
GET PUT              /admin/v2/non-persistent/{tenant}/{namespace}/{topic}/subscription/{subscription}/properties consume
POST                 /admin/v2/non-persistent/{tenant}/{namespace}/{topic}/subscription/{subscription}/analyzeBacklog consume
POST                 /admin/v2/non-persistent/{tenant}/{namespace}/{topic}/subscription/{subscription}/skip_all consume
POST                 /admin/v2/non-persistent/{tenant}/{namespace}/{topic}/subscription/{subscription}/skip/{count} consume
POST                 /admin/v2/non-persistent/{tenant}/{namespace}/{topic}/subscription/{subscription}/expireMessages consume
POST                 /admin/v2/non-persistent/{tenant}/{namespace}/{topic}/subscription/{subscription}/expireMessages/{seconds} consume
POST                 /admin/v2/non-persistent/{tenant}/{namespace}/{topic}/all_subscription/expireMessages/{seconds} tenant-admin
POST                 /admin/v2/non-persistent/{tenant}/{namespace}/{topic}/subscription/{subscription}/resetcursor consume
POST                 /admin/v2/non-persistent/{tenant}/{namespace}/{topic}/subscription/{subscription}/resetcursor/{timestamp} consume
GET                  /admin/v2/non-persistent/{tenant}/{namespace}/{topic}/subscription/{subscription}/position/{position} consume

GET                  /admin/v2/persistent/{tenant}/{namespace}                           lookup
GET                  /admin/v2/persistent/{tenant}/{namespace}/partitioned               lookup
PUT DELETE           /admin/v2/persistent/{tenant}/{namespace}/{topic}                   tenant-admin
GET                  /admin/v2/persistent/{tenant}/{namespace}/{topic}/partitions        lookup
PUT POST DELETE      /admin/v2/persistent/{tenant}/{namespace}/{topic}/partitions        tenant-admin
GET                  /admin/v2/persistent/{tenant}/{namespace}/{topic}/partitioned-stats lookup
GET                  /admin/v2/persistent/{tenant}/{namespace}/{topic}/stats             lookup
GET                  /admin/v2/persistent/{tenant}/{namespace}/{topic}/internalStats     lookup
GET                  /admin/v2/persistent/{tenant}/{namespace}/{topic}/internal-info     lookup
GET                  /admin/v2/persistent/{tenant}/{namespace}/{topic}/partitioned-internalStats lookup
GET                  /admin/v2/persistent/{tenant}/{namespace}/{topic}/lastMessageId     lookup
POST                 /admin/v2/persistent/{tenant}/{namespace}/{topic}/terminate         tenant-admin
POST                 /admin/v2/persistent/{tenant}/{namespace}/{topic}/terminate/partitions tenant-admin
POST                 /admin/v2/persistent/{tenant}/{namespace}/{topic}/trim              tenant-admin
POST                 /admin/v2/persistent/{tenant}/{namespace}/{topic}/createMissedPartitions tenant-admin
DELETE               /admin/v2/persistent/{tenant}/{namespace}/{topic}/truncate          tenant-admin
GET                  /admin/v2/persistent/{tenant}/{namespace}/{topic}/messageid/{timestamp} consume
PUT                  /admin/v2/persistent/{tenant}/{namespace}/{topic}/backlogSize       consume
PUT                  /admin/v2/persistent/{tenant}/{namespace}/{topic}/unload            tenant-admin
GET                  /admin/v2/persistent/{tenant}/{namespace}/{topic}/properties        lookup
PUT DELETE           /admin/v2/persistent/{tenant}/{namespace}/{topic}/properties        tenant-admin
GET POST PUT DELETE  /admin/v2/persistent/{tenant}/{namespace}/{topic}/persistence         tenant-admin
GET POST PUT DELETE  /admin/v2/persistent/{tenant}/{namespace}/{topic}/retention           tenant-admin
GET POST PUT DELETE  /admin/v2/persistent/{tenant}/{namespace}/{topic}/deduplicationEnabled tenant-admin
GET POST PUT DELETE  /admin/v2/persistent/{tenant}/{namespace}/{topic}/autoSubscriptionCreation tenant-admin
GET POST PUT DELETE  /admin/v2/persistent/{tenant}/{namespace}/{topic}/maxProducers        tenant-admin
GET POST PUT DELETE  /admin/v2/persistent/{tenant}/{namespace}/{topic}/maxConsumers        tenant-admin
GET POST PUT DELETE  /admin/v2/persistent/{tenant}/{namespace}/{topic}/maxConsumersPerSubscription tenant-admin
GET POST PUT DELETE  /admin/v2/persistent/{tenant}/{namespace}/{topic}/maxSubscriptionsPerTopic tenant-admin
GET POST PUT DELETE  /admin/v2/persistent/{tenant}/{namespace}/{topic}/maxUnackedMessagesOnConsumer tenant-admin
GET POST PUT DELETE  /admin/v2/persistent/{tenant}/{namespace}/{topic}/maxUnackedMessagesOnSubscription tenant-admin
GET POST PUT DELETE  /admin/v2/persistent/{tenant}/{namespace}/{topic}/maxMessageSize      tenant-admin
GET POST PUT DELETE  /admin/v2/persistent/{tenant}/{namespace}/{topic}/subscriptionTypesEnabled tenant-admin
GET POST PUT DELETE  /admin/v2/persistent/{tenant}/{namespace}/{topic}/messageTTL          tenant-admin
GET POST PUT DELETE  /admin/v2/persistent/{tenant}/{namespace}/{topic}/subscriptionExpirationTime tenant-admin
GET POST PUT DELETE  /admin/v2/persistent/{tenant}/{namespace}/{topic}/publishRate       tenant-admin
GET POST PUT DELETE  /admin/v2/persistent/{tenant}/{namespace}/{topic}/dispatchRate      tenant-admin
GET POST PUT DELETE  /admin/v2/persistent/{tenant}/{namespace}/{topic}/subscriptionDispatchRate tenant-admin
GET POST PUT DELETE  /admin/v2/persistent/{tenant}/{namespace}/{topic}/subscribeRate     tenant-admin
GET POST PUT DELETE  /admin/v2/persistent/{tenant}/{namespace}/{topic}/replicatorDispatchRate tenant-admin
GET POST PUT DELETE  /admin/v2/persistent/{tenant}/{namespace}/{topic}/replication       tenant-admin
GET POST DELETE      /admin/v2/persistent/{tenant}/{namespace}/{topic}/{subscription}/dispatchRate tenant-admin
GET POST PUT DELETE  /admin/v2/persistent/{tenant}/{namespace}/{topic}/inactiveTopicPolicies tenant-admin
GET POST PUT DELETE  /admin/v2/persistent/{tenant}/{namespace}/{topic}/schemaCompatibilityStrategy tenant-admin
GET POST PUT DELETE  /admin/v2/persistent/{tenant}/{namespace}/{topic}/schemaValidationEnforced tenant-admin
DELETE               /admin/v2/persistent/{tenant}/{namespace}/{topic}/policies            tenant-admin
GET POST PUT DELETE  /admin/v2/persistent/{tenant}/{namespace}/{topic}/delayedDelivery     tenant-admin
GET POST DELETE      /admin/v2/persistent/{tenant}/{namespace}/{topic}/deduplicationSnapshotInterval tenant-admin
GET                  /admin/v2/persistent/{tenant}/{namespace}/{topic}/backlogQuotaMap     tenant-admin
POST DELETE          /admin/v2/persistent/{tenant}/{namespace}/{topic}/backlogQuota        tenant-admin
GET POST PUT DELETE  /admin/v2/persistent/{tenant}/{namespace}/{topic}/compactionThreshold tenant-admin
GET PUT              /admin/v2/persistent/{tenant}/{namespace}/{topic}/compaction        tenant-admin
GET                  /admin/v2/persistent/{tenant}/{namespace}/{topic}/offload           tenant-admin
PUT                  /admin/v2/persistent/{tenant}/{namespace}/{topic}/offload           superuser
GET                  /admin/v2/persistent/{tenant}/{namespace}/{topic}/offload/manifest  tenant-admin
POST                 /admin/v2/persistent/{tenant}/{namespace}/{topic}/offload/dropHot   superuser
GET                  /admin/v2/persistent/{tenant}/{namespace}/{topic}/permissions       tenant-admin
POST DELETE          /admin/v2/persistent/{tenant}/{namespace}/{topic}/permissions/{role} tenant-admin
GET                  /admin/v2/persistent/{tenant}/{namespace}/{topic}/subscriptions     consume
PUT DELETE           /admin/v2/persistent/{tenant}/{namespace}/{topic}/subscription/{subscription} consume
GET PUT              /admin/v2/persistent/{tenant}/{namespace}/{topic}/subscription/{subscription}/properties consume
POST                 /admin/v2/persistent/{tenant}/{namespace}/{topic}/subscription/{subscription}/analyzeBacklog consume
GET POST             /admin/v2/persistent/{tenant}/{namespace}/{topic}/subscription/{subscription}/replicatedSubscriptionStatus consume
POST                 /admin/v2/persistent/{tenant}/{namespace}/{topic}/subscription/{subscription}/skip_all consume
POST                 /admin/v2/persistent/{tenant}/{namespace}/{topic}/subscription/{subscription}/skip/{count} consume
POST                 /admin/v2/persistent/{tenant}/{namespace}/{topic}/subscription/{subscription}/expireMessages consume
POST                 /admin/v2/persistent/{tenant}/{namespace}/{topic}/subscription/{subscription}/expireMessages/{seconds} consume
POST                 /admin/v2/persistent/{tenant}/{namespace}/{topic}/all_subscription/expireMessages/{seconds} tenant-admin
POST                 /admin/v2/persistent/{tenant}/{namespace}/{topic}/subscription/{subscription}/resetcursor consume
POST                 /admin/v2/persistent/{tenant}/{namespace}/{topic}/subscription/{subscription}/resetcursor/{timestamp} consume
GET                  /admin/v2/persistent/{tenant}/{namespace}/{topic}/subscription/{subscription}/position/{position} consume
GET                  /admin/v2/persistent/{tenant}/{namespace}/{topic}/ledger/{ledger}/entry/{entry} consume
GET                  /admin/v2/persistent/{tenant}/{namespace}/{topic}/examinemessage        consume

GET                  /admin/v2/scalable/{tenant}/{namespace}                             lookup
GET                  /admin/v2/scalable/{tenant}/{namespace}/{topic}                     lookup
PUT DELETE           /admin/v2/scalable/{tenant}/{namespace}/{topic}                     tenant-admin
GET                  /admin/v2/scalable/{tenant}/{namespace}/{topic}/stats               lookup
GET                  /admin/v2/scalable/{tenant}/{namespace}/{topic}/segments/{segment}/stats lookup
GET                  /admin/v2/scalable/{tenant}/{namespace}/{topic}/history             lookup
POST                 /admin/v2/scalable/{tenant}/{namespace}/{topic}/migrate             superuser
POST                 /admin/v2/scalable/{tenant}/{namespace}/{topic}/split/{segment}     superuser
POST                 /admin/v2/scalable/{tenant}/{namespace}/{topic}/merge/{segments}     superuser
POST                 /admin/v2/scalable/{tenant}/{namespace}/{topic}/rebucket/{segment}  superuser
PUT                  /admin/v2/scalable/{tenant}/{namespace}/{topic}/offload             superuser
GET                  /admin/v2/scalable/{tenant}/{namespace}/{topic}/offload/manifest    tenant-admin
POST                 /admin/v2/scalable/{tenant}/{namespace}/{topic}/offload/dropHot     superuser
GET                  /admin/v2/scalable/{tenant}/{namespace}/{topic}/permissions         tenant-admin
POST DELETE          /admin/v2/scalable/{tenant}/{namespace}/{topic}/permissions/{role}  tenant-admin
GET                  /admin/v2/scalable/{tenant}/{namespace}/{topic}/subscriptions       consume
PUT DELETE           /admin/v2/scalable/{tenant}/{namespace}/{topic}/subscriptions/{subscription} consume
GET POST             /admin/v2/scalable/{tenant}/{namespace}/{topic}/subscriptions/{subscription}/replicatedSubscriptionStatus consume
POST                 /admin/v2/scalable/{tenant}/{namespace}/{topic}/subscriptions/{subscription}/seek consume
POST                 /admin/v2/scalable/{tenant}/{namespace}/{topic}/subscriptions/{subscription}/skip-all consume
GET POST PUT DELETE  /admin/v2/scalable/{tenant}/{namespace}/{topic}/consumerSessionGracePeriod tenant-admin
GET POST DELETE      /admin/v2/scalable/{tenant}/{namespace}/{topic}/autoScalePolicy     tenant-admin
GET                  /admin/v2/scalable/{tenant}/{namespace}/{topic}/scaling             lookup
GET POST PUT DELETE  /admin/v2/scalable/{tenant}/{namespace}/{topic}/replicationKeyHash  tenant-admin
POST                 /admin/v2/scalable/{tenant}/{namespace}/{topic}/replication/incarnation superuser

GET                  /admin/v2/schemas/{tenant}/{namespace}/{topic}/schema               lookup
POST                 /admin/v2/schemas/{tenant}/{namespace}/{topic}/schema               produce
DELETE               /admin/v2/schemas/{tenant}/{namespace}/{topic}/schema               tenant-admin
GET                  /admin/v2/schemas/{tenant}/{namespace}/{topic}/schema/{version}     lookup
GET                  /admin/v2/schemas/{tenant}/{namespace}/{topic}/schemas              lookup
POST                 /admin/v2/schemas/{tenant}/{namespace}/{topic}/compatibility        lookup
POST                 /admin/v2/schemas/{tenant}/{namespace}/{topic}/version              lookup

GET PUT DELETE       /admin/v2/segments/{tenant}/{namespace}/{topic}/{descriptor}        superuser
POST                 /admin/v2/segments/{tenant}/{namespace}/{topic}/{descriptor}/terminate superuser
GET                  /admin/v2/segments/{tenant}/{namespace}/{topic}/{descriptor}/stats  superuser
GET                  /admin/v2/segments/{tenant}/{namespace}/{topic}/{descriptor}/internalStats superuser
PUT                  /admin/v2/segments/{tenant}/{namespace}/{topic}/{descriptor}/offload superuser
GET                  /admin/v2/segments/{tenant}/{namespace}/{topic}/{descriptor}/offload/manifest superuser
POST                 /admin/v2/segments/{tenant}/{namespace}/{topic}/{descriptor}/offload/dropHot superuser
PUT DELETE           /admin/v2/segments/{tenant}/{namespace}/{topic}/{descriptor}/subscription/{subscription} superuser
GET                  /admin/v2/segments/{tenant}/{namespace}/{topic}/{descriptor}/subscription/{subscription}/backlog superuser
POST                 /admin/v2/segments/{tenant}/{namespace}/{topic}/{descriptor}/subscription/{subscription}/seek superuser
POST                 /admin/v2/segments/{tenant}/{namespace}/{topic}/{descriptor}/subscription/{subscription}/skip-all superuser

GET DELETE           /admin/v2/transactions/transaction-keys                             own
GET DELETE           /admin/v2/transactions/transaction-keys/{key}                       own
GET                  /admin/v3/transactions/headers/{state}                              superuser
GET                  /admin/v3/transactions/records/{domain}/{tenant}/{namespace}/{topic} superuser
GET                  /admin/v3/transactions/coordinators                                 superuser
GET                  /admin/v3/transactions/coordinatorStats                             superuser
GET                  /admin/v3/transactions/coordinatorInternalStats/{coordinator}           superuser
POST                 /admin/v3/transactions/transactionCoordinator/replicas                 superuser
GET                  /admin/v3/transactions/transactionBufferStats/{tenant}/{namespace}/{topic} tenant-admin
GET                  /admin/v3/transactions/transactionInBufferStats/{tenant}/{namespace}/{topic}/{most}/{least} tenant-admin
GET                  /admin/v3/transactions/transactionBufferInternalStats/{tenant}/{namespace}/{topic} tenant-admin
GET                  /admin/v3/transactions/pendingAckStats/{tenant}/{namespace}/{topic}/{subscription} tenant-admin
GET                  /admin/v3/transactions/transactionInPendingAckStats/{tenant}/{namespace}/{topic}/{subscription}/{most}/{least} tenant-admin
GET                  /admin/v3/transactions/positionStatsInPendingAck/{tenant}/{namespace}/{topic}/{subscription}/{ledger}/{entry} tenant-admin
GET                  /admin/v3/transactions/pendingAckInternalStats/{tenant}/{namespace}/{topic}/{subscription} tenant-admin
GET                  /admin/v3/transactions/slowTransactions/{timeout}                   own
GET                  /admin/v3/transactions/transactionMetadata/{most}/{least}           own
POST                 /admin/v3/transactions/abortTransaction/{most}/{least}              own
GET                  /admin/v3/transactions/open                                         own
GET                  /admin/v3/transactions/transaction/{most}/{least}                   own
POST                 /admin/v3/transactions/end/{most}/{least}                           own
GET                  /admin/v3/transactions/why/{domain}/{tenant}/{namespace}/{topic}    lookup

GET                  /lookup/v2/topic/{domain}/{tenant}/{namespace}/{topic}              lookup
"""  # noqa: E501 - a line for each path
Route = tuple[str, str]
"""Method and path of a route."""


def rules() -> Mapping[Route, Need]:
    """The table and what is not served, by method and path.

    Raises ValueError for a line that is none or comes twice.
    """
    found: dict[Route, Need] = {}
    for line in filter(None, TABLE.splitlines()):
        *methods, path, who = line.split()
        for method in methods:
            if (method, path) in found:
                raise ValueError(f"The access table has {method} {path} twice.")
            found[method, path] = _NEEDS[who]
    for route in not_served.paths():
        found.setdefault(route, Need.AUTHENTICATED)
    return found


def require_rules(router: web.UrlDispatcher) -> None:
    """Raise ValueError if a route has no access rule."""
    known = rules()
    missing = sorted(set(routes_of(router)) - known.keys())
    if missing:
        raise ValueError(f"These routes have no access rule: {missing}.  Add them to TABLE.")


def routes_of(router: web.UrlDispatcher) -> Iterator[Route]:
    """Method and path of every route; HEAD goes by GET."""
    for route in router.routes():
        if route.resource is not None and route.method != hdrs.METH_HEAD:
            yield route.method, _path(route.resource)


def _path(resource: web.AbstractResource) -> str:
    return resource.canonical.rstrip("/")


class NotAuthenticated(RestError):
    """The request has no credentials, and needs a role."""

    def __init__(self) -> None:
        super().__init__(
            HTTPStatus.UNAUTHORIZED, "This needs a role: send credentials, in Authorization."
        )


class AccessCheck:
    """Checks requests against the table: the middleware `check`.

    Where authentication alone is on, every role may make every request.
    """

    def __init__(self) -> None:
        self._rules = rules()

    @web.middleware
    async def check(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Refuse a request that its role may not make: 401 without a role, else 403."""
        broker = request.app[BROKER]
        if broker.authenticator is None and broker.authorizer is None:
            return await handler(request)
        questions = self._questions(request)
        if not _roles(request) and questions[0].need is not Need.NOTHING:
            # With a dry run too: it is about what roles may do, not about who is there.
            raise NotAuthenticated
        if broker.authorizer is None:
            return await handler(request)
        await require_access(request, questions)
        if request.method in (hdrs.METH_GET, hdrs.METH_HEAD):
            return await handler(request)
        return await _audited(request, handler)

    def _questions(self, request: web.Request) -> Sequence[Access]:
        resource = request.match_info.route.resource
        method = request.method if request.method != hdrs.METH_HEAD else hdrs.METH_GET
        route = method, "" if resource is None else _path(resource)
        need = self._rules.get(route)
        if need is None:
            # There is no such path: only clients with a role learn that.
            return (Access(Need.AUTHENTICATED),)
        if route == _METRICS:
            need = _NEEDS[request.app[BROKER].settings.metrics_access]
        return (question_of(need, request.match_info),)


async def require_access(request: web.Request, questions: Sequence[Access]) -> None:
    """Raise `AccessDenied` unless the request may have all these accesses; audit a denial.

    With a dry run nothing is refused, and what would be is in the log.
    """
    broker = request.app[BROKER]
    if broker.authorizer is None:
        return
    roles = _roles(request)
    access = [described(each) for each in questions[:DENIALS_SHOWN]]
    if await broker.authorizer.decide(roles, questions):
        request.setdefault(_PERMITTED, []).extend(access)
        return
    dry_run = broker.settings.authorization == "dry_run"
    event = DENIED_IN_DRY_RUN if dry_run else DENIED
    broker.audit.denied(
        event,
        roles,
        request.remote,
        dry_run=dry_run,
        operation=_operation(request),
        access=access,
    )
    if not dry_run:
        raise access_denied(questions)


async def visible_owner(request: web.Request, everything: Access = _EVERYTHING) -> str | None:
    """The role to which a request is limited: it sees and changes only what this role owns.

    None: it is not limited, because it has the access `everything`, or because authorization is off
    or a dry run.  A dry run logs that the request would be limited.
    """
    broker = request.app[BROKER]
    principal: Principal | None = request.get(PRINCIPAL)
    if broker.authorizer is None or principal is None:
        return None
    if await broker.authorizer.decide(principal.roles, (everything,)):
        return None
    if broker.settings.authorization != "dry_run":
        return principal.role
    broker.audit.denied(
        DENIED_IN_DRY_RUN,
        principal.roles,
        request.remote,
        dry_run=True,
        operation=_operation(request),
        access=[described(everything)],
    )
    return None


async def _audited(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Serve a request that may change something, and log how it ended."""

    def log_outcome(outcome: int | str) -> None:
        if permitted := request.get(_PERMITTED):  # Else a dry run has logged what it lacks.
            request.app[BROKER].audit.permitted(
                "changed_by_request",
                _roles(request),
                request.remote,
                operation=_operation(request),
                access=permitted[:DENIALS_SHOWN],
                outcome=outcome,
            )

    try:
        response = await handler(request)
    except AccessDenied:
        raise  # It is in the log already.
    except (asyncio.CancelledError, ConnectionResetError):
        log_outcome("no answer")  # The client has gone, or the broker stops.
        raise
    except Exception as error:
        log_outcome(int(status_of_failure(error)))
        raise
    log_outcome(response.status)
    return response


def _operation(request: web.Request) -> str:
    return f"{request.method} {request.path}"


def _roles(request: web.Request) -> Sequence[str]:
    principal = request.get(PRINCIPAL)
    return () if principal is None else principal.roles


def question_of(need: Need, path: Mapping[str, str]) -> Access:
    """The question of a need about what the parts of a path name."""
    if need in (Need.NOTHING, Need.AUTHENTICATED, Need.SUPERUSER):
        return Access(need)
    # Also checks the tenant's name: one with a slash would be the path of another record.
    namespace = NamespaceName(path["tenant"], path.get("namespace", "default"))
    if "namespace" not in path:
        return on_tenant(namespace.tenant)
    subscription = path.get("subscription")
    if "topic" not in path:
        return on_namespace(need, namespace, subscription)
    domain = path.get("domain", TopicDomain.TOPIC.value)
    topic = parse_topic_name(f"{domain}://{namespace}/{path['topic']}")
    if need is Need.LOOKUP and names_coordinators(topic):
        # Every role may use transactions, and v4 clients find their coordinators by this name.
        return Access(Need.AUTHENTICATED)
    if need is Need.CONSUME and subscription is not None and is_replicator_cursor(subscription):
        # What is skipped there is missing in another cluster, for all who consume it there.
        return on_topic(Need.TENANT_ADMIN, topic)
    return on_topic(need, topic, subscription)
