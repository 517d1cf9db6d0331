"""What is one of a few may be given by its name; anything else is told at once."""

import pytest

from magnetar.compression import CompressionType
from magnetar.consume.settings import InitialPosition, QueueSettings, StreamSettings
from magnetar.errors import InvalidArgument
from magnetar.produce.producer_settings import ProducerSettings
from magnetar.settings import member_of


def test_members_and_their_names_in_either_case() -> None:
    assert member_of(CompressionType, "zstd") is CompressionType.ZSTD
    assert member_of(CompressionType, "ZSTD") is CompressionType.ZSTD
    assert member_of(CompressionType, CompressionType.LZ4) is CompressionType.LZ4


def test_names_reach_what_is_said_to_the_broker() -> None:
    for settings in (QueueSettings(initial_position="earliest"), QueueSettings()):
        said = settings.of_segment("s", 0, None).initial_position
        given = settings.initial_position
        assert said is (InitialPosition.EARLIEST if given == "earliest" else given)
    stream = StreamSettings(initial_position="earliest")
    assert stream.of_segment("s", "c", 0, None).initial_position is InitialPosition.EARLIEST


@pytest.mark.parametrize(
    ("make", "known"),
    [
        (lambda: QueueSettings(initial_position="first"), "'earliest'"),  # type: ignore[arg-type]
        (lambda: StreamSettings(initial_position=1), "'latest'"),  # type: ignore[arg-type]
        (lambda: ProducerSettings(compression="gzip"), "'zlib'"),  # type: ignore[arg-type]
        (lambda: ProducerSettings(access_mode="alone"), "'exclusive'"),  # type: ignore[arg-type]
    ],
)
def test_unknown_member_name_is_refused(make: object, known: str) -> None:
    with pytest.raises(InvalidArgument, match=known):
        make()  # type: ignore[operator]
