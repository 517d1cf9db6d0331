"""File descriptors: what files, clients and HTTP get of them."""

import resource
import subprocess
import sys

import pytest
from structlog.testing import capture_logs

from broker.app.descriptors import raise_descriptor_limit, share_descriptors
from config.bounds import DESCRIPTORS_FOR_FILES
from config.settings import Settings

SETTINGS = Settings(max_connections=1000, max_http_connections=200)
NEEDED = DESCRIPTORS_FOR_FILES + 1200


@pytest.mark.parametrize("limit", [None, NEEDED, 1_000_000])
def test_enough_descriptors_give_what_is_set(limit: int | None) -> None:
    shares = share_descriptors(limit, SETTINGS)
    assert (shares.binary, shares.http, shares.needed) == (1000, 200, NEEDED)
    with capture_logs() as logged:
        shares.warn_if_short()
    assert not logged


@pytest.mark.parametrize("limit", [64, 256, 1024, NEEDED - 1])
def test_too_few_descriptors_are_shared_and_reported(limit: int) -> None:
    shares = share_descriptors(limit, SETTINGS)
    files = min(DESCRIPTORS_FOR_FILES, limit // 4)
    assert shares.binary + shares.http + files <= limit
    assert shares.http >= 6
    assert shares.binary > 3 * shares.http
    with capture_logs() as logged:
        shares.warn_if_short()
    (line,) = logged
    assert (line["event"], line["limit"]) == ("file_descriptors_too_few", limit)


def test_soft_limit_is_raised_to_the_hard_one() -> None:
    program = (
        "import resource; from broker.app.descriptors import raise_descriptor_limit as up;"
        "hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1];"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (128, min(hard, 512)));"
        "up(10_000); print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert int(done.stdout) == min(512, resource.getrlimit(resource.RLIMIT_NOFILE)[1])


def test_refused_limit_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_kind: int, _limits: tuple[int, int]) -> None:
        raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr(resource, "setrlimit", refuse)
    raise_descriptor_limit(10_000)
