"""The official client where the broker requires a certificate, without authentication.

It reads the plain address fields of layouts and coordinators alone, and speaks TLS there.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator

import pytest

from tests.java.broker_under_test import MagnetarProcess
from tests.java.fixtures import SETTINGS, serving
from tests.java.stock_driver import CaseFailed, StockDriver
from tests.support.authority import Authority, server_settings
from tests.support.child_process import HOST, free_port
from tests.support.json_line_process import Facts

pytestmark = pytest.mark.long  # test_security.py has clients with and without a certificate
RunCase = Callable[..., Facts]


@pytest.fixture(scope="module")
def run_case(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    stock_driver_process: StockDriver,
) -> Iterator[RunCase]:
    """Runs a case over TLS."""
    if request.config.getoption("--peer", default=None):
        pytest.skip("the peer with TLS is that of test_security.py")
    if request.config.getoption("--cluster", default=None):
        pytest.skip("the broker of these tests is no cluster")
    authority = Authority(tmp_path_factory.mktemp("authority"))
    port = free_port()
    settings = {
        **SETTINGS,
        # The client looks an address up backwards, and checks the name that it finds.
        **server_settings(authority.issue("broker", hosts=("localhost",))),
        "port_tls": port,
        "http_port_tls": free_port(),
        "tls_client_certificates": "required",
        "tls_trust_certs_file": authority.chain,
    }
    process = MagnetarProcess(tmp_path_factory.mktemp("magnetar"), settings)
    own = authority.issue("alice")
    shown = {"certificate": str(own.chain), "key": str(own.key)}

    def run(case: str, *, with_certificate: bool = True, **args: object) -> Facts:
        given = {
            "topic": f"{case.replace('_', '-')}-{uuid.uuid4().hex[:8]}",
            "trust": str(authority.chain),
            **(shown if with_certificate else {}),
            **args,
        }
        url = f"pulsar+ssl://{HOST}:{port}"
        return stock_driver_process.start(case, url, process.admin_url, **given).result()

    for _ in serving(process):
        yield run


def test_transaction_with_a_client_certificate_survives_a_split(run_case: RunCase) -> None:
    facts = run_case("txn_reshape", change="split", end="commit")
    assert facts["active_segments"] == 4
    assert facts["seen"] == [facts["inside_total"]] * 2
    assert facts["duplicates"] == [0, 0]


def test_client_without_a_certificate_is_refused(run_case: RunCase) -> None:
    with pytest.raises(CaseFailed):
        run_case("txn_visibility", with_certificate=False, end="commit", operationTimeoutS=1)
