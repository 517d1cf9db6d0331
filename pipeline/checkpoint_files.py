"""Files of a query's checkpoint, read on the driver.

Rules: Spark calls a commit in a Python process of the driver's machine that cannot call the JVM,
so Hadoop's file systems are out of reach.  A path, or a URI `file:`, is read from this machine;
other URIs by the file systems of Arrow (`s3:`, with `s3a:` for it, `gs:`, `abfs:`, `hdfs:`), with
the credentials that Arrow finds in the environment.  What cannot be read, or does not come in time,
is an error: whoever asks is about to commit, and must not.

Arrow's calls cannot be interrupted, so each has a thread of its own (`begun`), which nothing waits
for at the end of the process.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import Final, TypeVar
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import pyarrow.fs as pa_fs

from pipeline.errors import PipelineError, PositionsUnreadable
from pipeline.offset_log import positions_of, query_of

__all__ = ["READ_TIMEOUT_S", "CheckpointFiles", "GivenPositions", "begun", "file_system"]

T = TypeVar("T")

READ_TIMEOUT_S: Final = 30.0
"""For a file of a checkpoint, where nobody has said for how long a request may take."""
_MAX_BYTES: Final = 64 * 1024 * 1024
_S3: Final = ("s3a", "s3n")


class CheckpointFiles:
    """The checkpoint at `location`, as it is in Spark's option `checkpointLocation`.

    A file of it has to come within `timeout_s`.
    """

    def __init__(self, location: str, timeout_s: float = READ_TIMEOUT_S) -> None:
        self.location = location
        self.timeout_s = timeout_s

    async def positions(self, batch: int) -> str:
        """How far the sources have been read by the end of that batch.

        Raises `PositionsUnreadable`.
        """
        return positions_of(await self._in_time(f"offsets/{batch}"))

    async def query(self) -> str:
        """Whose checkpoint it is.  Raises `PositionsUnreadable`."""
        return query_of(await self._in_time("metadata"))

    def text(self, name: str) -> str:
        """A file of the checkpoint, whenever it comes.  Raises `PositionsUnreadable`."""
        try:
            files, root = file_system(self.location)
            with files.open_input_stream(f"{root.rstrip('/')}/{name}") as stream:
                data: bytes = stream.read(_MAX_BYTES)
            return data.decode()
        except (OSError, pa.ArrowException, ValueError) as error:
            raise PositionsUnreadable(
                f"{name} of the checkpoint {self.location} cannot be read ({error}): nothing is "
                "committed. Give checkpointLocation as a URI that this machine can read (file:, "
                "s3:, gs:, abfs:, hdfs:), or go without trackPositions."
            ) from error

    async def _in_time(self, name: str) -> str:
        """As `text`."""
        waiting = asyncio.wrap_future(begun(name, lambda: self.text(name)))
        await asyncio.wait((waiting,), timeout=self.timeout_s)
        if waiting.done():
            return waiting.result()
        waiting.cancel()
        raise PositionsUnreadable(
            f"{name} of the checkpoint {self.location} did not come within {self.timeout_s:g} s: "
            "nothing is committed. Check that the place answers, and start the query again; "
            "operationTimeoutMs says how long to wait."
        )


class GivenPositions:
    """In place of a checkpoint, where whoever writes says how far it has read."""

    def __init__(self, text: str) -> None:
        self._text = text

    async def positions(self, batch: int) -> str:
        """What was given."""
        return self._text

    async def query(self) -> str:
        """Raises `PositionsUnreadable`: tasks are told whose they are."""
        raise PositionsUnreadable(
            "No task has told which job it is of: nothing is committed. Run the job again."
        )


def begun(name: str, work: Callable[[], T]) -> Future[T]:
    """What `work` will give or raise, from a thread of its own."""
    found: Future[T] = Future()
    found.set_running_or_notify_cancel()

    def run() -> None:
        try:
            found.set_result(work())
        except (OSError, pa.ArrowException, ValueError, PipelineError) as error:
            found.set_exception(error)
        except BaseException as error:
            found.set_exception(error)
            raise  # which Python tells: nobody may wait any more

    Thread(target=run, name=f"checkpoint {name}", daemon=True).start()
    return found


def file_system(location: str) -> tuple[pa_fs.FileSystem, str]:
    """What has the files of a checkpoint, and their path there.  Raises `ValueError`, `OSError`."""
    scheme = urlsplit(location).scheme
    if scheme in ("", "file"):
        path = location if not scheme else unquote(urlsplit(location).path)
        return pa_fs.LocalFileSystem(), path
    if scheme in _S3:
        location = f"s3{location[len(scheme) :]}"
    found: tuple[pa_fs.FileSystem, str] = pa_fs.FileSystem.from_uri(location)
    return found
