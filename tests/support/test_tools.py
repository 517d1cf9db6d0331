"""Missing tools fail under CI and skip elsewhere; what is built is kept until a source changes."""

from pathlib import Path

import pytest

from tests.support.tools import built_once, digest_of, require


def test_nothing_missing_goes_on() -> None:
    require(None, "some", "something")


def test_missing_tool_fails_under_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="must run under CI, but Go is not installed"):
        require("Go is not installed", "Oxia", "Go")


def test_missing_tool_skips_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    with (
        pytest.warns(UserWarning, match="OXIA TESTS DO NOT RUN"),
        pytest.raises(pytest.skip.Exception, match="Install Go to run them"),
    ):
        require("Go is not installed", "Oxia", "Go")


def test_built_again_only_when_a_source_changed(tmp_path: Path) -> None:
    source, stamp, builds = tmp_path / "source", tmp_path / "out" / "stamp", []

    def build_now() -> None:
        built_once(stamp, digest_of([source], tmp_path), lambda: builds.append(1))

    source.write_text("one")
    build_now()
    build_now()
    assert len(builds) == 1
    source.write_text("two")
    build_now()
    assert len(builds) == 2


def test_a_build_that_fails_is_tried_again(tmp_path: Path) -> None:
    stamp = tmp_path / "stamp"

    def fail() -> None:
        raise RuntimeError("no network")

    stamp.write_text("old")
    with pytest.raises(RuntimeError, match="no network"):
        built_once(stamp, "new", fail)
    assert not stamp.exists()
