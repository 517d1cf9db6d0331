"""Files of providers, which are loaded again when they have changed."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from security.errors import InvalidSecret


class LoadedFiles:
    """Files of one provider: `load` loads them, and again when they have changed.

    `part` is their name in logs and metrics.
    """

    def __init__(self, part: str, paths: Sequence[Path], load: Callable[[], None]) -> None:
        self.part = part
        self._paths = paths
        self._load = load
        self._stamps = self._read_stamps()

    def reload(self) -> bool:
        """Load the files if they have changed since they were loaded; return whether they had.

        May be called in any thread.  Raises `InvalidSecret`; then the provider goes on with the
        content from before.
        """
        stamps = self._read_stamps()
        if stamps == self._stamps:
            return False
        self._load()
        # After a failure the old stamps stay, so that the next call tries again, and logs again.
        self._stamps = stamps
        return True

    def _read_stamps(self) -> list[tuple[int, ...]]:
        try:
            return [_stamp(os.stat(path)) for path in self._paths]
        except OSError as error:
            raise InvalidSecret(
                f"{error.filename} cannot be read ({error.strerror}): name a file that this "
                "process may read, or put this one back."
            ) from error


def _stamp(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
