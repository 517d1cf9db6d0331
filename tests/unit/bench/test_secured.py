"""Benchmarks reach a broker with TLS, and one with authorization, as they reach one without."""

from dataclasses import replace
from pathlib import Path

import pytest

from bench.__main__ import running
from bench.measures import Effort, connects, raw_sends
from bench.secured import SECURITY_KINDS, SecuredProcess, SecurityKind
from tests.java.broker_under_test import BrokerUnderTest

SHORT = replace(Effort.quick(), raw_s=0.05, raw_warmup_s=0.0, connects=3)


@pytest.mark.parametrize("security", SECURITY_KINDS)
def test_connections_and_sends_are_measured(security: SecurityKind, tmp_path: Path) -> None:
    broker: BrokerUnderTest = SecuredProcess(tmp_path, security)
    with running(broker):
        assert connects(broker, SHORT)["connect_p50_us"] > 0
        assert raw_sends(broker, SHORT)["raw_sends_per_s"] > 0
    assert broker.faults() == ""
