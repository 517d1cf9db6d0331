"""Paths of Apache Pulsar's REST that make no sense here, or are not served yet: 501 and a sentence.

`TABLE` has a line for each path that Pulsar's admin library sends: methods, path, and a word for
the reason, which is in `REASONS`.  A name of several parts at the end of a path stands for all that
is below.  These routes come last: a path that is served is never refused here.
"""

import re
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from typing import Final

from aiohttp import web

from broker.admin.rest import Handler, RestError

REASONS: Final[Mapping[str, str]] = {
    "affinity": "Affinity to groups of bookies is not served: ledgers may be on every bookie.",
    "anti-affinity": "Anti-affinity groups are not served: topics are placed by load alone.",
    "bookies": "Racks of bookies are not served: set them where the bookies are run.",
    "bundles": "Nothing is done with single bundles, as each topic has an owner of its own: "
    "name the topic, or the whole namespace.",
    "dispatcher-pause": "Dispatching does not pause for the state of acknowledgements, which is "
    "bounded in another way: leave it out.",
    "dynamic": "Settings do not change while a broker runs: change its file or its environment, "
    "and start it again.",
    "entry-filters": "Entry filters are Java classes inside a broker, which this one has none of: "
    "filter in the consumer.",
    "failure-domains": "Failure domains are not served: topics are placed by load alone.",
    "functions": "Functions are not served: run the function as a program with a client.",
    "index": "Messages have no index of the whole topic here, as in Pulsar without "
    "AppendIndexMetadataInterceptor: seek by time or by message id.",
    "io": "IO connectors, sources and sinks, are not served: run them as programs with a client.",
    "isolation": "Isolation policies are not served: topics are placed by load alone.",
    "java": "This broker is no Java program and has none of these statistics: read /metrics.",
    "metadata-migration": "Metadata is not moved to another store while brokers run.",
    "migration": "Clients are not sent to another cluster: give them its URL.",
    "offload-policies": "The place of offloaded data is the broker's setting offload_url: set "
    "offloadThreshold and offloadDeletionLagMs of the namespace instead.",
    "packages": "Packages are not served, as there are no functions.",
    "property-labels": "Properties of topics are no labels of metrics: leave the policy out.",
    "proxy": "This is a broker and no proxy: ask a proxy for its own statistics.",
    "quotas": "Resource quotas of bundles are not served, as there are no bundles.",
    "replication-version": "A namespace's list of clusters has no version: read the list.",
    "resource-groups": "Resource groups are not served: set the rates of namespaces and topics.",
    "sequence-ids": "The broker saves sequence ids by the number and the size of messages since "
    "the last time, and each minute at the latest.",
    "schema-metadata": "The stored records of schemas are not shown: ask for the schemas.",
    "shadow": "Shadow topics are not served: subscribe to the source topic itself.",
    "shutdown": "A broker is not stopped over REST: send it SIGTERM, which drains it.",
    "worker": "There is no functions worker here, as functions are not served.",
}
"""The sentence for each word in `TABLE`, and in `refused_policies.POLICIES`."""

TABLE: Final = """
GET                 /admin/v2/bookies/{below:.+}                                        bookies
POST DELETE         /admin/v2/bookies/{below:.+}                                        bookies
GET                 /admin/v2/broker-stats/metrics                                      java
GET                 /admin/v2/broker-stats/mbeans                                       java
GET                 /admin/v2/broker-stats/bookieops                                    java
GET                 /admin/v2/broker-stats/allocator-stats/{allocator}                  java
GET                 /admin/v2/brokers/configuration                                     dynamic
GET                 /admin/v2/brokers/configuration/values                              dynamic
DELETE              /admin/v2/brokers/configuration/{setting}                           dynamic
POST                /admin/v2/brokers/configuration/{setting}/{value}                   dynamic
POST                /admin/v2/brokers/shutdown                                          shutdown
GET POST            /admin/v2/clusters/{cluster}/migrate                                migration
GET                 /admin/v2/clusters/{cluster}/failureDomains                         failure-domains
GET POST DELETE     /admin/v2/clusters/{cluster}/failureDomains/{name}                  failure-domains
GET                 /admin/v2/clusters/{cluster}/namespaceIsolationPolicies             isolation
GET POST DELETE     /admin/v2/clusters/{cluster}/namespaceIsolationPolicies/{name}      isolation
GET                 /admin/v2/clusters/{cluster}/namespaceIsolationPolicies/brokers/{broker} isolation
POST                /admin/v2/metadata/migration/start                                  metadata-migration
GET                 /admin/v2/metadata/migration/status                                 metadata-migration

GET                 /admin/v2/namespaces/{cluster}/antiAffinity/{group}                 anti-affinity
GET POST DELETE     /admin/v2/namespaces/{tenant}/{namespace}/antiAffinity              anti-affinity
GET                 /admin/v2/namespaces/{tenant}/{namespace}/configversion             replication-version
POST                /admin/v2/namespaces/{tenant}/{namespace}/migration                 migration
GET POST DELETE     /admin/v2/namespaces/{tenant}/{namespace}/allowedTopicPropertyKeysForMetrics property-labels
GET POST DELETE     /admin/v2/namespaces/{tenant}/{namespace}/dispatcherPauseOnAckStatePersistent dispatcher-pause
GET POST DELETE     /admin/v2/namespaces/{tenant}/{namespace}/entryFilters              entry-filters
GET POST            /admin/v2/namespaces/{tenant}/{namespace}/offloadPolicies           offload-policies
DELETE              /admin/v2/namespaces/{tenant}/{namespace}/removeOffloadPolicies     offload-policies
GET PUT             /admin/v2/namespaces/{tenant}/{namespace}/offloadThresholdInSeconds offload-policies
GET POST DELETE     /admin/v2/namespaces/{tenant}/{namespace}/persistence/bookieAffinity affinity
GET DELETE          /admin/v2/namespaces/{tenant}/{namespace}/resourcegroup             resource-groups
POST                /admin/v2/namespaces/{tenant}/{namespace}/resourcegroup/{group}     resource-groups
DELETE              /admin/v2/namespaces/{tenant}/{namespace}/{bundle:0x[0-9a-f]+_0x[0-9a-f]+} bundles
POST                /admin/v2/namespaces/{tenant}/{namespace}/{bundle:0x[0-9a-f]+_0x[0-9a-f]+}/clearBacklog bundles
POST                /admin/v2/namespaces/{tenant}/{namespace}/{bundle:0x[0-9a-f]+_0x[0-9a-f]+}/clearBacklog/{subscription} bundles
PUT                 /admin/v2/namespaces/{tenant}/{namespace}/{bundle:0x[0-9a-f]+_0x[0-9a-f]+}/split bundles
GET                 /admin/v2/namespaces/{tenant}/{namespace}/{bundle:0x[0-9a-f]+_0x[0-9a-f]+}/topicHashPositions bundles
PUT                 /admin/v2/namespaces/{tenant}/{namespace}/{bundle:0x[0-9a-f]+_0x[0-9a-f]+}/unload bundles
POST                /admin/v2/namespaces/{tenant}/{namespace}/{bundle:0x[0-9a-f]+_0x[0-9a-f]+}/unsubscribe/{subscription} bundles

GET                 /admin/v2/non-persistent/{tenant}/{namespace}/{bundle:0x[0-9a-f]+_0x[0-9a-f]+} bundles
GET                 /admin/v2/persistent/{tenant}/{namespace}/{topic}/getMessageIdByIndex index
GET POST DELETE     /admin/v2/persistent/{tenant}/{namespace}/{topic}/dispatcherPauseOnAckStatePersistent dispatcher-pause
GET POST DELETE     /admin/v2/persistent/{tenant}/{namespace}/{topic}/entryFilters      entry-filters
GET POST DELETE     /admin/v2/persistent/{tenant}/{namespace}/{topic}/offloadPolicies   offload-policies
GET PUT DELETE      /admin/v2/persistent/{tenant}/{namespace}/{topic}/shadowTopics      shadow

GET POST            /admin/v2/resource-quotas                                           quotas
GET POST DELETE     /admin/v2/resource-quotas/{below:.+}                                quotas
GET                 /admin/v2/resourcegroups                                            resource-groups
GET PUT DELETE      /admin/v2/resourcegroups/{group}                                    resource-groups
GET                 /admin/v2/schemas/{tenant}/{namespace}/{topic}/metadata             schema-metadata
GET PUT             /admin/v2/worker/{below:.+}                                         worker
GET                 /admin/v2/worker-stats/{below:.+}                                   worker
GET POST PUT DELETE /admin/v3/functions/{below:.+}                                      functions
GET POST PUT DELETE /admin/v3/packages/{below:.+}                                       packages
GET POST PUT DELETE /admin/v3/sink/{below:.+}                                           io
GET POST PUT DELETE /admin/v3/source/{below:.+}                                         io
GET                 /lookup/v2/topic/{domain}/{tenant}/{namespace}/{topic}/bundle       bundles
GET                 /proxy-stats/{below:.+}                                             proxy
"""  # noqa: E501 - a line for each path
SHADOW_SOURCE: Final = "PULSAR.SHADOW_SOURCE"
"""The property that makes a new topic a shadow topic in Pulsar."""
_PATTERN: Final = re.compile(r":[^}]*")


def not_served(reason: str) -> RestError:
    """The error with status 501 for a word of `REASONS`."""
    return RestError(HTTPStatus.NOT_IMPLEMENTED, REASONS[reason])


def require_no_shadow(properties: Mapping[str, str]) -> None:
    """Raise 501 for the properties of a shadow topic."""
    if SHADOW_SOURCE in properties:
        raise not_served("shadow")


def _refusing(reason: str) -> Handler:
    async def refuse(_: web.Request) -> web.StreamResponse:
        raise not_served(reason)

    return refuse


HANDLERS: Final[Mapping[str, Handler]] = {reason: _refusing(reason) for reason in REASONS}
"""The handler for each word in `TABLE`."""


def is_served(route: web.AbstractRoute) -> bool:
    """Whether a route is none of these."""
    return route.handler not in HANDLERS.values()


def paths() -> Iterator[tuple[str, str]]:
    """Method and path of each route, the path without its patterns."""
    for method, path, _ in _lines():
        yield method, _PATTERN.sub("", path)


def routes() -> list[web.RouteDef]:
    """The routes, which come after all that are served."""
    return [web.route(method, path, HANDLERS[reason]) for method, path, reason in _lines()]


def _lines() -> Iterator[tuple[str, str, str]]:
    for line in filter(None, TABLE.splitlines()):
        *methods, path, reason = line.split()
        for method in methods:
            yield method, path, reason
