"""Cases of the official clients, each on a fresh topic."""

import uuid

from tests.java.broker_under_test import BrokerUnderTest
from tests.java.stock_driver import StockDriver
from tests.support.json_line_process import Facts


def run_on_fresh_topic(
    driver: StockDriver, broker: BrokerUnderTest, case: str, **arguments: object
) -> Facts:
    """Run a case on a fresh topic, unless the arguments name one, and return its facts."""
    topic = f"{case.replace('_', '-')}-{uuid.uuid4().hex[:8]}"
    given = {"topic": topic, "web": broker.admin_url, **arguments}
    return driver.start(case, broker.url, broker.admin_url, **given).result()
