"""The Go client's first programs (`tests/interop/go`), built once into `build/parts`.

It is built without cgo: that needs no C compiler, and half the time.
"""

from pathlib import Path
from typing import Final

from tests.servers.java_parts import BUILD
from tests.support.tools import built_once, digest_of, run_build

MODULE: Final = Path(__file__).parent / "go"
BINARY: Final = BUILD / "go-client"


def build_go_client() -> Path:
    """The program, which is built if need be."""
    sources = [MODULE / name for name in ("go.mod", "go.sum", "main.go")]
    built_once(BUILD / "go-client.sha256", digest_of(sources, MODULE), _build)
    return BINARY


def _build() -> None:
    BUILD.mkdir(parents=True, exist_ok=True)
    flags = ["-trimpath", "-buildvcs=false", "-ldflags=-s -w", "-o", str(BINARY)]
    run_build(
        "the Go client's program", ["env", "CGO_ENABLED=0", "go", "build", *flags, "."], MODULE
    )
