"""Two peers never share a directory."""

import os
from pathlib import Path

import pytest

from tests.java.peer_process import PeerInUse, PeerProcess


def test_the_directory_of_a_peer_belongs_to_one_at_a_time(tmp_path: Path) -> None:
    first, second = PeerProcess(1, 2, tmp_path), PeerProcess(3, 4, tmp_path)
    first.wipe()
    data = tmp_path / "run" / "data"
    data.mkdir(parents=True)
    for taking in (second.wipe, second.spawn):
        with pytest.raises(PeerInUse, match=rf"in use by process {os.getpid()}: wait"):
            taking()
    assert data.exists()
    first.wipe()
    assert not data.exists()
    first.stop()
    second.wipe()
    with pytest.raises(PeerInUse):
        first.wipe()
    second.kill()
    first.wipe()
    first.kill()
