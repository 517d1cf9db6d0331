"""`import magnetar` loads none of the libraries that only some schemas or payloads need.

A process of its own tells what it has loaded, at first and after each step, so that what other
tests imported is not counted.
"""

import json
import subprocess
import sys
from typing import Final

import pytest

TIMEOUT_S: Final = 60
STEPS: Final = {
    "import magnetar, magnetar.protocol.ids": "magnetar.protocol.ids",
    "magnetar.connect, magnetar.schema": "magnetar.client",
    "for kind in (bytes, str, bool, int, float): magnetar.schema.schema_for(kind)": None,
    "from magnetar.compression import CompressionType, compress, decompress": None,
    "packed = compress(CompressionType.LZ4, b'x')": "lz4",
    "decompress(4, compress(CompressionType.SNAPPY, b'x'), 1)": "cramjam",
    "from magnetar.wire import connection": None,
    "connection.client_version()": "importlib.metadata",
    "magnetar.json_of": "pydantic",
    "magnetar.avro_of": "fastavro",
    "magnetar.protobuf_of": "google.protobuf.descriptor_pb2",
}
"""What is done one after the other, and what that loads; None: nothing.

Codecs come before Avro, as fastavro loads them too.
"""
LATER: Final = [module for module in [*STEPS.values()][2:] if module is not None]
NEVER: Final = (
    "aiohttp",
    "avro",
    "grpc",
    "pandas",
    "magnetar.spark",
    "pyarrow",
    "pyspark",
    "structlog",
    "typer",
    "uvloop",
)
"""What other parts of the project use."""
SCRIPT: Final = """
import json, sys
for step in json.loads(sys.argv[1]):
    exec(step)
    print(json.dumps([*sys.modules]))
"""


def output_of(code: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def loaded() -> dict[str, set[str]]:
    """The modules that there are after each step."""
    lines = output_of(SCRIPT, json.dumps([*STEPS])).splitlines()
    return {step: set(json.loads(line)) for step, line in zip(STEPS, lines, strict=True)}


@pytest.mark.parametrize("module", [*LATER, *NEVER])
def test_the_client_is_imported_without(loaded: dict[str, set[str]], module: str) -> None:
    at_first = [*loaded.values()][1]
    assert "magnetar.client" in at_first
    assert module not in at_first


def test_the_wire_comes_without_the_client(loaded: dict[str, set[str]]) -> None:
    """The broker has it of the client."""
    of_wire = {name for name in next(iter(loaded.values())) if name.startswith("magnetar.")}
    assert of_wire <= {"magnetar.protocol", "magnetar.protocol.ids"}


def test_each_is_loaded_when_it_is_used(loaded: dict[str, set[str]]) -> None:
    before: set[str] = set()
    for step, module in STEPS.items():
        new = loaded[step] - before
        assert module in new if module else not new, step
        before = loaded[step]


def test_every_public_name_is_there() -> None:
    """Also those that are loaded later; others are told as Python tells them."""
    output_of(
        "import magnetar, magnetar.schema\n"
        "for package in (magnetar, magnetar.schema):\n"
        "    for name in package.__all__:\n"
        "        getattr(package, name)\n"
        "    assert not hasattr(package, 'no_such_name')\n"
        "from magnetar import *\n"
        "from magnetar.schema import *"
    )
