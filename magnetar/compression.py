"""Compression of payloads in the forms of the wire: LZ4, ZLIB, ZSTD and Snappy.  Pure.

A payload is compressed at once: a batch, or a message alone.  LZ4 is a bare block, Snappy is raw,
ZLIB and ZSTD are one stream.  A library is loaded with the first payload that needs it.
"""

import zlib
from collections.abc import Callable, Mapping
from enum import IntEnum
from types import MappingProxyType
from typing import Final

from magnetar.bounds import MAX_UNCOMPRESSED_BYTES
from magnetar.errors import InvalidMessage

_Bytes = bytes | bytearray | memoryview


class CompressionType(IntEnum):
    """How a payload is compressed.  The numbers are those on the wire."""

    NONE = 0
    LZ4 = 1
    ZLIB = 2
    ZSTD = 3
    SNAPPY = 4


def _lz4(data: _Bytes) -> bytes:
    import lz4.block

    return bytes(lz4.block.compress(data, store_size=False))


def _un_lz4(data: _Bytes, size: int) -> bytes:
    import lz4.block

    return bytes(lz4.block.decompress(data, uncompressed_size=size))


def _zlib(data: _Bytes) -> bytes:
    import cramjam

    return bytes(cramjam.zlib.compress(data))


def _un_zlib(data: _Bytes, size: int) -> bytes:
    # The Java client leaves its stream without an end, which stricter decoders refuse.
    return zlib.decompressobj().decompress(data, size + 1)


def _zstd(data: _Bytes) -> bytes:
    import cramjam

    return bytes(cramjam.zstd.compress(data))


def _un_zstd(data: _Bytes, size: int) -> bytes:
    import cramjam

    return _into(cramjam.zstd.decompress_into, data, size)


def _snappy(data: _Bytes) -> bytes:
    import cramjam

    return bytes(cramjam.snappy.compress_raw(data))


def _un_snappy(data: _Bytes, size: int) -> bytes:
    import cramjam

    return _into(cramjam.snappy.decompress_raw_into, data, size)


def _into(unpack: Callable[[_Bytes, bytearray], int], data: _Bytes, size: int) -> bytes:
    unpacked = bytearray(size)
    written = unpack(data, unpacked)
    return bytes(unpacked if written == size else unpacked[:written])


_COMPRESS: Final[Mapping[CompressionType, Callable[[_Bytes], bytes]]] = MappingProxyType(
    {
        CompressionType.LZ4: _lz4,
        CompressionType.ZLIB: _zlib,
        CompressionType.ZSTD: _zstd,
        CompressionType.SNAPPY: _snappy,
    }
)
_DECOMPRESS: Final[Mapping[int, Callable[[_Bytes, int], bytes]]] = MappingProxyType(
    {
        CompressionType.LZ4: _un_lz4,
        CompressionType.ZLIB: _un_zlib,
        CompressionType.ZSTD: _un_zstd,
        CompressionType.SNAPPY: _un_snappy,
    }
)


def _failures() -> tuple[type[Exception], ...]:
    """The errors that unpacking raises for damaged bytes."""
    # A function, so that the libraries are loaded only when one of them has raised.
    import cramjam
    import lz4.block

    return (cramjam.DecompressionError, lz4.block.LZ4BlockError, ValueError, zlib.error)


def compress(kind: CompressionType, data: bytes) -> bytes:
    """Compress a payload."""
    pack = _COMPRESS.get(kind)
    return data if pack is None else pack(data)


def decompress(kind: int, data: bytes | memoryview, uncompressed_size: int) -> bytes | memoryview:
    """Decompress a payload; its metadata has `kind` and `uncompressed_size` (in bytes).

    A payload of kind NONE is returned as it is.  Raises `InvalidMessage` for an unknown kind, for a
    size above MAX_UNCOMPRESSED_BYTES, and if the result does not have exactly that size.
    """
    if kind == CompressionType.NONE:
        return data
    unpack = _DECOMPRESS.get(kind)
    if unpack is None:
        raise InvalidMessage(
            f"A message is compressed in a way that this client does not know ({kind}); "
            "update the client, or skip the message."
        )
    if not 0 <= uncompressed_size <= MAX_UNCOMPRESSED_BYTES:
        raise InvalidMessage(
            f"A message announces {uncompressed_size} bytes and at most {MAX_UNCOMPRESSED_BYTES} "
            "are unpacked; skip it, and check its producer."
        )
    if not uncompressed_size:
        return b""
    try:
        result = unpack(data, uncompressed_size)
    except _failures() as error:
        raise _damaged(kind, len(data), uncompressed_size, str(error)) from error
    if len(result) != uncompressed_size:
        raise _damaged(kind, len(data), uncompressed_size, f"it has {len(result)}")
    return result


def _damaged(kind: int, size: int, uncompressed_size: int, why: str) -> InvalidMessage:
    return InvalidMessage(
        f"{size} bytes compressed as {CompressionType(kind).name} are not the "
        f"{uncompressed_size} bytes that the message announces ({why}); skip the message."
    )
