"""Writes `*_pb2.py` and `*_pb2.pyi` beside each `.proto` of the project (`make proto`).

The compiler's stubs are mended where strict type checkers refuse them: names that are Python
keywords (`Schema.Type.None`) are left out, use `Schema.Type.Value("None")`; enum members that would
hide a message of the same name inside a class (`Schema.KeyValue`) are left out there, use
`Schema.Type.KeyValue`; and bare `Mapping` gets its parameters.
"""

import keyword
import re
import sys
from importlib import resources
from pathlib import Path

from grpc_tools import protoc  # type: ignore[import-untyped]

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("magnetar", "storage")
_NAME = re.compile(r"^( *)(\w+): (.*)")
_CLASS = re.compile(r"^class (\w+)\(_message\.Message\)", re.MULTILINE)
_BARE_MAPPING = re.compile(r"(?<!as )\b_Mapping\b(?!\[)")


def proto_files() -> list[str]:
    """Paths of every `.proto`, relative to the project."""
    return sorted(
        path.relative_to(ROOT).as_posix()
        for room in ROOMS
        for path in (ROOT / room).rglob("*.proto")
    )


def generate(proto: str, out_dir: Path) -> list[Path]:
    """Generate the modules of one `.proto` under `out_dir`; returns the files written.

    Raises `RuntimeError` when the compiler refuses the file (it has printed why).
    """
    includes = [f"-I{ROOT}", f"-I{resources.files('grpc_tools') / '_proto'}"]
    status = protoc.main(
        ["protoc", *includes, f"--python_out={out_dir}", f"--pyi_out={out_dir}", proto]
    )
    if status != 0:
        raise RuntimeError(
            f"protoc failed on {proto} with status {status}: mend the file it names."
        )
    module, stub = (out_dir / proto.replace(".proto", suffix) for suffix in ("_pb2.py", "_pb2.pyi"))
    stub.write_text(mend_stub(stub.read_text("utf-8")), "utf-8")
    return [module, stub]


def mend_stub(text: str) -> str:
    """The stub as strict type checkers accept it."""
    messages = set(_CLASS.findall(text))
    lines = [
        _BARE_MAPPING.sub("_Mapping[str, object]", line)
        for line in text.splitlines(keepends=True)
        if not _is_unusable(line, messages)
    ]
    return "".join(lines)


def _is_unusable(line: str, messages: set[str]) -> bool:
    match = _NAME.match(line)
    if match is None:
        return False
    indent, name, annotation = match.groups()
    hides_a_message = len(indent) == 4 and name in messages and "_ClassVar" not in annotation
    return keyword.iskeyword(name) or hides_a_message


def main() -> int:
    """Generate everything in place."""
    for proto in proto_files():
        for path in generate(proto, ROOT):
            print(path.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
