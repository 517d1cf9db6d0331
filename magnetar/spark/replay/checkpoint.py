"""The checkpoint of a replay: Spark's own files, and one that names the replay."""

from collections.abc import Callable
from concurrent.futures import wait
from contextlib import suppress
from typing import Final, TypeVar

import pyarrow as pa
import pyarrow.fs as pa_fs

from magnetar.spark.checkpoint_files import (
    READ_TIMEOUT_S,
    CheckpointFiles,
    file_system,
    run_in_thread,
)
from magnetar.spark.errors import InvalidOption, PipelineError
from magnetar.spark.offset_log import positions_of
from magnetar.spark.replay.request import Job, job_of_text, text_of_job

__all__ = ["ReplayCheckpoint"]

T = TypeVar("T")

NAME: Final = "magnetar-replay.json"


class ReplayCheckpoint:
    """The checkpoint at `location`, as given to Spark; each step must end within `timeout_s`.

    All methods raise `InvalidOption` if it is no place, or does not answer in time.
    """

    def __init__(self, location: str, timeout_s: float = READ_TIMEOUT_S) -> None:
        self.location = location
        self._timeout_s = timeout_s
        self._files, root = self._done(lambda: file_system(location))
        self._root = root.rstrip("/")

    def job(self) -> Job | None:
        """The replay to which the checkpoint belongs; None if the checkpoint is new."""
        path = f"{self._root}/{NAME}"

        def read() -> str | None:
            if self._files.get_file_info(path).type is pa_fs.FileType.NotFound:
                return None
            with self._files.open_input_stream(path) as stream:
                data: bytes = stream.read()
            return data.decode()

        text = self._done(read)
        return None if text is None else job_of_text(text)

    def begin(self, job: Job) -> None:
        """Write the file that names the replay; call it before the query starts.

        Raises `InvalidOption` if it is the checkpoint of another query.
        """
        if self._done(self._has_query):
            raise InvalidOption(
                f"{self.location} is the checkpoint of another query; give the replay a "
                "directory of its own."
            )
        path = f"{self._root}/{NAME}"

        def write() -> None:
            with self._files.open_output_stream(f"{path}.new") as stream:
                stream.write(text_of_job(job).encode())

        # Written beside it and renamed, so that the file is whole or missing.
        self._done(lambda: self._files.create_dir(self._root, recursive=True))
        self._done(write)
        self._done(lambda: self._files.move(f"{path}.new", path))

    def reached(self) -> str | None:
        """Positions at the end of the last batch that Spark committed; None: there is none.

        Raises `PositionsUnreadable`.
        """
        batches = self._done(self._batches)
        if not batches:
            return None
        files = CheckpointFiles(self.location)
        return positions_of(self._done(lambda: files.text(f"offsets/{max(batches)}")))

    def _batches(self) -> list[int]:
        selected = pa_fs.FileSelector(f"{self._root}/commits", allow_not_found=True)
        found: list[int] = []
        for info in self._files.get_file_info(selected):
            with suppress(ValueError):
                found.append(int(info.base_name))
        return found

    def _has_query(self) -> bool:
        info = self._files.get_file_info(f"{self._root}/metadata")
        return info.type is not pa_fs.FileType.NotFound

    def _done(self, step: Callable[[], T]) -> T:
        """Run a step within the time.  Raises `InvalidOption`, and the step's `PipelineError`."""
        # A file system that hangs must not hang the job: a late step is abandoned.
        asked = run_in_thread("of a replay", step)
        if not wait((asked,), self._timeout_s).done:
            raise InvalidOption(
                f"The checkpoint {self.location} did not answer within {self._timeout_s:g} s. Look "
                "whether the place can be read and written, and run the same command again."
            )
        try:
            return asked.result()
        except PipelineError:
            raise
        except (OSError, pa.ArrowException, ValueError) as error:
            raise InvalidOption(
                f"The checkpoint {self.location} cannot be used ({error}); give a directory, or a "
                "URI that this machine can read and write (file:, s3:, gs:, abfs:, hdfs:)."
            ) from error
