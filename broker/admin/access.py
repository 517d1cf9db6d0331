"""The access rule of every REST path, and the check of each request against it.

One table, `TABLE`: methods, path, and who may ask.  `produce`, `consume` and `lookup` (either of
the two) are asked on the topic in the path, or else on its namespace; `consume` by the subscription
in the path, if there is one.  An application with a route that has no rule is not built.
"""

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import Final

from aiohttp import hdrs, web

from broker.admin.keys import BROKER
from broker.admin.rest import RestError
from broker.policies.authorizer import (
    DENIALS_SHOWN,
    DENIED,
    DENIED_IN_DRY_RUN,
    access_denied,
    described,
)
from magnetar.protocol.names import NamespaceName, TopicDomain, parse_topic_name
from security import audit
from security.access import Access, Need, on_namespace, on_tenant, on_topic
from security.identity import Principal

PRINCIPAL: Final = web.RequestKey("principal", Principal)
"""For whom a request acts; not there without authentication."""

_NEEDS: Final[Mapping[str, Need]] = {
    "anybody": Need.NOTHING,
    "any-role": Need.AUTHENTICATED,
    "superuser": Need.SUPERUSER,
    "tenant-admin": Need.TENANT_ADMIN,
    "produce": Need.PRODUCE,
    "consume": Need.CONSUME,
    "lookup": Need.LOOKUP,
}

TABLE: Final = """
GET                  /metrics                                                            anybody
GET                  /admin/v2                                                           any-role

GET                  /admin/v2/brokers/ready                                             anybody
GET                  /admin/v2/brokers/version                                           any-role
GET                  /admin/v2/brokers                                                   superuser
GET                  /admin/v2/brokers/health                                            superuser
GET                  /admin/v2/brokers/leaderBroker                                      superuser
GET                  /admin/v2/brokers/configuration/runtime                             superuser
GET                  /admin/v2/brokers/internal-configuration                            superuser
GET                  /admin/v2/brokers/{cluster}                                         superuser
GET                  /admin/v2/brokers/{cluster}/{broker}/ownedNamespaces                superuser
GET                  /admin/v2/broker-stats/load-report                                  superuser
GET                  /admin/v2/broker-channel                                            superuser
GET                  /admin/v2/clusters                                                  any-role
GET                  /admin/v2/clusters/{cluster}                                        superuser
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
GET POST PUT DELETE  /admin/v2/namespaces/{tenant}/{namespace}/retention                 tenant-admin
GET POST PUT DELETE  /admin/v2/namespaces/{tenant}/{namespace}/deduplication             tenant-admin
GET POST PUT DELETE  /admin/v2/namespaces/{tenant}/{namespace}/autoTopicCreation         tenant-admin
GET POST PUT DELETE  /admin/v2/namespaces/{tenant}/{namespace}/offloadDeletionLagMs      tenant-admin
GET POST PUT DELETE  /admin/v2/namespaces/{tenant}/{namespace}/offloadThreshold          tenant-admin
GET POST PUT DELETE  /admin/v2/namespaces/{tenant}/{namespace}/schemaCompatibilityStrategy tenant-admin
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

GET                  /admin/v2/persistent/{tenant}/{namespace}                           lookup
GET                  /admin/v2/persistent/{tenant}/{namespace}/partitioned               lookup
PUT DELETE           /admin/v2/persistent/{tenant}/{namespace}/{topic}                   tenant-admin
GET                  /admin/v2/persistent/{tenant}/{namespace}/{topic}/partitions        lookup
PUT POST DELETE      /admin/v2/persistent/{tenant}/{namespace}/{topic}/partitions        tenant-admin
GET                  /admin/v2/persistent/{tenant}/{namespace}/{topic}/partitioned-stats lookup
GET                  /admin/v2/persistent/{tenant}/{namespace}/{topic}/stats             lookup
GET                  /admin/v2/persistent/{tenant}/{namespace}/{topic}/internalStats     lookup
GET                  /admin/v2/persistent/{tenant}/{namespace}/{topic}/lastMessageId     lookup
POST                 /admin/v2/persistent/{tenant}/{namespace}/{topic}/terminate         tenant-admin
PUT                  /admin/v2/persistent/{tenant}/{namespace}/{topic}/unload            tenant-admin
GET                  /admin/v2/persistent/{tenant}/{namespace}/{topic}/properties        lookup
PUT DELETE           /admin/v2/persistent/{tenant}/{namespace}/{topic}/properties        tenant-admin
GET                  /admin/v2/persistent/{tenant}/{namespace}/{topic}/offload           tenant-admin
PUT                  /admin/v2/persistent/{tenant}/{namespace}/{topic}/offload           superuser
GET                  /admin/v2/persistent/{tenant}/{namespace}/{topic}/offload/manifest  tenant-admin
POST                 /admin/v2/persistent/{tenant}/{namespace}/{topic}/offload/dropHot   superuser
GET                  /admin/v2/persistent/{tenant}/{namespace}/{topic}/permissions       tenant-admin
POST DELETE          /admin/v2/persistent/{tenant}/{namespace}/{topic}/permissions/{role} tenant-admin
GET                  /admin/v2/persistent/{tenant}/{namespace}/{topic}/subscriptions     consume
PUT DELETE           /admin/v2/persistent/{tenant}/{namespace}/{topic}/subscription/{subscription} consume
POST                 /admin/v2/persistent/{tenant}/{namespace}/{topic}/subscription/{subscription}/skip_all consume
POST                 /admin/v2/persistent/{tenant}/{namespace}/{topic}/subscription/{subscription}/resetcursor consume
POST                 /admin/v2/persistent/{tenant}/{namespace}/{topic}/subscription/{subscription}/resetcursor/{timestamp} consume
GET                  /admin/v2/persistent/{tenant}/{namespace}/{topic}/subscription/{subscription}/position/{position} consume

GET                  /admin/v2/scalable/{tenant}/{namespace}                             lookup
GET                  /admin/v2/scalable/{tenant}/{namespace}/{topic}                     lookup
PUT DELETE           /admin/v2/scalable/{tenant}/{namespace}/{topic}                     tenant-admin
GET                  /admin/v2/scalable/{tenant}/{namespace}/{topic}/stats               lookup
GET                  /admin/v2/scalable/{tenant}/{namespace}/{topic}/history             lookup
POST                 /admin/v2/scalable/{tenant}/{namespace}/{topic}/split/{segment}     superuser
POST                 /admin/v2/scalable/{tenant}/{namespace}/{topic}/merge/{first}/{second} superuser
PUT                  /admin/v2/scalable/{tenant}/{namespace}/{topic}/offload             superuser
GET                  /admin/v2/scalable/{tenant}/{namespace}/{topic}/offload/manifest    tenant-admin
POST                 /admin/v2/scalable/{tenant}/{namespace}/{topic}/offload/dropHot     superuser
GET                  /admin/v2/scalable/{tenant}/{namespace}/{topic}/permissions         tenant-admin
POST DELETE          /admin/v2/scalable/{tenant}/{namespace}/{topic}/permissions/{role}  tenant-admin
GET                  /admin/v2/scalable/{tenant}/{namespace}/{topic}/subscriptions       consume
PUT DELETE           /admin/v2/scalable/{tenant}/{namespace}/{topic}/subscriptions/{subscription} consume
POST                 /admin/v2/scalable/{tenant}/{namespace}/{topic}/subscriptions/{subscription}/seek consume
POST                 /admin/v2/scalable/{tenant}/{namespace}/{topic}/subscriptions/{subscription}/skip-all consume
GET POST DELETE      /admin/v2/scalable/{tenant}/{namespace}/{topic}/autoScalePolicy     tenant-admin

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

GET DELETE           /admin/v2/transactions/transaction-keys                             superuser
GET DELETE           /admin/v2/transactions/transaction-keys/{key}                       superuser
GET                  /admin/v3/transactions/headers/{state}                              superuser
GET                  /admin/v3/transactions/records/{domain}/{tenant}/{namespace}/{topic} superuser
GET                  /admin/v3/transactions/coordinators                                 superuser
GET                  /admin/v3/transactions/coordinatorStats                             superuser
GET                  /admin/v3/transactions/slowTransactions/{timeout}                   superuser
GET                  /admin/v3/transactions/transactionMetadata/{most}/{least}           superuser
POST                 /admin/v3/transactions/abortTransaction/{most}/{least}              superuser
GET                  /admin/v3/transactions/open                                         superuser
GET                  /admin/v3/transactions/transaction/{most}/{least}                   superuser
POST                 /admin/v3/transactions/end/{most}/{least}                           superuser
GET                  /admin/v3/transactions/why/{domain}/{tenant}/{namespace}/{topic}    lookup

GET                  /lookup/v2/topic/{domain}/{tenant}/{namespace}/{topic}              lookup
"""  # noqa: E501 - a line for each path
Route = tuple[str, str]
"""Method and path of a route."""


def rules() -> Mapping[Route, Need]:
    """The table, by method and path.  Raises ValueError for a line that is none or comes twice."""
    found: dict[Route, Need] = {}
    for line in filter(None, TABLE.splitlines()):
        *methods, path, who = line.split()
        for method in methods:
            if (method, path) in found:
                raise ValueError(f"The access table has {method} {path} twice.")
            found[method, path] = _NEEDS[who]
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
    async def check(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Refuse a request that its role may not make: 401 without a role, else 403."""
        broker = request.app[BROKER]
        if broker.authenticator is None and broker.authorizer is None:
            return await handler(request)
        questions = self._questions(request)
        if not _roles(request) and questions[0].need is not Need.NOTHING:
            # With a dry run too: it is about what roles may do, not about who is there.
            raise NotAuthenticated
        if broker.authorizer is not None:
            await require_access(request, questions)
        return await handler(request)

    def _questions(self, request: web.Request) -> Sequence[Access]:
        resource = request.match_info.route.resource
        method = request.method if request.method != hdrs.METH_HEAD else hdrs.METH_GET
        need = None if resource is None else self._rules.get((method, _path(resource)))
        if need is None:
            # There is no such path: only who has a role is told so.
            return (Access(Need.AUTHENTICATED),)
        return (question_of(need, request.match_info),)


async def require_access(request: web.Request, questions: Sequence[Access]) -> None:
    """Raise `AccessDenied` unless the request may have all these accesses; audit it.

    With a dry run nothing is refused, and what would be is in the log.
    """
    broker = request.app[BROKER]
    if broker.authorizer is None:
        return
    roles = _roles(request)
    asked: dict[str, object] = {
        "operation": f"{request.method} {request.path}",
        "access": [described(each) for each in questions[:DENIALS_SHOWN]],
    }
    if await broker.authorizer.decide(roles, questions):
        if request.method not in (hdrs.METH_GET, hdrs.METH_HEAD):
            audit.permitted("changed_by_request", roles, request.remote, **asked)
        return
    dry_run = broker.settings.authorization == "dry_run"
    event = DENIED_IN_DRY_RUN if dry_run else DENIED
    audit.denied(event, roles, request.remote, dry_run=dry_run, **asked)
    if not dry_run:
        raise access_denied(questions)


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
    return on_topic(need, parse_topic_name(f"{domain}://{namespace}/{path['topic']}"), subscription)
