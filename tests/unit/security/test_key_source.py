"""Sources of keys: every form of Pulsar's settings."""

import base64
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from config.bounds import KEY_SOURCE_BYTES
from security.errors import InvalidSecret
from security.key_source import KeySource, key_source

KEY = bytes(range(40))
TEXT = base64.b64encode(KEY).decode()
URL_SAFE = base64.urlsafe_b64encode(b"\xfb\xff" * 20).decode()
FILES = {Path("keys/a.key"), Path("/keys/a.key"), Path("a b"), Path("abcd"), Path("a#kid=b")}


def parse(text: str) -> KeySource:
    return key_source(text, "Key 1 of the setting", lambda path: path in FILES)


def missing(_: Path) -> bytes:
    raise AssertionError("this source names no file")


@pytest.mark.parametrize(
    "text",
    [
        *(f"data:;base64,{TEXT}", f"data:application/octet-stream;base64,{TEXT}"),
        *(f"DATA:;base64,{TEXT}", f"data:;charset=utf-8;base64,{TEXT}", TEXT, TEXT.rstrip("=")),
        *(f"{TEXT}\n", "\n".join(TEXT[at : at + 20] for at in range(0, len(TEXT), 20))),
    ],
)
def test_key_in_the_source_itself(text: str) -> None:
    source = parse(text)
    assert (source.path, source.key_id) == (None, None)
    assert source.read(missing) == KEY


def test_both_alphabets_of_base64_are_read() -> None:
    assert parse(URL_SAFE).inline == b"\xfb\xff" * 20
    assert parse(f"data:;base64,{URL_SAFE}").inline == b"\xfb\xff" * 20


def test_data_without_base64_is_text() -> None:
    assert parse("data:,a%20secret,+/").inline == b"a secret,+/"
    assert parse("data:text/plain,x").inline == b"x"


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("file:///keys/a.key", "/keys/a.key"),
        ("file:/keys/a.key", "/keys/a.key"),
        ("file://localhost/keys/a.key", "/keys/a.key"),
        ("FILE:///keys/a.key", "/keys/a.key"),
        ("file:keys/a.key", "keys/a.key"),
        ("file:./keys/a.key", "keys/a.key"),
        ("file:///a%20b", "/a b"),
        ("/keys/a.key", "/keys/a.key"),
        ("keys/a.key", "keys/a.key"),
        ("a b", "a b"),
        ("a#kid=b", "a#kid=b"),
        # This is base64 too: Pulsar takes the file.
        ("abcd", "abcd"),
    ],
)
def test_key_in_a_file(text: str, path: str) -> None:
    source = parse(text)
    assert source.path == Path(path)
    assert source.read(lambda each: str(each).encode()) == str(Path(path)).encode()
    assert path.removeprefix("./") in source.name


def test_key_id_of_a_url() -> None:
    assert parse("file:///keys/a.key#kid=2026-01").key_id == "2026-01"
    assert parse("file:///keys/a.key#kid=2026-01").path == Path("/keys/a.key")
    source = parse(f"data:;base64,{TEXT}#kid=b")
    assert (source.inline, source.key_id) == (KEY, "b")
    assert parse("file:///keys/a#kid=").path == Path("/keys/a#kid=")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "has no text"),
        ("A" * (2 * KEY_SOURCE_BYTES + 1), "too long"),
        ("data:", "is no data URL"),
        ("data:hush", "is no data URL"),
        ("data:;base64,hush!", "is damaged"),
        ("data:;base64,", "empty key"),
        ("data:,", "empty key"),
        ("data:;base64,====", "empty key"),
        ("file:", "names no file"),
        ("file://", "names no file"),
        ("file:///hush%00", "names no file"),
        ("file://elsewhere/hush", "another host"),
        ("/hush.key", "neither a file that exists nor base64"),
        ("hush.hush.hush", "neither a file that exists nor base64"),
        ("hush\x00", "neither a file that exists nor base64"),
        ("hushé", "neither a file that exists nor base64"),
        ("hushA", "neither a file that exists nor base64"),
        ("=", "empty key"),
    ],
)
def test_other_text_is_refused_without_it(text: str, expected: str) -> None:
    with pytest.raises(InvalidSecret, match=expected) as refused:
        parse(text)
    assert "Key 1 of the setting" in str(refused.value)
    assert "hush" not in str(refused.value)
    assert refused.value.__cause__ is None


@given(st.text(max_size=100), st.sampled_from(["", "data:", "data:;base64,", "file:", "file://"]))
def test_any_text_is_a_source_or_refused(text: str, before: str) -> None:
    try:
        source = parse(before + text)
    except InvalidSecret:
        return
    assert source.read(lambda path: str(path).encode("utf-8", "replace"))


def test_repr_has_nothing_of_the_key() -> None:
    assert TEXT[:8] not in repr(parse(TEXT))
    assert repr(KEY)[:12] not in repr(parse(TEXT))
