"""How a job ends that is told to."""

import os
import signal
import threading
import time

import pytest
import typer

from magnetar.cli.common import INTERRUPTED
from magnetar.spark.ending import TERMINATED, ending_on_signals


def job_told_to_end(number: signal.Signals, ended: list[str]) -> None:
    try:
        os.kill(os.getpid(), number)
        time.sleep(60)
    finally:
        ended.append("what is open")


@pytest.mark.parametrize(
    ("number", "status", "name"),
    [(signal.SIGINT, INTERRUPTED, "Ctrl-C"), (signal.SIGTERM, TERMINATED, "SIGTERM")],
)
def test_interrupted_job_closes_everything_and_ends_with_a_sentence(
    number: signal.Signals, status: int, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before, ended = signal.getsignal(signal.SIGTERM), list[str]()
    with pytest.raises(typer.Exit) as told, ending_on_signals("replay", "Run it again."):
        job_told_to_end(number, ended)
    assert ended
    assert told.value.exit_code == status
    assert capsys.readouterr().err == f"magnetar: The replay was ended by {name}. Run it again.\n"
    assert signal.getsignal(signal.SIGTERM) is before


def test_job_on_another_thread_installs_no_signal_handler() -> None:
    seen = []

    def job() -> None:
        with ending_on_signals("audit", ""):
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=job)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGTERM)]
