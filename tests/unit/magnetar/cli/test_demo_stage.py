"""The demo is not begun where it cannot come to its end."""

import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from magnetar.bounds import DEMO_DISK_BYTES
from magnetar.cli.demo.processes import DemoFailed
from magnetar.cli.demo.stage import perform


def test_demo_refuses_to_start_without_free_disk_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def usage(place: str) -> SimpleNamespace:
        assert place == str(tmp_path)
        return SimpleNamespace(free=DEMO_DISK_BYTES - 1)

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(shutil, "disk_usage", usage)
    with pytest.raises(DemoFailed, match=r"Only 63 MiB are free .* by TMPDIR"):
        perform(300, keep=False)
    assert list(tmp_path.iterdir()) == []
