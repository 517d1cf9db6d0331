"""Places: what they are called, and that nothing is there before it is whole."""

import io
from pathlib import Path

import pytest

from magnetar.spark.errors import InvalidOption
from magnetar.spark.offload.place import WRITING, PlaceFailed, place_of


def test_directory_has_the_files_that_were_put(tmp_path: Path) -> None:
    for place in (place_of(str(tmp_path / "a b")), place_of(f"file://{tmp_path}/a%20b")):
        found = io.BytesIO()
        place.put("x/y.json", io.BytesIO(b"one"))
        place.put("x/y.json", io.BytesIO(b"two"))
        assert place.get("x/y.json", found)
        assert found.getvalue() == b"two"
        assert not place.get("x/z.json", found)
    assert [each.name for each in (tmp_path / "a b" / "x").iterdir()] == ["y.json"]


class _Broken(io.BytesIO):
    """Cannot be read to its end."""

    def read(self, size: int | None = -1) -> bytes:
        raise OSError("the disk is gone")


def test_interrupted_write_keeps_its_temporary_name(tmp_path: Path) -> None:
    place = place_of(str(tmp_path))
    with pytest.raises(PlaceFailed, match="could not be written to \\(the disk is gone\\)"):
        place.put("y.json", _Broken(b"one"))
    assert [each.name for each in tmp_path.iterdir()] == ["y.json" + WRITING]


def test_s3_place_keeps_its_settings_and_hides_secrets() -> None:
    environment = {"AWS_SECRET_ACCESS_KEY": "hidden", "AWS_REGION": "r", "HOME": "/"}
    place = place_of("s3://bucket/a/b/", environment)
    assert (place.bucket, place.path) == ("bucket", "a/b")
    assert place.settings == {"AWS_SECRET_ACCESS_KEY": "hidden", "AWS_REGION": "r"}
    assert "hidden" not in repr(place)


@pytest.mark.parametrize("url", ["", "ftp://host/x", "s3://", "s3:///x", "file://host/x"])
def test_unknown_kinds_of_places_are_refused(url: str) -> None:
    with pytest.raises(InvalidOption):
        place_of(url, {})
