"""`/admin/v2/namespaces`: namespaces and the policies that this broker keeps.

Each policy is one member of the namespace's record under Pulsar's own name; GET of one that is not
set answers 204, DELETE takes it back to the broker's setting.
"""

from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus

from aiohttp import web

from broker.admin.keys import BROKER
from broker.admin.rest import RestError, body_of, conflict, mapping_of, namespace_of, no_content
from broker.schema_compatibility import CompatibilityStrategy

BASE = "/admin/v2/namespaces"
NAMESPACE = BASE + "/{tenant}/{namespace}"


def _is_flag(value: object) -> bool:
    return isinstance(value, bool)


def _is_retention(value: object) -> bool:
    return isinstance(value, dict) and all(
        isinstance(value.get(name), int) and value[name] >= -1
        for name in ("retentionTimeInMinutes", "retentionSizeInMB")
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_auto_creation(value: object) -> bool:
    return isinstance(value, dict) and isinstance(value.get("allowAutoTopicCreation"), bool)


def _is_strategy(value: object) -> bool:
    return isinstance(value, str) and value in CompatibilityStrategy.__members__


@dataclass(frozen=True, slots=True)
class _Policy:
    """One policy: its path, its member in the record, what it may be."""

    path: str
    member: str
    valid: Callable[[object], bool]
    wanted: str


POLICIES = (
    _Policy(
        "retention",
        "retention_policies",
        _is_retention,
        "retentionTimeInMinutes and retentionSizeInMB, each -1 or more",
    ),
    _Policy("deduplication", "deduplicationEnabled", _is_flag, "true or false"),
    _Policy(
        "autoTopicCreation",
        "autoTopicCreationOverride",
        _is_auto_creation,
        "an object with allowAutoTopicCreation true or false",
    ),
    _Policy(
        "offloadDeletionLagMs",
        "offload_deletion_lag_ms",
        _is_number,
        "a number of milliseconds, or -1",
    ),
    _Policy("offloadThreshold", "offload_threshold", _is_number, "a number of bytes, or -1"),
    _Policy(
        "schemaCompatibilityStrategy",
        "schema_compatibility_strategy",
        _is_strategy,
        "one of " + ", ".join(CompatibilityStrategy.__members__),
    ),
)


def routes() -> list[web.RouteDef]:
    """The resource's routes."""
    found = [
        web.get(BASE + "/{tenant}", list_namespaces),
        web.get(NAMESPACE, get),
        web.put(NAMESPACE, create),
        web.delete(NAMESPACE, delete),
        web.get(NAMESPACE + "/topics", topics),
        web.get(NAMESPACE + "/bundles", bundles),
        web.put(NAMESPACE + "/unload", unload),
        web.get(NAMESPACE + "/scalableTopicAutoScalePolicy", auto_scale_policy),
    ]
    for policy in POLICIES:
        path = f"{NAMESPACE}/{policy.path}"
        handlers = _PolicyHandlers(policy)
        found += [
            web.get(path, handlers.get),
            web.post(path, handlers.set),
            web.put(path, handlers.set),
            web.delete(path, handlers.remove),
        ]
    return found


class _PolicyHandlers:
    """GET, POST (or PUT) and DELETE of one policy."""

    def __init__(self, policy: _Policy) -> None:
        self._policy = policy

    async def get(self, request: web.Request) -> web.Response:
        """GET: the value, 204 when not set."""
        policies = await request.app[BROKER].namespaces.require(namespace_of(request))
        value = policies.raw.get(self._policy.member)
        return no_content() if value is None else web.json_response(value)

    async def set(self, request: web.Request) -> web.Response:
        """POST or PUT: the value as body."""
        value = await body_of(request)
        if not self._policy.valid(value):
            raise RestError(
                HTTPStatus.PRECONDITION_FAILED,
                f"{self._policy.path} cannot be {value!r}: give {self._policy.wanted}.",
            )
        await request.app[BROKER].namespaces.change(
            namespace_of(request), lambda record: record.update({self._policy.member: value})
        )
        return no_content()

    async def remove(self, request: web.Request) -> web.Response:
        """DELETE: back to the broker's setting."""
        await request.app[BROKER].namespaces.change(
            namespace_of(request), lambda record: record.pop(self._policy.member, None)
        )
        return no_content()


async def list_namespaces(request: web.Request) -> web.Response:
    """GET `/{tenant}`: `tenant/namespace` of each."""
    return web.json_response(
        await request.app[BROKER].namespaces.list(request.match_info["tenant"])
    )


async def get(request: web.Request) -> web.Response:
    """GET: the policies that are set."""
    policies = await request.app[BROKER].namespaces.require(namespace_of(request))
    return web.json_response(dict(policies.raw))


async def create(request: web.Request) -> web.Response:
    """PUT: policies as body, if any; 409 if it exists, 404 without its tenant."""
    policies = await mapping_of(request)
    await request.app[BROKER].namespaces.create(namespace_of(request), policies)
    return no_content()


async def delete(request: web.Request) -> web.Response:
    """DELETE: 409 while it has topics."""
    broker = request.app[BROKER]
    name = namespace_of(request)
    await broker.namespaces.require(name)
    if await broker.topics.list_names(name) or await broker.scalable.list(name, {}):
        raise conflict(f"The namespace {name} still has topics: delete them first.")
    await broker.namespaces.delete(name)
    return no_content()


async def topics(request: web.Request) -> web.Response:
    """GET: persistent topics; scalable ones are listed by /admin/v2/scalable."""
    broker = request.app[BROKER]
    await broker.namespaces.require(namespace_of(request))
    return web.json_response(await broker.topics.list_names(namespace_of(request)))


async def unload(request: web.Request) -> web.Response:
    """PUT: close every topic and segment, on whichever broker; clients come back by themselves."""
    broker = request.app[BROKER]
    name = namespace_of(request)
    await broker.namespaces.require(name)
    await broker.topics.elsewhere.unload_namespace(name)
    return no_content()


async def bundles(request: web.Request) -> web.Response:
    """GET: one bundle; topics are owned one by one, and not by bundles."""
    policies = await request.app[BROKER].namespaces.require(namespace_of(request))
    return web.json_response(policies.raw.get("bundles"))


async def auto_scale_policy(request: web.Request) -> web.Response:
    """GET: splitting and merging are by hand."""
    await request.app[BROKER].namespaces.require(namespace_of(request))
    return web.json_response({"enabled": False})
