"""The loop that prints messages, and the values that `perf` sends."""

import pytest

from magnetar.cli.messages import ESCAPED_HINT, Printing, print_all
from magnetar.cli.perf import VALUE_MARK, load_value
from magnetar.cli.rendering import Rendering, as_json, as_line, as_value, is_plain_text
from magnetar.consume.message import Message
from tests.unit.magnetar.cli.test_rendering import message


class Consumer:
    """A consumer of these values, one in each batch."""

    def __init__(self, *values: bytes) -> None:
        self._values = list(values)

    def receive_batch(
        self, max_messages: int, timeout_s: float | None = None
    ) -> list[Message[bytes]]:
        return [message(self._values.pop(0))] if self._values else []


@pytest.mark.parametrize(
    ("show", "values", "hints"),
    [
        (as_value, [b"text", b"\xff", b"\x00"], 1),
        (as_line, [b"\x1b[2J"], 1),
        (as_value, ["grün\t\n".encode()], 0),
        (as_json, [b"\xff"], 0),
    ],
)
def test_first_binary_value_is_followed_by_one_hint(
    capsys: pytest.CaptureFixture[str], show: Rendering, values: list[bytes], hints: int
) -> None:
    printed: list[Message[bytes]] = []
    print_all(Consumer(*values), Printing(show, None, 0.1), printed.extend)
    out, err = capsys.readouterr()
    assert [each.data for each in printed] == values
    assert err == f"{ESCAPED_HINT}\n" * hints
    assert is_plain_text(out.encode())


@pytest.mark.parametrize("size", [0, 1, 14, 100, 5000])
def test_value_of_a_load_is_text_of_the_given_size(size: int) -> None:
    value = load_value(size)
    assert len(value) == size
    assert is_plain_text(value)
    assert value.startswith(VALUE_MARK.encode()[:size])
