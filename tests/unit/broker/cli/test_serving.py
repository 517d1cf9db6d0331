"""The first words and the end of a broker process."""

import asyncio

from structlog.testing import capture_logs

from broker.cli import serving
from config.settings import Settings


async def test_stores_that_do_not_answer_are_not_waited_for() -> None:
    never: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    with capture_logs() as logged:
        await asyncio.wait_for(serving.stop_in_time(never, 0.01), 5)
    assert [each["event"] for each in logged] == ["stop_timed_out"]
    assert never.cancelled()


def test_banner_suggests_a_command_with_this_brokers_url() -> None:
    hint = "topics get my-topic --admin-url http://127.0.0.1:18080\n"
    assert hint in serving.banner(Settings(), 16650, 18080, 0.1)
    assert "--admin-url" not in serving.banner(Settings(), 6650, 8080, 0.1)
