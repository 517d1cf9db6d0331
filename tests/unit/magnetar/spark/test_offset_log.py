"""Spark's log of offsets and where it lies."""

import asyncio
import json
import threading
from pathlib import Path

import pytest

from magnetar.spark import checkpoint_files
from magnetar.spark.checkpoint_files import CheckpointFiles
from magnetar.spark.errors import PositionsUnreadable
from magnetar.spark.offset_log import positions_of, query_of

METADATA = '{"batchWatermarkMs":0,"batchTimestampMs":1700000000000,"conf":{}}'


def offset(topic: str, name: str = "", at: int = 0) -> str:
    return json.dumps({"v": 1, "topic": topic, "name": name, "pos": {"0": [1, at, -1]}})


def test_positions_list_the_offsets_of_our_sources_in_order() -> None:
    rate, kafka = "17", '{"topic":{"0":23}}'
    one = positions_of("\n".join(["v1", METADATA, rate, offset("b"), kafka, "-", offset("a")]))
    other = positions_of("\n".join(["v1", METADATA, offset("a"), "-", offset("b"), "not json"]))
    assert one == other
    assert [cut["topic"] for cut in json.loads(one)] == ["a", "b"]
    assert json.loads(one)[0]["pos"] == {"0": [1, 0, -1]}
    assert " " not in one


def test_positions_leave_out_the_start_of_the_query() -> None:
    cut = {"from": {"0": [1, 0, 0]}, **json.loads(offset("a", at=3))}
    without = positions_of(f"v1\n{METADATA}\n{offset('a', at=3)}")
    assert positions_of(f"v1\n{METADATA}\n{json.dumps(cut)}") == without


def test_second_version_of_the_log_names_sources() -> None:
    text = "\n".join(["v2", METADATA, f"0:{offset('a', at=3)}", "1:-", "second:17"])
    assert json.loads(positions_of(text))[0]["pos"] == {"0": [1, 3, -1]}


def test_unicode_separators_in_names_do_not_end_lines() -> None:
    cut = json.dumps({"v": 1, "topic": "a\u2028b", "name": "\x85", "pos": {}}, ensure_ascii=False)
    assert json.loads(positions_of(f"v1\n{METADATA}\n{cut}\n"))[0]["topic"] == "a\u2028b"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "begins with ''"),
        ("v1", "begins with 'v1'"),
        (f"v3\n{METADATA}\n{offset('a')}", "another version"),
        (f"v1\n{METADATA}\n-\n17", "no source of the format"),
        (f"v1\n{METADATA}\n{offset('a')}\n{offset('a')}", "own option `name`"),
    ],
)
def test_log_without_positions_is_refused(text: str, words: str) -> None:
    with pytest.raises(PositionsUnreadable, match=words):
        positions_of(text)


def test_checkpoint_metadata_names_the_query() -> None:
    assert query_of('{"id":"5-6"}') == "5-6"
    for text in ("", "[]", "{}", "7"):
        with pytest.raises(PositionsUnreadable, match="names no query"):
            query_of(text)


@pytest.mark.parametrize("shape", ["{0}", "file:{0}", "file://{0}", "{0}/"])
async def test_local_checkpoint_is_read(tmp_path: Path, shape: str) -> None:
    root = tmp_path / "a checkpoint"
    (root / "offsets").mkdir(parents=True)
    (root / "offsets" / "12").write_text(f"v1\n{METADATA}\n{offset('a', at=9)}", "utf-8")
    (root / "metadata").write_text('{"id":"q-1"}', "utf-8")
    files = CheckpointFiles(shape.format(str(root).replace(" ", "%20") if ":" in shape else root))
    assert json.loads(await files.positions(12))[0]["pos"] == {"0": [1, 9, -1]}
    assert await files.query() == "q-1"
    with pytest.raises(PositionsUnreadable, match="offsets/13 of the checkpoint"):
        await files.positions(13)


@pytest.mark.parametrize("location", ["nowhere://a/b", "hdfs:///", "s3://"])
async def test_unreachable_checkpoint_is_refused(location: str) -> None:
    with pytest.raises(PositionsUnreadable, match=r"cannot be read \("):
        await CheckpointFiles(location).positions(0)


class Hanging:
    """A file system that has never heard of a timeout."""

    def __init__(self) -> None:
        self.goes_on = threading.Event()
        self.blocks_the_end = False

    def open_input_stream(self, path: str) -> object:
        self.blocks_the_end = not threading.current_thread().daemon
        assert self.goes_on.wait(60)
        raise OSError("nobody waits any more")


@pytest.mark.parametrize("call", ["positions", "query"])
async def test_hanging_checkpoint_is_refused(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    hanging = Hanging()
    monkeypatch.setattr(checkpoint_files, "file_system", lambda location: (hanging, "c"))
    files = CheckpointFiles("s3://bucket/c", 0.05)
    asked = files.positions(1) if call == "positions" else files.query()
    try:
        with pytest.raises(PositionsUnreadable, match=r"did not come within 0\.05 s"):
            async with asyncio.timeout(10):
                await asked
    finally:
        hanging.goes_on.set()
    assert not hanging.blocks_the_end
