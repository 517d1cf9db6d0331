"""The end of a broker process."""

import asyncio

import pytest
from structlog.testing import capture_logs

from broker.cli import serving


async def test_stores_that_do_not_answer_are_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(serving, "BROKER_STOP_S", 0.01)
    never: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    with capture_logs() as logged:
        await asyncio.wait_for(serving.stop_in_time(never), 5)
    assert [each["event"] for each in logged] == ["stop_timed_out"]
    assert never.cancelled()
