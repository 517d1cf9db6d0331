"""Places for copies: a directory, and a bucket of an S3 server on the loopback interface."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from storage.offload.context import Location, parse_location
from tests.support.object_store import S3Server, s3_server


@pytest.fixture(scope="session")
def s3() -> Iterator[S3Server]:
    with s3_server() as server, pytest.MonkeyPatch.context() as environment:
        for name, value in server.environment.items():
            environment.setenv(name, value)
        yield server


@pytest.fixture(params=["path", "s3"])
def location(request: pytest.FixtureRequest, tmp_path: Path) -> Location:
    if request.param == "path":
        return parse_location(str(tmp_path / "copies of ledgers"))
    server: S3Server = request.getfixturevalue("s3")
    return server.new_location("some/prefix")
