"""The official client with credentials, on a broker with authorization, over TLS."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

import bcrypt
import pytest

from security.secret_files import write_secret
from tests.java.broker_under_test import MagnetarProcess
from tests.java.fixtures import SETTINGS, serving
from tests.java.stock_driver import CaseFailed, StockDriver
from tests.support.authority import Authority, server_settings
from tests.support.child_process import HOST, free_port
from tests.support.json_line_process import Facts
from tests.support.roles import SECRET_KEY, token_of

PLUGINS: Final = "org.apache.pulsar.client.impl.auth.Authentication"
RunCase = Callable[..., Facts]


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture
def run_case(
    request: pytest.FixtureRequest,
    authority: Authority,
    tmp_path: Path,
    stock_driver_process: StockDriver,
) -> Iterator[RunCase]:
    """Runs a case as a superuser, or as a given role; the parameter is the kind of credentials."""
    if request.config.getoption("--peer", default=None):
        pytest.skip("these are about Magnetar's authentication")
    users = b"".join(
        name.encode() + b":" + bcrypt.hashpw(b"secret", bcrypt.gensalt(4)) + b"\n"
        for name in ("root", "stranger")
    )
    write_secret(tmp_path / "users.htpasswd", users)
    port = free_port()
    settings = {
        **SETTINGS,
        **server_settings(authority.issue("broker", hosts=("localhost",))),
        "token_secret_keys": SECRET_KEY,
        "port_tls": port,
        "http_port_tls": free_port(),
        "tls_client_certificates": "wanted",
        "tls_trust_certs_file": authority.chain,
        "authentication_providers": "token,basic,tls",
        "basic_auth_file": tmp_path / "users.htpasswd",
        "authorization": "on",
        "superuser_roles": "root",
        "authentication_refresh_check_s": 1,
    }
    process = MagnetarProcess(tmp_path, settings)

    def credentials(role: str) -> Mapping[str, str]:
        if request.param == "token":
            return {"authPlugin": f"{PLUGINS}Token", "authParams": f"token:{token_of(role)}"}
        if request.param == "basic":
            params = {"userId": role, "password": "secret"}
            return {"authPlugin": f"{PLUGINS}Basic", "authParams": json.dumps(params)}
        own = authority.issue(role)
        shown = {"tlsCertFile": str(own.chain), "tlsKeyFile": str(own.key)}
        return {
            "authPlugin": f"{PLUGINS}Tls",
            "authParams": ",".join(f"{name}:{value}" for name, value in shown.items()),
        }

    def run(case: str, role: str = "root", **args: object) -> Facts:
        given = {
            "topic": f"{case.replace('_', '-')}-{uuid.uuid4().hex[:8]}",
            "trust": str(authority.chain),
            "adminToken": token_of("root"),
            **credentials(role),
            **args,
        }
        url = f"pulsar+ssl://{HOST}:{port}"
        return stock_driver_process.start(case, url, process.admin_url, **given).result()

    for _ in serving(process):
        yield run


KINDS = pytest.mark.parametrize("run_case", ["token", "basic", "certificate"], indirect=True)


@KINDS
def test_transaction_of_a_superuser_spans_topics_and_segments(run_case: RunCase) -> None:
    facts = run_case("txn_visibility", end="commit", batching=True, messages=20, segments=2)
    assert facts["state"] == "COMMITTED"
    assert facts["seen"] == [20] * 4


@KINDS
def test_role_without_grants_is_refused(run_case: RunCase) -> None:
    with pytest.raises(CaseFailed, match=r"(?i)authori"):
        run_case("txn_visibility", role="stranger", end="commit", messages=1, operationTimeoutS=5)
