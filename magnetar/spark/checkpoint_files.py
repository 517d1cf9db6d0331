"""Files of a query's checkpoint, read on the driver.

Spark calls a commit in a Python process that cannot call the JVM, so Hadoop's file systems are out
of reach: URIs other than `file:` are read by the file systems of Arrow.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import Final, TypeVar
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import pyarrow.fs as pa_fs

from magnetar.spark.errors import PipelineError, PositionsUnreadable
from magnetar.spark.offset_log import positions_of, query_of

__all__ = ["READ_TIMEOUT_S", "CheckpointFiles", "GivenPositions", "run_in_thread", "file_system"]

T = TypeVar("T")

READ_TIMEOUT_S: Final = 30.0
"""Time for a file of a checkpoint, where no operation timeout is given."""
_MAX_BYTES: Final = 64 * 1024 * 1024
_S3: Final = ("s3a", "s3n")


class CheckpointFiles:
    """The checkpoint at `location`, which is Spark's option `checkpointLocation`.

    A path or `file:` is read from this machine; `s3:` (also `s3a:`), `gs:`, `abfs:` and `hdfs:` by
    Arrow, with the credentials that it finds in the environment.  A file that cannot be read, or
    not within `timeout_s`, raises `PositionsUnreadable`: the caller must not commit without it.
    """

    def __init__(self, location: str, timeout_s: float = READ_TIMEOUT_S) -> None:
        self.location = location
        self.timeout_s = timeout_s

    async def positions(self, batch: int) -> str:
        """The positions of the sources at the end of a batch.  Raises `PositionsUnreadable`."""
        return positions_of(await self._in_time(f"offsets/{batch}"))

    async def query(self) -> str:
        """The id of the checkpoint's query.  Raises `PositionsUnreadable`."""
        return query_of(await self._in_time("metadata"))

    def text(self, name: str) -> str:
        """Read a file of the checkpoint, however long it takes.  Raises `PositionsUnreadable`."""
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
        """Read a file as `text`, within `timeout_s`."""
        waiting = asyncio.wrap_future(run_in_thread(name, lambda: self.text(name)))
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
    """A stand-in for a checkpoint, with positions that the user has given."""

    def __init__(self, text: str) -> None:
        self._text = text

    async def positions(self, batch: int) -> str:
        """The text that was given."""
        return self._text

    async def query(self) -> str:
        """Raise `PositionsUnreadable`: tasks of a job always report its id."""
        raise PositionsUnreadable(
            "No task has reported its job: nothing is committed. Run the job again."
        )


def run_in_thread(name: str, work: Callable[[], T]) -> Future[T]:
    """Run `work` on a thread of its own; return its result or raise its error."""
    # Arrow's calls cannot be interrupted, and the end of the process must not wait for one.
    found: Future[T] = Future()
    found.set_running_or_notify_cancel()

    def run() -> None:
        try:
            found.set_result(work())
        except (OSError, pa.ArrowException, ValueError, PipelineError) as error:
            found.set_exception(error)
        except BaseException as error:
            found.set_exception(error)
            raise  # Python prints it: the caller may have stopped waiting.

    Thread(target=run, name=f"checkpoint {name}", daemon=True).start()
    return found


def file_system(location: str) -> tuple[pa_fs.FileSystem, str]:
    """The file system of a checkpoint, and its path there.  Raises `ValueError`, `OSError`."""
    scheme = urlsplit(location).scheme
    if scheme in ("", "file"):
        path = location if not scheme else unquote(urlsplit(location).path)
        return pa_fs.LocalFileSystem(), path
    if scheme in _S3:
        location = f"s3{location[len(scheme) :]}"
    found: tuple[pa_fs.FileSystem, str] = pa_fs.FileSystem.from_uri(location)
    return found
