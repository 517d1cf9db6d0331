"""The demo is not begun where it cannot come to its end."""

import shutil
import tempfile
from importlib.metadata import EntryPoints
from pathlib import Path
from types import SimpleNamespace

import pytest

from magnetar.bounds import DEMO_ROOM_BYTES
from magnetar.cli.demo import stage
from magnetar.cli.demo.processes import DemoFailed
from magnetar.cli.demo.stage import perform


def test_demo_refuses_to_start_without_free_disk_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def usage(place: str) -> SimpleNamespace:
        assert place == str(tmp_path)
        return SimpleNamespace(free=DEMO_ROOM_BYTES - 1)

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(shutil, "disk_usage", usage)
    with pytest.raises(DemoFailed, match=r"Only 63 MiB are free .* by TMPDIR"):
        perform(300, keep=False)
    assert list(tmp_path.iterdir()) == []


def test_demo_without_a_broker_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_installed(group: str, name: str) -> EntryPoints:
        assert (group, name) == ("magnetar.commands", "standalone")
        return EntryPoints()

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(stage, "entry_points", none_installed)
    with pytest.raises(DemoFailed, match="install magnetar-broker beside magnetar"):
        perform(300, keep=False)
    assert list(tmp_path.iterdir()) == []
