"""First programs of pulsar-client-go and its admin client, run with both kinds of service URL."""

import uuid
from pathlib import Path

import pytest

from tests.interop.go_client import build_go_client
from tests.java.broker_under_test import BrokerUnderTest
from tests.java.fixtures import RunningPeer
from tests.support.tools import completed, missing_go, require

RUN_TIMEOUT_S = 50


@pytest.fixture(scope="session")
def program() -> Path:
    require(missing_go(), "Go client", "Go 1.24")
    return build_go_client()


@pytest.mark.long
@pytest.mark.parametrize("kind", ["pulsar", "http"])
def test_the_go_client_does_what_its_users_do_first(
    broker: BrokerUnderTest | RunningPeer, program: Path, kind: str, on_peer: bool
) -> None:
    url = broker.url if kind == "pulsar" else broker.admin_url
    namespace = f"public/go-{uuid.uuid4().hex[:8]}"
    done = completed([str(program), url, broker.admin_url, namespace], timeout_s=RUN_TIMEOUT_S)
    *steps, last = done.stdout.splitlines() or [""]
    assert (done.returncode, last) == (0, "done"), done.stdout + done.stderr[-4000:]
    assert steps
    # docs/differences.md, two transactions in one SEND: the peer delivers what was aborted
    failing = [step for step in steps if not step.startswith("ok ")]
    expected = ["failed transactions: the message of the commit: found 0, not 1"] if on_peer else []
    assert failing == expected
