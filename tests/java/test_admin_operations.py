"""Every operation of Pulsar's own admin library, called on a broker of its own.

The library's interfaces are the list, so a new version's operations are missing here until they
are in the table.  After a change: `python -m scripts.print_admin_operations --take FILE`, with the
file that the failure names.
"""

import json
from typing import Final

import pytest

from scripts.print_admin_operations import (
    ANSWERED,
    REFUSED,
    Operation,
    operations_in,
    table,
)
from tests.java.broker_under_test import MagnetarProcess
from tests.java.fixtures import serving
from tests.java.stock_driver import TARGET, StockDriver

RECORDED: Final = TARGET / "admin-operations.json"
UNREAD: Final = "HTTP 501 Not Implemented"
"""The reason that the library gives where it expects a file: it does not read the broker's."""


@pytest.fixture(scope="module")
def operations(
    stock_driver_process: StockDriver, on_peer: bool, tmp_path_factory: pytest.TempPathFactory
) -> list[Operation]:
    """What the library got for each operation."""
    if on_peer:
        pytest.skip("the table is this broker's")
    data = tmp_path_factory.mktemp("admin-operations")
    for broker in serving(MagnetarProcess(data, {"offload_url": (data / "cold").as_uri()})):
        case = stock_driver_process.start(
            "admin_operations",
            broker.url,
            broker.admin_url,
            topic="admin-operations",
            web=broker.admin_url,
        )
        rows = case.result()["operations"]
    RECORDED.write_text(json.dumps(rows), "utf-8")
    return list(operations_in(rows))


def test_each_operation_is_answered_as_the_table_says(operations: list[Operation]) -> None:
    found, wanted = set(operations), set(table().operations)
    differing = "\n".join(
        f"{'found ' if each in found else 'wanted'} {each}"
        for each in sorted(found ^ wanted, key=lambda each: (each.full_name, each in found))
    )
    assert not differing, f"recorded in {RECORDED}:\n{differing}"


def test_each_refusal_has_a_sentence(operations: list[Operation]) -> None:
    bare = [
        each
        for each in operations
        if each.outcome == REFUSED
        and each.reason != UNREAD
        and not (" " in str(each.reason) and str(each.reason).endswith("."))
    ]
    assert not bare


def test_the_library_reads_each_answer_in_time(operations: list[Operation]) -> None:
    assert {each.outcome for each in operations} == {ANSWERED, REFUSED}
