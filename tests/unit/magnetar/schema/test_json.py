"""JSON: definitions and payloads beside those of the official Java client."""

import dataclasses
import decimal
import json
from typing import Literal, NewType

import pydantic
import pytest

from magnetar.errors import InvalidArgument, InvalidMessage
from magnetar.schema.avro_definition import Json
from magnetar.schema.json import json_of
from tests.unit.magnetar.schema.golden import JAVA, without_list_classes
from tests.unit.magnetar.schema.samples import (
    All,
    Node,
    Small,
    SmallDict,
    SmallModel,
    Times,
    everything,
    moments,
)


def definition(kind: type[object], namespace: str | None = None) -> dict[str, Json]:
    found: dict[str, Json] = json.loads(json_of(kind, namespace=namespace).info.schema_data)
    return found


def fields(kind: type[object]) -> dict[str, dict[str, Json]]:
    info = json_of(kind).info
    return {each["name"]: each for each in json.loads(info.schema_data)["fields"]}


def test_the_definition_is_javas() -> None:
    info = json_of(Small, namespace="Gold").info
    assert info.schema_data.decode() == JAVA["small_definition"]
    assert (info.type, info.name) == (2, "")
    assert {each.key: each.value for each in info.properties} == {
        "__alwaysAllowNull": "true",
        "__jsr310ConversionEnabled": "false",
    }


def test_the_definition_is_javas_for_all_types() -> None:
    java = without_list_classes(json.loads(JAVA["json_definition"]))
    assert definition(All, namespace="Gold") == java
    assert definition(Times, namespace="Gold") == json.loads(JAVA["times_definition"])


def test_a_record_inside_of_itself() -> None:
    schema = json_of(Node, namespace="Gold")
    assert schema.info.schema_data.decode() == JAVA["node_definition"]
    nodes = Node(1, Node(2, None))
    assert schema.decode(schema.encode(nodes)) == nodes
    assert schema.decode(b'{"v":1,"next":{"v":2}}') == nodes


def test_without_nulls_that_the_type_does_not_have() -> None:
    info = json_of(Small, namespace="Gold", always_allow_null=False).info
    assert info.schema_data.decode() == JAVA["small_not_nullable_definition"]
    assert info.properties[0].value == "false"


def test_models_and_typed_dicts_are_as_dataclasses() -> None:
    small = definition(Small)
    assert definition(SmallModel) == small | {"name": "SmallModel"}
    assert fields(SmallDict)["sensor"] == fields(Small)["sensor"]
    assert fields(SmallDict)["unit"]["type"] == ["null", "string"]
    schema = json_of(SmallModel)
    assert schema.decode(b'{"sensor":"s","value":3}') == SmallModel(sensor="s", value=3)
    assert schema.encode(SmallModel(sensor="s", value=3)) == b'{"sensor":"s","value":3}'
    assert json_of(SmallDict).decode(b'{"sensor":"s","value":3}') == {"sensor": "s", "value": 3}


def test_payloads_of_java_are_read() -> None:
    assert json_of(All).decode(JAVA["json_value"].encode()) == everything()
    expected = moments(decimal.Decimal("1.50"))
    assert json_of(Times).decode(JAVA["times_json_value"].encode()) == expected


def test_json_equals_javas_with_nulls_added() -> None:
    java = json.loads(JAVA["json_value"])
    written = json.loads(json_of(All).encode(everything()))
    assert {key: value for key, value in written.items() if value is not None} == java


def test_moments_are_iso() -> None:
    schema = json_of(Times)
    written = schema.encode(moments(decimal.Decimal("1.50")))
    assert json.loads(written)["at"] == "2023-11-14T22:13:20.123000Z"
    assert schema.decode(written) == moments(decimal.Decimal("1.50"))


def test_decimals_keep_every_digit() -> None:
    @dataclasses.dataclass
    class Price:
        amount: decimal.Decimal
        weight: float

    read = json_of(Price).decode(b'{"amount":12345678901234567890.12,"weight":0.5}')
    assert read == Price(decimal.Decimal("12345678901234567890.12"), 0.5)
    assert isinstance(read.weight, float)


def test_defaults() -> None:
    @dataclasses.dataclass
    class Defaults:
        unit: str = "K"
        count: int = 5
        maybe: str | None = None
        names: list[str] = dataclasses.field(default_factory=list)
        at: float | None = 1

    found = fields(Defaults)
    assert found["unit"] == {"name": "unit", "type": ["string", "null"], "default": "K"}
    assert found["count"] == {"name": "count", "type": "long", "default": 5}
    assert found["maybe"] == {"name": "maybe", "type": ["null", "string"], "default": None}
    assert found["names"]["default"] == []
    assert found["at"] == {"name": "at", "type": ["double", "null"], "default": 1.0}
    schema = json_of(Defaults)
    assert schema.decode(b"{}") == Defaults()
    # Null where Python has none, as Java may write it.
    assert schema.decode(b'{"unit":null,"names":null,"at":null}') == Defaults(at=None)


def test_field_that_java_omits_is_none() -> None:
    @dataclasses.dataclass
    class Maybe:
        sensor: str | None
        value: int

    assert json_of(Maybe).decode(b'{"value":3}') == Maybe(None, 3)


def test_missing_required_field_is_refused() -> None:
    with pytest.raises(InvalidMessage, match="sensor"):
        json_of(Small).decode(b'{"value":3}')


def test_fields_that_nobody_knows_are_ignored() -> None:
    assert json_of(Small).decode(b'{"sensor":"s","value":3,"more":[1]}') == Small("s", 3)


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"3", b"\xff", b'{"sensor":1,"value":"x"}'])
def test_bytes_that_are_no_value(data: bytes) -> None:
    with pytest.raises(InvalidMessage):
        json_of(Small).decode(data)


def test_bytes_that_are_no_base64() -> None:
    @dataclasses.dataclass
    class Raw:
        raw: bytes

    assert json_of(Raw).encode(Raw(b"\x00\x01\xff")) == b'{"raw":"AAH/"}'
    with pytest.raises(InvalidMessage):
        json_of(Raw).decode(b'{"raw":"AAH_"}')


@pytest.mark.parametrize(
    "value",
    [
        Small(1, 2),  # type: ignore[arg-type]
        Small("s", "2"),  # type: ignore[arg-type]
        Small("s", 2**31),
        {"sensor": "s"},
        None,
    ],
)
def test_values_that_do_not_fit(value: object) -> None:
    with pytest.raises(InvalidArgument):
        json_of(Small).encode(value)  # type: ignore[arg-type]


def test_aliases_of_models() -> None:
    class Aliased(pydantic.BaseModel):
        sensor_name: str = pydantic.Field(alias="sensorName")

    schema = json_of(Aliased)
    assert list(fields(Aliased)) == ["sensorName"]
    assert schema.encode(Aliased(sensorName="s")) == b'{"sensorName":"s"}'
    assert schema.decode(b'{"sensorName":"s"}').sensor_name == "s"


UserId = NewType("UserId", str)


def test_other_types() -> None:
    @dataclasses.dataclass
    class Others:
        user: UserId
        level: Literal["low", "high"]
        either: int | str
        pair: tuple[int, ...]

    found = {name: each["type"] for name, each in fields(Others).items()}
    assert found == {
        "user": ["null", "string"],
        "level": ["null", "string"],
        "either": ["null", "long", "string"],
        "pair": ["null", {"type": "array", "items": "long"}],
    }


def test_types_that_avro_has_not() -> None:
    @dataclasses.dataclass
    class Odd:
        value: complex

    @dataclasses.dataclass
    class Unclear:
        value: Small | Node

    for kind in (Odd, Unclear, int, list, object):
        with pytest.raises(InvalidArgument):
            json_of(kind)


def test_two_types_of_one_name() -> None:
    other = dataclasses.make_dataclass("Small", [("x", int)])
    outer = dataclasses.make_dataclass("Outer", [("a", Small), ("b", other)])
    with pytest.raises(InvalidArgument, match="Small"):
        json_of(outer)
