"""The generated modules are those of the `.proto` files; the command table holds together."""

from pathlib import Path

import pytest

from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.server_error import ServerError
from scripts.generate_proto import ROOT, generate, proto_files


@pytest.mark.parametrize("proto", proto_files())
def test_generated_modules_are_fresh(proto: str, tmp_path: Path) -> None:
    for fresh in generate(proto, tmp_path):
        committed = ROOT / fresh.relative_to(tmp_path)
        assert committed.read_bytes() == fresh.read_bytes(), "run `make proto`"


def test_each_command_is_in_the_field_of_its_number_and_name() -> None:
    descriptor = pb.BaseCommand.DESCRIPTOR
    types = {value.number: value.name for value in pb.BaseCommand.Type.DESCRIPTOR.values}
    fields = {field.number: field.name for field in descriptor.fields if field.number != 1}
    assert fields == {number: name.lower() for number, name in types.items()}
    assert sorted(types) == [
        *(*range(2, 41), *range(50, 69), *range(70, 83)),
        *range(1000, 1018),  # our own
    ]


def test_server_errors_are_the_same_in_both_places() -> None:
    def plain(name: str) -> str:
        return name.replace("_", "").lower()

    wire = {plain(name): number for name, number in pb.ServerError.items()}
    assert wire == {plain(error.name): error.value for error in ServerError}


def test_negative_ids_travel_as_ten_byte_varints() -> None:
    wire = pb.CommandCloseProducer(producer_id=1, request_id=2**64 - 1).SerializeToString()
    assert wire == b"\x08\x01\x10" + b"\xff" * 9 + b"\x01"
