"""The official v5 and v4 clients and admin libraries with credentials, over TLS.

All cases share one broker with authorization, Magnetar or Apache Pulsar (`--peer`).  Clients prove
their roles by token, password or certificate.  The broker checks every second for tokens that have
expired.
"""

from __future__ import annotations

import json
import time
import urllib.request
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pytest

from tests.java.broker_under_test import BrokerUnderTest, MagnetarProcess
from tests.java.expectations import (
    assert_every_message_once,
    assert_key_order,
    peer_may_fail_a_commit,
)
from tests.java.fixtures import GRACE_PERIOD_S, SETTINGS, STARTED_PEER, serving
from tests.java.peer_process import PeerProcess
from tests.java.peer_security import ADMIN, PASSWORD, PeerSecurity
from tests.java.stock_driver import CaseFailed, StartedCase, StockDriver
from tests.support.certificates import Certificate, make_authority
from tests.support.child_process import HOST, free_port
from tests.support.json_line_process import Facts
from tests.support.roles import JAVA_TOKENS, java_arguments

PLUGINS: Final = "org.apache.pulsar.client.impl.auth.Authentication"
TOKEN, BASIC, CERTIFICATE = "token", "basic", "certificate"
KINDS: Final = (TOKEN, BASIC, CERTIFICATE)
GRANTS: Final[Mapping[str, list[str]]] = {"alice": ["produce", "consume"], "reader": ["consume"]}
"""On the namespace of all topics; `stranger` has none."""
EXPIRES_S: Final = 4
AFTER_EXPIRY_S: Final = 3
"""How long the cases about expiry go on after it: two checks, and some."""


@dataclass(frozen=True)
class Secured:
    """The broker of these tests."""

    process: BrokerUnderTest
    security: PeerSecurity
    _certificates: dict[str, Certificate] = field(default_factory=dict)
    """By role: openssl takes a while for each."""

    def credentials(self, kind: str, role: str) -> Mapping[str, str]:
        """Arguments of a case by which its clients prove this role."""
        if kind == TOKEN:
            return java_arguments(self.security.token(role), self.security.token(ADMIN))
        if kind == BASIC:
            params = {"userId": role, "password": PASSWORD}
            return {"authPlugin": f"{PLUGINS}Basic", "authParams": json.dumps(params)}
        if role not in self._certificates:
            self._certificates[role] = self.security.certificate(role)
        own = self._certificates[role]
        return {
            "authPlugin": f"{PLUGINS}Tls",
            "authParams": f"tlsCertFile:{own.chain},tlsKeyFile:{own.key}",
        }

    def start(self, driver: StockDriver, case: str, **args: object) -> StartedCase:
        """Begin a case over TLS; an administrator makes its scalable topics."""
        given = {
            "topic": f"{case.replace('_', '-')}-{uuid.uuid4().hex[:8]}",
            "trust": str(self.security.authority.chain),
            "adminToken": self.security.token(ADMIN),
            "web": f"https://{HOST}:{self.security.http_port_tls}",
            **args,
        }
        url = f"pulsar+ssl://{HOST}:{self.security.tls_port}"
        return driver.start(case, url, self.process.admin_url, **given)

    def run(self, driver: StockDriver, case: str, kind: str, role: str, **args: object) -> Facts:
        """Run a case as a role."""
        return self.start(driver, case, **{**self.credentials(kind, role), **args}).result()

    def grant(self, role: str, actions: list[str]) -> None:
        """Let a role do this with the topics of the namespace."""
        request = urllib.request.Request(
            f"{self.process.admin_url}/admin/v2/namespaces/public/default/permissions/{role}",
            data=json.dumps(actions).encode(),
            headers={"Content-Type": "application/json", **self.security.admin_headers},
            method="POST",
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            assert answer.status == 204


@pytest.fixture(scope="module")
def secured(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Secured]:
    if request.config.getoption("--cluster", default=None):
        pytest.skip("the broker of these tests is no cluster")
    peer = request.config.getoption("--peer", default=None)
    if peer not in (None, STARTED_PEER):
        pytest.skip("the keys of a broker that runs already are not known")
    directory = tmp_path_factory.mktemp("security")
    security = PeerSecurity.make(directory, free_port(), HOST)
    process: BrokerUnderTest
    if peer is None:
        process = MagnetarProcess(directory, {**SETTINGS, **security.settings()})
    else:
        process = PeerProcess(free_port(), free_port(), grace_s=GRACE_PERIOD_S, security=security)
        process.wipe()
    for _ in serving(process):
        made = Secured(process, security)
        for role, actions in GRANTS.items():
            made.grant(role, actions)
        yield made


# The v5 client


@pytest.mark.parametrize(
    ("kind", "change", "active"),
    [(TOKEN, "split", 4), (TOKEN, "merge", 2), (BASIC, "split", 4), (CERTIFICATE, "split", 4)],
)
def test_v5_transaction_of_a_granted_role_survives_layout_changes(
    secured: Secured,
    stock_driver_process: StockDriver,
    on_peer: bool,
    kind: str,
    change: str,
    active: int,
) -> None:
    given = {"change": change, "end": "commit"}
    with peer_may_fail_a_commit(on_peer):
        facts = secured.run(stock_driver_process, "txn_reshape", kind, "alice", **given)
    assert facts["seen_while_open"] == [0, 0]
    assert facts["active_segments"] == active
    assert facts["seen"] == [facts["inside_total"]] * 2
    assert facts["duplicates"] == [0, 0]


@pytest.mark.parametrize("kind", KINDS)
def test_v5_split_under_load_loses_nothing(
    secured: Secured, stock_driver_process: StockDriver, kind: str
) -> None:
    given = {"mode": "AWAITED", "messagesBetween": 100}
    facts = secured.run(stock_driver_process, "split_under_load", kind, "alice", **given)
    assert facts["active_segments"] == 4
    for prefix in ("stream_", "queue_"):
        assert_every_message_once(facts, prefix, at_least=300)
    assert_key_order(facts, "stream_")


@pytest.mark.parametrize("kind", KINDS)
def test_v5_client_without_grants_is_refused(
    secured: Secured, stock_driver_process: StockDriver, kind: str
) -> None:
    given = {"end": "commit", "messages": 1, "operationTimeoutS": 5}
    with pytest.raises(CaseFailed, match=r"(?i)authori"):
        secured.run(stock_driver_process, "txn_visibility", kind, "stranger", **given)


def test_v5_client_refuses_a_broker_of_an_unknown_authority(
    secured: Secured, stock_driver_process: StockDriver, tmp_path: Path
) -> None:
    other = make_authority(tmp_path / "authority")
    given = {"end": "commit", "trust": str(other.chain), "operationTimeoutS": 1}
    with pytest.raises(CaseFailed):
        secured.run(stock_driver_process, "txn_visibility", TOKEN, "alice", **given)


# The v4 client


@pytest.mark.parametrize(
    ("kind", "batching"), [(TOKEN, True), (TOKEN, False), (BASIC, True), (CERTIFICATE, True)]
)
def test_v4_client_reads_what_it_sends_in_each_type_of_subscription(
    secured: Secured, v4_driver_process: StockDriver, kind: str, batching: bool
) -> None:
    facts = secured.run(v4_driver_process, "v4_messages", kind, "alice", batching=batching)
    assert facts["version"].startswith("4.")
    assert facts["same"] == [True] * 4


@pytest.mark.parametrize("role", ["reader", "stranger"])
@pytest.mark.parametrize("kind", KINDS)
def test_v4_client_without_grants_is_refused(
    secured: Secured, v4_driver_process: StockDriver, kind: str, role: str
) -> None:
    with pytest.raises(CaseFailed, match="AuthorizationException"):
        secured.run(v4_driver_process, "v4_messages", kind, role, operationTimeoutS=5)


def test_v4_client_with_another_key_is_refused(
    secured: Secured, v4_driver_process: StockDriver
) -> None:
    token = secured.security.token("alice", secret=b"of somebody else" * 2)
    given = {"authPlugin": JAVA_TOKENS, "authParams": f"token:{token}"}
    started = secured.start(v4_driver_process, "v4_messages", operationTimeoutS=2, **given)
    with pytest.raises(CaseFailed, match="AuthenticationException"):
        started.result()


@pytest.mark.parametrize("role", ["alice", ADMIN])
def test_a_v4_client_has_transactions_without_a_grant_on_the_system_namespace(
    secured: Secured, v4_driver_process: StockDriver, on_peer: bool, role: str
) -> None:
    facts = secured.run(v4_driver_process, "v4_transaction", TOKEN, role)
    if not on_peer or role == ADMIN:
        assert facts == {"seen_while_open": 0, "seen": 10}
    else:  # The peer asks for a grant on its namespace pulsar/system.
        assert "AuthorizationException" in facts["refusal"]


# Tokens that expire


@pytest.fixture(scope="module")
def expired(
    secured: Secured, stock_driver_process: StockDriver, v4_driver_process: StockDriver
) -> Mapping[str, Facts]:
    """Facts of four cases that run at once: of both clients, with and without a new token."""
    cases = {
        "v5": (stock_driver_process, "token_expires"),
        "v4": (v4_driver_process, "v4_token_expires"),
    }
    new = secured.security.token("alice")
    lasting = {"token": new, "nextToken": new, "renewedAtMs": 0, "untilMs": 0, "stays": True}
    for driver, case in cases.values():
        # A new Java process may take longer to connect than the token lasts.
        secured.start(driver, case, **lasting).result()
    expires_at = int(time.time()) + EXPIRES_S
    old = secured.security.token("alice", expires_s=expires_at + 0.5 - time.time())
    given = {
        "token": old,
        # Renewed before it expires: a connection that is opened then must not be refused.
        "renewedAtMs": (expires_at - 1) * 1000,
        "untilMs": (expires_at + AFTER_EXPIRY_S) * 1000,
        "readerToken": new,
        "perSecond": 200,
    }
    started = {
        f"{version} {name}": secured.start(
            driver, case, **{"nextToken": following, "stays": name == "stays", **given}
        )
        for version, (driver, case) in cases.items()
        for name, following in (("renewed", new), ("stays", old))
    }
    return {"expires_at": {"ms": expires_at * 1000}} | {
        name: case.result() for name, case in started.items()
    }


def test_v5_client_with_a_renewed_token_stays_connected(expired: Mapping[str, Facts]) -> None:
    facts = expired["v5 renewed"]
    assert facts["renewals"] >= 1
    assert facts["connections_kept"] == facts["connections"]
    assert facts["committed"] == 10
    for prefix in ("stream_", "queue_"):
        assert_every_message_once(facts, prefix, at_least=300)
    assert_key_order(facts, "stream_")


def test_v5_client_with_an_expired_token_is_disconnected(expired: Mapping[str, Facts]) -> None:
    assert expired["v5 stays"]["connections_kept"] == 0


def test_v4_client_with_a_renewed_token_stays_connected(expired: Mapping[str, Facts]) -> None:
    facts = expired["v4 renewed"]
    assert facts["renewals"] >= 1
    assert facts["connected"] == [True, True]
    assert facts["disconnections_ms"] == [0, 0]
    assert facts["failures"] == []
    assert facts["sent"] >= 20
    assert (facts["missing"], facts["duplicates"]) == (0, 0)


def test_v4_client_with_an_expired_token_is_disconnected(expired: Mapping[str, Facts]) -> None:
    facts = expired["v4 stays"]
    assert facts["connected"] == [False, False]
    assert facts["renewals"] >= 1
    assert facts["failures"] != []
    for disconnected in facts["disconnections_ms"]:
        assert disconnected >= expired["expires_at"]["ms"]
    assert (facts["missing"], facts["duplicates"]) == (0, 0)


# The library of pulsar-admin


@pytest.fixture(params=["v4", "v5"])
def admin_driver(request: pytest.FixtureRequest) -> StockDriver:
    """The driver with the library of that version."""
    name = "stock_driver_process" if request.param == "v5" else "v4_driver_process"
    driver: StockDriver = request.getfixturevalue(name)
    return driver


@pytest.mark.parametrize("kind", KINDS)
def test_admin_library_grants_and_revokes(
    secured: Secured, admin_driver: StockDriver, kind: str
) -> None:
    facts = secured.run(admin_driver, "admin_walk", kind, ADMIN)
    both = ["produce", "consume"]
    assert facts == {
        "admin_roles": ["keeper"],
        "namespaces": True,
        "granted": {"alice": both, "bob": ["consume"]},
        "left": {"bob": ["consume"]},
        "of_subscription": {"sub": ["alice", "bob"]},
        "of_subscription_left": {"sub": ["bob"]},
        "mode": "Prefix",
        "of_topic": {"bob": ["consume"], "carol": ["produce"]},
        "of_topic_left": {"bob": ["consume"]},
        "of_topics": {"bob": ["consume"], "dave": both},
        "of_topics_left": {"bob": ["consume"]},
        "partitions": 3,
        "topics": True,
        "partitioned_topics": True,
        "subscriptions": ["sub"],
        "deleted": True,
    }


@pytest.mark.parametrize("kind", KINDS)
def test_admin_library_changes_scalable_topics(
    secured: Secured, stock_driver_process: StockDriver, kind: str
) -> None:
    assert secured.run(stock_driver_process, "admin_scalable", kind, ADMIN) == {
        "listed": True,
        "by_properties": True,
        "segments": 5,
        "subscriptions": ["sub"],
        "deleted": "NotFoundException 404",
    }


@pytest.mark.parametrize("kind", KINDS)
def test_admin_library_tells_a_role_without_grants_that_it_is_not_authorized(
    secured: Secured, admin_driver: StockDriver, on_peer: bool, kind: str
) -> None:
    facts = secured.run(admin_driver, "admin_calls", kind, "stranger")
    refused = dict.fromkeys(facts, "NotAuthorizedException 403")
    if on_peer:  # docs/differences.md, refusals over REST
        on_namespace = {"permissions", "grant", "topics", "new topic"}
        refused |= dict.fromkeys(facts.keys() - on_namespace, "NotAuthorizedException 401")
        refused["missing namespaces"] = "NotFoundException 404"
    assert facts == refused


@pytest.mark.parametrize("kind", KINDS)
def test_admin_library_does_for_a_reader_what_it_may(
    secured: Secured, stock_driver_process: StockDriver, on_peer: bool, kind: str
) -> None:
    assert secured.run(stock_driver_process, "admin_scalable_calls", kind, "reader") == {
        "list": "done",
        "layout": "done",
        "statistics": "done",
        "subscription": "done",
        "missing": "NotFoundException 404",
        "create": "NotAuthorizedException 403",
        "delete": "NotAuthorizedException 403",
        # docs/differences.md, refusals over REST
        "split": f"NotAuthorizedException {401 if on_peer else 403}",
    }


@pytest.mark.parametrize("kind", [TOKEN, BASIC])
def test_admin_library_with_wrong_credentials_is_not_authorized(
    secured: Secured, admin_driver: StockDriver, kind: str
) -> None:
    token = secured.security.token(ADMIN, secret=b"of somebody else" * 2)
    password = json.dumps({"userId": ADMIN, "password": "wrong"})
    wrong = {"authParams": f"token:{token}" if kind == TOKEN else password}
    with pytest.raises(CaseFailed, match=r"NotAuthorizedException.*401"):
        secured.run(admin_driver, "admin_walk", kind, ADMIN, **wrong)
