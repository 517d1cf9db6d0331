"""Three brokers on ZooKeeper and bookies, official clients at work, and something breaks.

What must hold whatever breaks: everything acknowledged is stored once and in key order, and read
by whoever subscribed; every transaction is whole.  The longest time without a receipt or a
delivery is printed, not judged.  Each kind happens once in a test, ten times in `make nightly`.
One test has brokers with everything on; with `MAGNETAR_TEST_SECURE` all have.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import pytest

from tests.cluster.cluster_state import state_on_failure
from tests.cluster.conftest import ROUNDS, three_brokers
from tests.cluster.faults import CUT_OFF, FAULTS, Site, require_possible
from tests.conftest import Report
from tests.java.expectations import assert_every_transaction_whole, assert_key_order
from tests.java.stock_driver import StartedCase, StockDriver
from tests.java.test_transaction_outage import OPERATION_TIMEOUT_S
from tests.servers.ground import Ground
from tests.support.broker_cluster import BrokerCluster
from tests.support.effort import by_effort
from tests.support.json_line_process import Facts

CASE_TIMEOUT_S = 120 + 60 * ROUNDS
WHY_CHARACTERS = 160
MESSAGES_PER_S: Final = by_effort(quick=500, whole=500, nightly=2_000)
"""What is compared in the end has to fit into the memory of the official client's process."""

SECURED: Final = "kill-owner"
"""The fault that `make test-all` runs on brokers with everything on, with transactions."""
NOT_NIGHTLY: Final = ("kill-owner", "pause-owner", "kill-two-bookies", "restart-metadata-store")
"""The faults under which `make test-all` sends messages without transactions too."""

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(CASE_TIMEOUT_S + 60, func_only=True)]


def marks_of(fault: str) -> list[pytest.MarkDecorator]:
    """Marks of a fault: the one that needs relays is left to `make nightly`, as it takes long."""
    return [pytest.mark.nightly] if fault == CUT_OFF else []


@pytest.fixture
def brokers(
    fault: str, ground: Ground, metadata_store_url: str, secured: bool, tmp_path: Path
) -> Iterator[BrokerCluster]:
    """Three brokers of a test's own, with relays if the fault needs them."""
    relays = fault == CUT_OFF
    with three_brokers(
        tmp_path, ground, metadata_store_url, secured=secured, relays=relays
    ) as cluster:
        yield cluster


def facts_after(case: StartedCase, fault: str, site: Site) -> Facts:
    """Facts of a case that runs on while the fault happens again and again."""
    case.wait_event("loaded", CASE_TIMEOUT_S)
    for number in range(1, ROUNDS + 1):
        FAULTS[fault](site)
        case.signal(f"back-{number}")
        case.wait_event("loaded", CASE_TIMEOUT_S)
    return case.result(CASE_TIMEOUT_S)


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(each, marks=marks_of(each) if each in NOT_NIGHTLY else pytest.mark.nightly)
        for each in FAULTS
    ],
)
def test_messages_survive(
    ground: Ground, brokers: BrokerCluster, driver: StockDriver, report: Report, fault: str
) -> None:
    require_possible(fault, brokers)
    name = f"faults-{uuid.uuid4().hex[:8]}"
    case = driver.start(
        "outage",
        brokers.url,
        brokers.admin_url,
        **brokers.java_arguments,
        topic=name,
        mode="ASYNC_UNBATCHED",
        perSecond=MESSAGES_PER_S,
        rounds=ROUNDS,
        drainLimitS=60,
        timeoutS=CASE_TIMEOUT_S,
    )
    topic = f"topic://public/default/{name}"
    site = Site(ground, brokers, topic=topic, led=topic)
    with state_on_failure(brokers, [topic]):
        facts = facts_after(case, fault, site)
    report(
        f"{fault} x {ROUNDS}: {facts['sent']} messages, longest stall of sends "
        f"{facts['longest_stall_ms']} ms, of the stream {facts['stream_longest_stall_ms']} ms, of "
        f"the queue {facts['queue_longest_stall_ms']} ms, delivered again "
        f"{facts['stream_duplicates']} and {facts['queue_duplicates']}"
    )
    assert facts["stream_complete"], facts
    assert facts["queue_complete"], facts
    assert facts["send_failures"] == 0, facts["send_failure_examples"]
    assert facts["acknowledged"] == facts["sent"] - facts["lost_by_client"]
    for prefix in ("stored_", "stream_", "queue_"):
        assert facts[f"{prefix}missing"] == 0, facts[f"{prefix}missing_examples"]
        assert facts[f"{prefix}unexpected"] == 0
    assert facts["stored_duplicates"] == 0, facts["stored_duplicate_examples"]
    assert_key_order(facts, "stored_")
    assert_key_order(facts, "stream_")
    assert not brokers.faults(), brokers.faults()


def most_frequent(failures: Mapping[str, int]) -> str:
    """Why most of those of unknown outcome were given up, if there are any."""
    if not failures:
        return ""
    why = max(failures, key=lambda kind: failures[kind])
    return f", most of them ({failures[why]}) for: {why.splitlines()[0][:WHY_CHARACTERS]}"


@pytest.mark.parametrize(
    ("fault", "secured"),
    [pytest.param(each, each == SECURED, marks=marks_of(each), id=each) for each in FAULTS],
    indirect=["secured"],
)
def test_transactions_stay_whole(
    ground: Ground, brokers: BrokerCluster, driver: StockDriver, report: Report, fault: str
) -> None:
    require_possible(fault, brokers)
    name = f"faults-{uuid.uuid4().hex[:8]}"
    case = driver.start(
        "txn_outage",
        brokers.url,
        brokers.admin_url,
        **brokers.java_arguments,
        topic=name,
        rounds=ROUNDS,
        inputs=1000,
        reshape=True,
        operationTimeoutS=OPERATION_TIMEOUT_S,
        timeoutS=CASE_TIMEOUT_S,
    )
    topic = f"topic://public/default/{name}"
    site = Site(ground, brokers, topic=f"{topic}-in", led=f"{topic}-a")
    with state_on_failure(brokers, [f"{topic}-{each}" for each in ("in", "a", "b")]):
        facts = facts_after(case, fault, site)
    report(
        f"{fault} x {ROUNDS} under transactions: {facts['committed']} committed, "
        f"{facts['aborted']} aborted, {facts['unknown']} unknown of which "
        f"{facts['unknown_stored']} stored, longest stall of ends {facts['longest_stall_ms']} ms"
        f"{most_frequent(facts['failure_kinds'])}"
    )
    assert_every_transaction_whole(facts)
    assert not brokers.faults(), brokers.faults()
