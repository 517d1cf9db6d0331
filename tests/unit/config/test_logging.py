"""What a traceback in the log tells, and what it keeps to itself."""

from collections.abc import Iterator

import pytest
import structlog

from config.logging import configure_logging


@pytest.fixture(autouse=True)
def configuration() -> Iterator[None]:
    before = structlog.get_config()
    yield
    structlog.configure(**before)


def connect(password: str) -> None:
    raise RuntimeError(f"a defect, with {len(password)} characters")


@pytest.mark.parametrize("style", ["console", "json"])
def test_a_traceback_shows_no_values_of_variables(
    capsys: pytest.CaptureFixture[str], style: str
) -> None:
    configure_logging(style=style)  # type: ignore[arg-type]
    try:
        connect("".join(["hid", "den"]))
    except RuntimeError:
        structlog.get_logger().exception("it_broke")
    told = capsys.readouterr().err
    assert "hidden" not in told
    for shown in ("it_broke", "in connect", "a defect, with 6 characters"):
        assert shown in told
