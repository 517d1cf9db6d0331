"""The progress of a job: a bar in a terminal, else plain lines."""

import time
from types import TracebackType
from typing import Final, Self

import rich.progress
from rich.console import Console

__all__ = ["Progress"]

LINE_S: Final = 2.0


class Progress:
    """A context manager that shows progress.

    Without a terminal it prints a line when something has changed, at most every LINE_S, and the
    last one always.
    """

    def __init__(self, title: str, console: Console | None = None) -> None:
        self._title = title
        self._console = console or Console()
        self._bar: rich.progress.Progress | None = None
        self._task: rich.progress.TaskID | None = None
        self._line = self._written = ""
        self._written_at_s = 0.0

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._bar = rich.progress.Progress(
                rich.progress.TextColumn("{task.description}"),
                rich.progress.BarColumn(),
                rich.progress.TaskProgressColumn(),
                rich.progress.TimeElapsedColumn(),
                rich.progress.TextColumn("{task.fields[said]}"),
                console=self._console,
            )
            self._bar.start()
            self._task = self._bar.add_task(self._title, total=None, said="")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        self._write()

    def show(self, done: int, total: int | None, said: str) -> None:
        """Show how much is done, of `total` if that is known, and the text `said`."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=done, total=total, said=said)
            return
        share = f" ({min(100 * done // total, 100)} %)" if total else ""
        self._line = f"{self._title}{share}: {said}"
        if time.monotonic() >= self._written_at_s + LINE_S:
            self._write()

    def _write(self) -> None:
        if self._line != self._written:
            self._console.print(self._line, markup=False, highlight=False, soft_wrap=True)
            self._written, self._written_at_s = self._line, time.monotonic()
