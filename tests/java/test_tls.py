"""The official client over TLS and mutual TLS: transactions, queue and stream, splits and merges.

It reads the plain address fields of layouts and coordinators alone, and speaks TLS there.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.java.broker_under_test import MagnetarProcess
from tests.java.fixtures import SETTINGS, serving
from tests.java.stock_driver import CaseFailed, StockDriver
from tests.support.authority import Authority, server_settings
from tests.support.child_process import HOST, free_port
from tests.support.json_line_process import Facts

RunCase = Callable[..., Facts]


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(params=["ignored", "required"])
def run_case(
    request: pytest.FixtureRequest,
    authority: Authority,
    tmp_path: Path,
    stock_driver_process: StockDriver,
) -> Iterator[RunCase]:
    """Runs a case over TLS; the parameter says whether the client must show a certificate."""
    if request.config.getoption("--peer", default=None):
        pytest.skip("these are about Magnetar's ports with TLS")
    port = free_port()
    settings = {
        **SETTINGS,
        # The client looks an address up backwards, and checks the name that it finds.
        **server_settings(authority.issue("broker", hosts=("localhost",))),
        "port_tls": port,
        "http_port_tls": free_port(),
        "tls_client_certificates": request.param,
        "tls_trust_certs_file": authority.chain,
    }
    process = MagnetarProcess(tmp_path, settings)
    own = authority.issue("alice")
    shown = {"certificate": str(own.chain), "key": str(own.key)}

    def run(case: str, **args: object) -> Facts:
        given = {
            "topic": f"{case.replace('_', '-')}-{uuid.uuid4().hex[:8]}",
            "trust": str(authority.chain),
            **(shown if request.param == "required" else {}),
            **args,
        }
        url = f"pulsar+ssl://{HOST}:{port}"
        return stock_driver_process.start(case, url, process.admin_url, **given).result()

    for _ in serving(process):
        yield run


def test_transaction_over_tls_spans_topics_and_segments(run_case: RunCase) -> None:
    facts = run_case("txn_visibility", end="commit", batching=True, messages=20, segments=2)
    assert facts["seen_while_open"] == [0, 0, 0, 0]
    assert facts["state"] == "COMMITTED"
    assert facts["seen"] == [20] * 4
    assert facts["duplicates"] == [0, 0, 0, 0]


def test_transaction_over_tls_survives_a_split(run_case: RunCase) -> None:
    facts = run_case("txn_reshape", change="split", end="commit")
    assert facts["active_segments"] == 4
    assert facts["seen"] == [facts["inside_total"]] * 2
    assert facts["duplicates"] == [0, 0]


@pytest.mark.parametrize("run_case", ["ignored"], indirect=True)
def test_broker_of_an_unknown_authority_is_refused(run_case: RunCase, tmp_path: Path) -> None:
    other = Authority(tmp_path / "other")
    with pytest.raises(CaseFailed):
        run_case("txn_visibility", end="commit", trust=str(other.chain), operationTimeoutS=2)
