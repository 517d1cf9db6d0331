"""The checkpoint of a replay: Spark's own files, and one that says what it is of.

Rules: the file is whole or not there (written beside, then renamed), and is written before the
query starts; of batches only those count that Spark has noted as committed.
"""

from contextlib import suppress
from typing import Final

import pyarrow as pa
import pyarrow.fs as pa_fs

from pipeline.checkpoint_files import CheckpointFiles, file_system
from pipeline.errors import InvalidOption
from pipeline.offset_log import positions_of
from pipeline.replay.request import Job, job_of_text, text_of_job

__all__ = ["ReplayCheckpoint"]

NAME: Final = "magnetar-replay.json"


class ReplayCheckpoint:
    """At `location`, as Spark is told it.  All methods raise `InvalidOption` if it is no place."""

    def __init__(self, location: str) -> None:
        try:
            self._files, root = file_system(location)
        except (OSError, pa.ArrowException, ValueError) as error:
            raise self._unusable(location, error) from error
        self.location = location
        self._root = root.rstrip("/")

    def job(self) -> Job | None:
        """What it is of; None: it is new."""
        path = f"{self._root}/{NAME}"
        try:
            if self._files.get_file_info(path).type is pa_fs.FileType.NotFound:
                return None
            with self._files.open_input_stream(path) as stream:
                return job_of_text(stream.read().decode())
        except (OSError, pa.ArrowException) as error:
            raise self._unusable(self.location, error) from error

    def begin(self, job: Job) -> None:
        """Write down what it is of.  Raises `InvalidOption` if it is of something else already."""
        try:
            if self._has_query():
                raise InvalidOption(
                    f"{self.location} is the checkpoint of another query; give the replay a "
                    "directory of its own."
                )
            self._files.create_dir(self._root, recursive=True)
            path = f"{self._root}/{NAME}"
            with self._files.open_output_stream(f"{path}.new") as stream:
                stream.write(text_of_job(job).encode())
            self._files.move(f"{path}.new", path)
        except (OSError, pa.ArrowException) as error:
            raise self._unusable(self.location, error) from error

    def reached(self) -> str | None:
        """Positions at the end of the last batch that was committed; None: there is none.

        Raises `PositionsUnreadable`.
        """
        batches = self._batches()
        if not batches:
            return None
        return positions_of(CheckpointFiles(self.location).text(f"offsets/{max(batches)}"))

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

    @staticmethod
    def _unusable(location: str, error: Exception) -> InvalidOption:
        return InvalidOption(
            f"The checkpoint {location} cannot be used ({error}); give a directory, or a URI that "
            "this machine can read and write (file:, s3:, gs:, abfs:, hdfs:)."
        )
