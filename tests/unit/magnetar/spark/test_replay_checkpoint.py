"""The checkpoint of a replay on a place that hangs."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

import pyarrow.fs as pa_fs
import pytest

from magnetar.spark.checkpoint_files import file_system
from magnetar.spark.errors import InvalidOption
from magnetar.spark.replay.checkpoint import ReplayCheckpoint
from magnetar.spark.replay.request import Job, Replay

JOB = Job(Replay("topic://a/b/c", "topic://a/b/d"), '{"v":1}', '{"v":2}', "replay-1")
FILE = "magnetar-replay.json"
GIVEN_UP_S = 30


class Hanging:
    """A file system of which one call gives no answer before the test has ended."""

    def __init__(self, files: pa_fs.FileSystem, call: str, ended: threading.Event) -> None:
        self._files = files
        self._call = call
        self._ended = ended

    def __getattr__(self, name: str) -> object:
        return self._hang if name == self._call else getattr(self._files, name)

    def _hang(self, *_: object, **__: object) -> object:
        assert self._ended.wait(2 * GIVEN_UP_S)
        raise OSError("nobody waits any more")


@pytest.fixture
def hanging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Makes the places of checkpoints hang in a call."""
    ended = threading.Event()
    files, root = file_system(str(tmp_path))

    def hang(call: str) -> None:
        for module in ("magnetar.spark.checkpoint_files", "magnetar.spark.replay.checkpoint"):
            found = Hanging(files, call, ended), root
            monkeypatch.setattr(f"{module}.file_system", lambda _, found=found: found)

    yield hang
    ended.set()


def asked(work: Callable[[], object]) -> object:
    """What a job gets, unless it hangs."""
    told: Future[object] = Future()

    def run() -> None:
        try:
            told.set_result(work())
        except InvalidOption as error:
            told.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return told.result(GIVEN_UP_S)


@pytest.mark.parametrize("call", ["get_file_info", "create_dir", "open_output_stream", "move"])
def test_replay_is_not_begun_on_a_hanging_file_system(
    hanging: Callable[[str], None], tmp_path: Path, call: str
) -> None:
    hanging(call)
    place = ReplayCheckpoint(str(tmp_path), 0.1)

    def begun() -> None:
        assert place.job() is None
        place.begin(JOB)

    with pytest.raises(InvalidOption, match=r"did not answer within 0\.1 s\. Look whether"):
        asked(begun)
    assert not (tmp_path / FILE).exists()


def test_replay_is_not_resumed_on_a_hanging_file_system(
    hanging: Callable[[str], None], tmp_path: Path
) -> None:
    ReplayCheckpoint(str(tmp_path)).begin(JOB)
    (tmp_path / "commits").mkdir()
    (tmp_path / "commits" / "0").write_text("v1\n{}", "utf-8")
    hanging("open_input_stream")
    place = ReplayCheckpoint(str(tmp_path), 0.1)
    for work in (place.job, place.reached):
        with pytest.raises(InvalidOption, match=r"did not answer within 0\.1 s\. Look whether"):
            asked(work)
