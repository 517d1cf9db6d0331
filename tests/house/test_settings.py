"""Settings: precedence of the sources, and refusals that say what to mend."""

from pathlib import Path

import pytest

from config.settings import ConfigurationError, load_settings


def test_command_line_beats_environment_beats_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "broker.toml"
    file.write_text("port = 1\nhttp_port = 2\ncluster_name = 'c'\n")
    monkeypatch.setenv("MAGNETAR_PORT", "3")
    monkeypatch.setenv("MAGNETAR_HTTP_PORT", "4")
    settings = load_settings(file, {"port": 5, "http_port": None})
    assert (settings.port, settings.http_port, settings.cluster_name) == (5, 4, "c")


def test_an_unknown_name_is_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "broker.toml"
    file.write_text("prot = 1\n")
    with pytest.raises(ConfigurationError, match=r"'prot'.*magnetar config"):
        load_settings(file)


def test_a_wrong_value_is_refused_with_the_value() -> None:
    with pytest.raises(ConfigurationError, match=r"http_port = 70000"):
        load_settings(None, {"http_port": 70000})


@pytest.mark.parametrize("text", ["port = = 1", "\xff"])
def test_a_broken_file_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "broker.toml"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigurationError, match="mend that line"):
        load_settings(file)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be read"):
        load_settings(tmp_path / "none.toml")
