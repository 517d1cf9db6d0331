"""The mark of durable data: what was noted last is found, whatever of it is torn."""

from pathlib import Path

from storage.durable_mark import DurableMark


def values(path: Path) -> tuple[int, int]:
    mark = DurableMark(path)
    found = mark.values
    mark.close()
    return found


def test_the_last_note_is_found_without_a_close(tmp_path: Path) -> None:
    path = tmp_path / "mark"
    mark = DurableMark(path)
    assert mark.values == (0, 0)
    for number in range(5):
        mark.note(number, number * 100)
        assert values(path) == (number, number * 100)
    mark.close()


def test_a_torn_note_leaves_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "mark"
    mark = DurableMark(path)
    mark.note(1, 10)
    mark.note(2, 20)
    mark.close()
    whole = path.read_bytes()
    for at in range(36):
        for slot in (0, 512):
            torn = bytearray(whole)
            torn[slot + at] ^= 0xFF
            path.write_bytes(torn)
            assert values(path) == ((2, 20) if slot == 512 else (1, 10)), (slot, at)


def test_a_file_that_was_cut_or_is_of_something_else_says_nothing(tmp_path: Path) -> None:
    path = tmp_path / "mark"
    for content in (b"", b"x", b"\xff" * 4096):
        path.write_bytes(content)
        assert values(path) == (0, 0)


def test_a_mark_that_cannot_be_made_is_none(tmp_path: Path) -> None:
    assert DurableMark.open(tmp_path / "missing" / "mark") is None
