"""Sources of keys, as Pulsar's settings and tools take them.  Pure.

Files are found and read by functions of the caller.  A source is one of

- `data:[TYPE];base64,BASE64`, or `data:,TEXT`: the key itself,
- `file:///PATH`, or `file:PATH`: a file with the key,
- a path of a file that exists,
- base64 of the key.

The first two may end in `#kid=ID`: tokens whose header has this key id are tried with it first.
A file has the bytes of a secret as they are, or a key in DER or PEM.
"""

import base64
import binascii
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import unquote

from config.bounds import KEY_SOURCE_BYTES
from security.errors import InvalidSecret

_DATA: Final = re.compile(
    r"data:(?P<type>[^,]*?)(?P<base64>;base64)?,(?P<data>.*)", re.DOTALL | re.IGNORECASE
)
_KEY_ID: Final = re.compile(r"(?P<source>.*)#kid=(?P<id>[^#]+)", re.DOTALL)
_FORMS: Final = "data:;base64,BASE64, file:///PATH, a path of a file, or base64"


@dataclass(frozen=True, slots=True)
class KeySource:
    """Where a key is: in a file, or here.

    `name` says which one it is, for the operator, and has nothing of the key.
    """

    name: str
    path: Path | None = None
    inline: bytes | None = field(default=None, repr=False)
    key_id: str | None = None

    def read(self, read_file: Callable[[Path], bytes]) -> bytes:
        """The bytes of the key.  Raises what `read_file` does."""
        if self.path is not None:
            return read_file(self.path)
        return self.inline or b""


def key_source(text: str, name: str, is_file: Callable[[Path], bool]) -> KeySource:
    """Parse a source; `name` is what an error calls it, such as the setting.

    Raises `InvalidSecret`, without anything of the text, which may be the key itself.
    """
    if not text or len(text) > 2 * KEY_SOURCE_BYTES:
        raise InvalidSecret(
            f"{name} has {'no text' if not text else 'too long a text'}: write {_FORMS}."
        )
    scheme = text[:5].lower()
    if scheme not in ("data:", "file:"):
        return _bare_source(text, name, is_file)
    found = _KEY_ID.fullmatch(text)
    source, key_id = (found["source"], found["id"]) if found else (text, None)
    if scheme == "file:":
        path = _file_path(source, name)
        return KeySource(f"{name} ({path})", path=path, key_id=key_id)
    return KeySource(name, inline=_data(source, name), key_id=key_id)


def _bare_source(text: str, name: str, is_file: Callable[[Path], bool]) -> KeySource:
    # Pulsar too looks for a file first, as paths are base64 by their characters.
    if is_file(Path(text)):
        return KeySource(f"{name} ({text})", path=Path(text))
    try:
        return KeySource(name, inline=_filled(_base64(text), name))
    except ValueError:
        # Not chained, as the error may have the text.
        raise InvalidSecret(
            f"{name} is neither a file that exists nor base64: write {_FORMS}."
        ) from None


def _file_path(source: str, name: str) -> Path:
    rest = source[len("file:") :]
    if rest.startswith("//"):
        host, slash, rest = rest[2:].partition("/")
        rest = slash + rest
        if host not in ("", "localhost"):
            raise InvalidSecret(f"{name} names a file of another host: write file:///PATH.")
    path = unquote(rest)
    if not path or "\x00" in path:
        raise InvalidSecret(f"{name} names no file: write file:///PATH.")
    return Path(path)


def _data(source: str, name: str) -> bytes:
    found = _DATA.fullmatch(source)
    if found is None:
        raise InvalidSecret(f"{name} is no data URL: write data:;base64,BASE64.")
    if not found["base64"]:
        return _filled(unquote(found["data"]).encode("utf-8", "surrogateescape"), name)
    try:
        return _filled(_base64(found["data"]), name)
    except ValueError:
        raise InvalidSecret(f"The base64 of {name} is damaged: copy it again.") from None


def _filled(data: bytes, name: str) -> bytes:
    if not data:
        raise InvalidSecret(f"{name} has an empty key: write {_FORMS}.")
    return data


def _base64(text: str) -> bytes:
    """Decode base64 of either alphabet, with or without padding.  Raises ValueError."""
    packed = "".join(text.split()).replace("-", "+").replace("_", "/").rstrip("=")
    try:
        return base64.b64decode(packed + "=" * (-len(packed) % 4), validate=True)
    except binascii.Error as error:
        raise ValueError("this is no base64") from error
