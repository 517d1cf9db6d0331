"""REST requests against the access table, and grants over REST."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web
from structlog.testing import capture_logs

from broker.admin.access import question_of, require_rules, routes_of, rules
from broker.admin.app import build_app
from broker.topics.registry import TopicRegistry
from config.bounds import GRANTS_OF_REQUEST
from scripts.print_access_rules import filled
from security.access import Need
from tests.support.embedded_broker import running
from tests.support.roles import TOKENS
from tests.unit.broker.admin.conftest import Rest, asking

NAMESPACE = "/admin/v2/namespaces/public/default"
TOPIC = "/admin/v2/persistent/public/default/t"
SCALABLE = "/admin/v2/scalable/public/default/s"
ACTIONS = ["produce", "consume"]


@pytest.fixture
async def rest(tmp_path: Path) -> AsyncIterator[Rest]:
    async with asking(tmp_path) as rest:
        yield rest


async def test_every_route_has_a_rule_and_every_rule_a_route(tmp_path: Path) -> None:
    async with running(tmp_path) as broker:
        served = set(routes_of(build_app(broker).router))
    assert served - rules().keys() == set()
    # Served only where there may be other brokers.
    assert rules().keys() - served == {("GET", "/admin/v2/broker-channel")}


def test_an_application_with_a_route_without_a_rule_is_refused() -> None:
    async def handler(_: web.Request) -> web.Response:
        return web.Response()

    app = web.Application()
    app.router.add_get("/admin/v2/forgotten", handler)
    with pytest.raises(ValueError, match="forgotten"):
        require_rules(app.router)


def test_only_these_paths_are_served_without_credentials() -> None:
    open_to_all = {route for route, need in rules().items() if need is Need.NOTHING}
    paths = ("/metrics", "/status.html", "/admin/v2/brokers/ready")
    assert open_to_all == {("GET", path) for path in paths}


async def test_grants_on_a_namespace_are_replaced_listed_and_revoked(rest: Rest) -> None:
    assert await rest.get(NAMESPACE + "/permissions") == {}
    await rest.done("POST", NAMESPACE + "/permissions/alice", ["consume", "produce"])
    await rest.done("POST", NAMESPACE + "/permissions/bob", ["functions"])
    await rest.done("POST", NAMESPACE + "/permissions/alice", ["consume"])
    assert await rest.get(NAMESPACE + "/permissions") == {
        "alice": ["consume"],
        "bob": ["functions"],
    }
    await rest.done("DELETE", NAMESPACE + "/permissions/alice")
    await rest.done("DELETE", NAMESPACE + "/permissions/nobody")
    assert await rest.get(NAMESPACE + "/permissions") == {"bob": ["functions"]}


async def test_grants_on_a_topic_are_shown_with_those_on_its_namespace(rest: Rest) -> None:
    await rest.done("POST", NAMESPACE + "/permissions/alice", ["produce"])
    await rest.done("POST", TOPIC + "/permissions/alice", ["consume"])
    await rest.done("POST", TOPIC + "/permissions/bob", ["consume"])
    assert await rest.get(TOPIC + "/permissions") == {"alice": ACTIONS, "bob": ["consume"]}
    assert await rest.get(TOPIC + "-partition-3/permissions") == await rest.get(
        TOPIC + "/permissions"
    )
    await rest.done("DELETE", TOPIC + "/permissions/bob")
    assert await rest.get(TOPIC + "/permissions") == {"alice": ACTIONS}
    await rest.refused(412, "DELETE", TOPIC + "/permissions/bob")


async def test_a_grant_replaces_that_on_the_twin_in_another_domain(rest: Rest) -> None:
    twin = SCALABLE.replace("/scalable/", "/persistent/")
    await rest.done("POST", twin + "/permissions/bob", ["produce"])
    await rest.done("POST", SCALABLE + "/permissions/bob", ["consume"])
    assert await rest.get(twin + "/permissions") == {"bob": ["consume"]}


async def test_a_deleted_topic_leaves_no_grant_to_a_namesake(rest: Rest) -> None:
    for topic in (TOPIC, SCALABLE):
        await rest.done("PUT", topic)
        await rest.done("POST", topic + "/permissions/bob", ["consume"])
        await rest.done("DELETE", topic)
        assert await rest.get(topic + "/permissions") == {}
    await rest.done("PUT", TOPIC + "/partitions", 2)
    await rest.done("POST", TOPIC + "/permissions/bob", ["consume"])
    await rest.done("DELETE", TOPIC + "/partitions")
    assert await rest.get(TOPIC + "/permissions") == {}


async def test_the_roles_of_a_subscription_are_replaced_and_revoked_one_by_one(rest: Rest) -> None:
    path = NAMESPACE + "/permissions"
    await rest.done("POST", path + "/subscription/audit", ["alice", "bob"])
    assert await rest.get(path + "/subscription") == {"audit": ["alice", "bob"]}
    await rest.done("DELETE", path + "/audit/alice")
    assert await rest.get(path + "/subscription") == {"audit": ["bob"]}


async def test_the_mode_of_subscriptions_is_none_or_prefix(rest: Rest) -> None:
    path = NAMESPACE + "/subscriptionAuthMode"
    assert await rest.get(path) == "None"
    await rest.done("POST", path, "Prefix")
    assert await rest.get(path) == "Prefix"
    await rest.refused(400, "POST", path, "prefix")


async def test_grants_on_many_topics_are_of_one_namespace(rest: Rest) -> None:
    grants = [
        {"topic": f"persistent://public/default/{name}", "role": "alice", "actions": ["produce"]}
        for name in ("a", "b")
    ]
    await rest.done("POST", "/admin/v2/namespaces/grantPermissionsOnTopics", grants)
    for name in ("a", "b"):
        path = f"/admin/v2/persistent/public/default/{name}/permissions"
        assert await rest.get(path) == {"alice": ["produce"]}
    revoked = [{name: grants[0][name] for name in ("topic", "role")}]
    await rest.done("POST", "/admin/v2/namespaces/revokePermissionsOnTopics", revoked)
    assert await rest.get("/admin/v2/persistent/public/default/a/permissions") == {}
    other = {**grants[0], "topic": "persistent://pulsar/system/x"}
    for body in ([grants[0], other], [], [{"role": "alice"}], {"topic": "x"}):
        await rest.refused(400, "POST", "/admin/v2/namespaces/grantPermissionsOnTopics", body)


@pytest.mark.parametrize("role", ["a*b", "%20alice", "**"])
async def test_a_role_that_is_none_is_not_granted_anything(rest: Rest, role: str) -> None:
    await rest.refused(400, "POST", f"{NAMESPACE}/permissions/{role}", ["produce"])


@pytest.mark.parametrize("actions", [[], ["write"], "produce", {"produce": True}, [1]])
async def test_an_action_that_is_none_is_not_granted(rest: Rest, actions: object) -> None:
    await rest.refused(400, "POST", NAMESPACE + "/permissions/alice", actions)


@pytest.fixture
async def secured(tmp_path: Path) -> AsyncIterator[Rest]:
    settings = {**TOKENS, "authorization": "on", "superuser_roles": ("root",)}
    async with asking(tmp_path, **settings) as rest:
        rest.role = "root"
        await rest.done("PUT", TOPIC)
        tenant = {"adminRoles": ["admin"], "allowedClusters": ["standalone"]}
        await rest.done("PUT", "/admin/v2/tenants/acme", tenant)
        await rest.done("PUT", "/admin/v2/namespaces/acme/orders")
        await rest.done("POST", NAMESPACE + "/permissions/reader", ["consume"])
        yield rest


@pytest.mark.parametrize(
    ("role", "method", "path", "allowed"),
    [
        ("reader", "GET", TOPIC + "/stats", True),
        ("reader", "GET", TOPIC + "/subscriptions", True),
        ("reader", "PUT", TOPIC + "/unload", False),
        ("reader", "DELETE", TOPIC, False),
        ("reader", "POST", NAMESPACE + "/permissions/reader", False),
        ("reader", "GET", "/admin/v2/tenants", False),
        ("stranger", "GET", TOPIC + "/stats", False),
        ("stranger", "GET", "/admin/v2/brokers/version", True),
        ("admin", "GET", "/admin/v2/tenants/acme", True),
        ("admin", "GET", "/admin/v2/namespaces/acme", True),
        ("admin", "GET", "/admin/v2/tenants/public", False),
        ("admin", "GET", TOPIC + "/stats", False),
        ("root", "GET", "/admin/v2/tenants", True),
    ],
)
async def test_a_request_is_served_as_its_rule_says(
    secured: Rest, role: str, method: str, path: str, *, allowed: bool
) -> None:
    secured.role = role
    status, answer = await secured.call(method, path)
    assert (status != 403) is allowed, (status, answer)


async def test_without_credentials_only_the_open_paths_answer(secured: Rest) -> None:
    secured.role = None
    for path, status in (
        ("/metrics", 200),
        ("/status.html", 200),
        ("/admin/v2/brokers/ready", 200),
        ("/admin/v2", 401),
        (TOPIC + "/stats", 401),
        ("/admin/v2/no/such/path", 401),
        (TOPIC.replace("public", "none") + "/stats", 401),
    ):
        assert (await secured.call("GET", path))[0] == status, path


async def test_a_refusal_does_not_tell_whether_the_topic_exists(secured: Rest) -> None:
    secured.role = "stranger"
    reasons = {
        (await secured.refused(403, "GET", path + "/stats")).replace(name, "NAME")
        for name, path in (
            ("public/default/t", TOPIC),
            ("public/default/none", TOPIC.removesuffix("/t") + "/none"),
            ("none/none/t", TOPIC.replace("public/default", "none/none")),
        )
    }
    assert len(reasons) == 1


async def test_grants_on_topics_in_a_body_are_for_admins_of_their_tenant(secured: Rest) -> None:
    grant = [{"topic": "persistent://acme/orders/x", "role": "bob", "actions": ["produce"]}]
    path = "/admin/v2/namespaces/grantPermissionsOnTopics"
    secured.role = "reader"
    await secured.refused(403, "POST", path, grant)
    secured.role = "admin"
    await secured.done("POST", path, grant)
    foreign = [{**grant[0], "topic": "persistent://public/default/x"}]
    await secured.refused(403, "POST", path, foreign)


@pytest.mark.parametrize(
    ("method", "path", "step"),
    [
        ("GET", "/admin/v2/brokers/health", "superuser_roles"),
        ("DELETE", TOPIC, "adminRoles"),
        ("GET", f"{TOPIC}/stats", "Ask an administrator for a grant"),
    ],
)
async def test_a_refusal_says_who_gives_the_right(
    secured: Rest, method: str, path: str, step: str
) -> None:
    secured.role = "stranger"
    assert step in str(await secured.refused(403, method, path))


async def test_denials_and_changes_are_audited(secured: Rest) -> None:
    with capture_logs() as logs:
        await secured.done("PUT", TOPIC + "2")
        secured.role = "stranger"
        await secured.refused(403, "DELETE", TOPIC)
    changed, denied = (
        next(each for each in logs if each["event"] == event)
        for event in ("changed_by_request", "access_denied")
    )
    assert (changed["role"], changed["allowed"]) == ("root", True)
    assert changed["outcome"] == 204
    assert (denied["role"], denied["allowed"]) == ("stranger", False)
    assert denied["operation"] == f"DELETE {TOPIC}"


async def test_audit_has_the_outcome_of_a_change(secured: Rest) -> None:
    grant = [{"topic": "persistent://public/default/x", "role": "b", "actions": ["produce"]}]
    missing = "/admin/v2/persistent/public/default/not-there"
    with capture_logs() as logs:
        await secured.refused(404, "DELETE", missing)
        await secured.done("POST", "/admin/v2/namespaces/grantPermissionsOnTopics", grant)
        secured.role = "stranger"
        await secured.refused(403, "POST", "/admin/v2/namespaces/grantPermissionsOnTopics", grant)
    changes = [each for each in logs if each["event"] == "changed_by_request"]
    assert [each["role"] for each in changes] == ["root", "root"]
    failed, granted = changes
    assert failed["operation"] == f"DELETE {missing}"
    assert (failed["outcome"], granted["outcome"]) == (404, 204)
    assert "to be an admin of the tenant public" in granted["access"]


async def test_audit_logs_no_answer_for_a_client_that_is_gone(
    secured: Rest, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def find_it_gone(*_: object, **options: object) -> None:
        raise ConnectionResetError

    monkeypatch.setattr(TopicRegistry, "delete", find_it_gone)
    with capture_logs() as logs:
        await secured.call("DELETE", TOPIC)
    (change,) = [each for each in logs if each["event"] == "changed_by_request"]
    assert change["outcome"] == "no answer"


async def test_a_dry_run_serves_nobody_without_credentials(tmp_path: Path) -> None:
    settings = {**TOKENS, "authorization": "dry_run", "superuser_roles": ("root",)}
    async with asking(tmp_path, **settings) as rest:
        for method, path in rules().keys() - {("GET", "/admin/v2/broker-channel")}:
            status, _ = await rest.call(method, filled(path))
            open_to_all = rules()[method, path] is Need.NOTHING
            assert (status == 401) is not open_to_all, (method, path, status)
        rest.role = "stranger"
        grant = [{"topic": "persistent://public/default/x", "role": "b", "actions": ["produce"]}]
        await rest.done("POST", "/admin/v2/namespaces/grantPermissionsOnTopics", grant)


@pytest.mark.parametrize(
    "path",
    [
        "/admin/v2/persistent/acme/orders/__transaction_x",
        "/admin/v2/scalable/acme/orders/__change_events",
        "/admin/v2/namespaces/pulsar/system",
    ],
)
async def test_what_is_of_the_system_is_for_superusers(secured: Rest, path: str) -> None:
    tenant = {"adminRoles": ["admin"], "allowedClusters": ["standalone"]}
    await secured.done("POST", "/admin/v2/tenants/pulsar", tenant)
    secured.role = "admin"
    for method in ("PUT", "DELETE"):
        await secured.refused(403, method, path)


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
async def test_the_path_of_a_namespace_is_no_tenant(rest: Rest, method: str) -> None:
    await rest.refused(412, method, "/admin/v2/tenants/public%2Fdefault", {})


@pytest.mark.parametrize(
    ("access", "statuses"),
    [
        ("anybody", (200, 200, 200)),
        ("any-role", (401, 200, 200)),
        ("superuser", (401, 403, 200)),
    ],
)
async def test_metrics_are_for_those_of_the_setting(
    tmp_path: Path, access: str, statuses: tuple[int, ...]
) -> None:
    settings = {**TOKENS, "authorization": "on", "superuser_roles": ("root",)}
    async with asking(tmp_path, **settings, metrics_access=access) as rest:
        for rest.role, status in zip((None, "other", "root"), statuses, strict=True):
            for method in ("GET", "HEAD"):
                assert (await rest.call(method, "/metrics"))[0] == status, rest.role


async def test_the_path_of_a_namespace_is_decided_on_for_nobody(secured: Rest) -> None:
    """Its record is not read as that of a tenant, whatever members it has."""
    secured.role = "other"
    for path in ("tenants/acme%2Forders", "namespaces/acme%2Forders"):
        await secured.refused(412, "GET", f"/admin/v2/{path}")


@pytest.mark.parametrize("path", ["grantPermissionsOnTopics", "revokePermissionsOnTopics"])
async def test_a_body_with_too_many_names_is_refused_before_they_are_read(
    rest: Rest, path: str
) -> None:
    grants = [{"topic": "no/name", "role": "r", "actions": ["produce"]}] * (GRANTS_OF_REQUEST + 1)
    reason = await rest.refused(400, "POST", f"/admin/v2/namespaces/{path}", grants)
    assert "split it" in reason


async def test_a_page_of_another_site_opens_no_connection(rest: Rest) -> None:
    headers = {
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Origin": "http://evil.example",
        "Sec-Fetch-Site": "cross-site",
    }
    assert (await rest.raw("GET", "/admin/v2/broker-channel", "", headers))[0] in (403, 404)
    assert (await rest.raw("GET", "/admin/v2", "", headers))[0] == 403


@pytest.mark.parametrize(
    ("subscription", "need"), [("s", Need.CONSUME), ("pulsar.repl.west", Need.TENANT_ADMIN)]
)
def test_administrators_alone_move_the_positions_of_replicators(
    subscription: str, need: Need
) -> None:
    path = {"domain": "persistent", "tenant": "t", "namespace": "n", "topic": "t"}
    question = question_of(Need.CONSUME, path | {"subscription": subscription})
    assert question.need is need
