"""A Java program that tests talk to in lines of JSON, over its standard input and output.

Rules: it says `{"event": "serving"}` when it is up; a thread reads what it prints and hands every
line to `on_line`; when it has ended, `on_end` is called in that thread; its standard error goes to
a log.
"""

import json
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from tests.support.child_process import LOG_TAIL, ChildFailed, dying_with_its_parent

START_TIMEOUT_S: Final = 60
END_TIMEOUT_S: Final = 10

Facts = dict[str, Any]


class JsonLineProcess:
    """The running program; the constructor returns when it serves."""

    def __init__(
        self,
        name: str,
        command: list[str],
        log_path: Path,
        on_line: Callable[[Facts], None],
        on_end: Callable[[], None],
    ) -> None:
        self._on_line = on_line
        self._on_end = on_end
        with log_path.open("ab") as log:
            self._process = subprocess.Popen(
                dying_with_its_parent(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                encoding="utf-8",
                start_new_session=True,
            )
        self._writing = threading.Lock()
        self._told = threading.Event()
        self._serving = False
        threading.Thread(target=self._read, name=name, daemon=True).start()
        self._told.wait(START_TIMEOUT_S)
        if not self._serving:
            self.close()
            tail = log_path.read_text("utf-8", "replace")[-LOG_TAIL:]
            raise ChildFailed(f"{name} does not start; its log ends so:\n{tail}")

    @property
    def pid(self) -> int:
        """Of the program."""
        return self._process.pid

    def write(self, request: Facts) -> None:
        """Send one line."""
        assert self._process.stdin is not None
        with self._writing:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()

    def close(self) -> None:
        """End its input, so that it ends; kill it if it does not."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        self._process.kill()
        self._process.wait(END_TIMEOUT_S)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for text in self._process.stdout:
            line = json.loads(text)
            if line.get("event") == "serving":
                self._serving = True
                self._told.set()
                continue
            self._on_line(line)
        self._told.set()
        self._on_end()
