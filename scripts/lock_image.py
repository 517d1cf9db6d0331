"""Write the lock files of the image (`make lock`): a version and the hashes of each library.

pip resolves what both pyproject.toml ask for, once for each processor, and installs nothing.  Each
library must be there as a wheel, so that no code of it runs while the image is built.
"""

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
LOCKS: Final = ROOT / "deploy" / "image"
PYTHON: Final = (3, 11)
"""The version of Debian 12, on which the image is built."""
PROCESSORS: Final = ("x86_64", "aarch64")
GLIBC: Final = range(36, 4, -1)
"""The releases 2.x for which a wheel may be made: Debian 12 has 2.36."""
HEAD: Final = """\
# {what} of the image: Python {python} on Linux, {processors}.
# Written by `make lock`; pip refuses what has another hash.
"""


def projects() -> tuple[dict[str, Any], dict[str, Any]]:
    """The files pyproject.toml of the library and of the broker."""
    paths = (ROOT / "pyproject.toml", ROOT / "magnetar_broker" / "pyproject.toml")
    library, broker = (tomllib.loads(path.read_text("utf-8")) for path in paths)
    return library, broker


def required() -> Mapping[str, Sequence[str]]:
    """The requirements of both projects that each lock file must satisfy, by its name."""
    library, broker = projects()
    served = [
        *library["project"]["dependencies"],
        *broker["tool"]["hatch"]["metadata"]["hooks"]["custom"]["dependencies"],
        *broker["project"]["optional-dependencies"]["cluster"],
    ]
    built = {*library["build-system"]["requires"], *broker["build-system"]["requires"]}
    return {"requirements.txt": served, "build-requirements.txt": sorted(built)}


def resolve(requirements: Sequence[str], processor: str) -> Iterator[tuple[str, str, str]]:
    """The name, version and SHA-256 of each wheel that satisfies them on a processor.

    Raises `subprocess.CalledProcessError` when there are none (pip has printed why).
    """
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    pip += ["--dry-run", "--ignore-installed", "--only-binary=:all:", "--report=-"]
    pip += [f"--platform=manylinux_2_{glibc}_{processor}" for glibc in GLIBC]
    with TemporaryDirectory() as nothing:
        command = [*pip, f"--target={nothing}", *requirements]
        report = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    for each in json.loads(report)["install"]:
        known = each["metadata"]
        name = re.sub(r"[-_.]+", "-", known["name"]).lower()
        yield name, known["version"], each["download_info"]["archive_info"]["hashes"]["sha256"]


def locked(requirements: Sequence[str]) -> str:
    """The lines of a lock file.  Raises RuntimeError if the processors need other versions."""
    found: dict[str, tuple[str, set[str]]] = {}
    for processor in PROCESSORS:
        for name, version, sha256 in resolve(requirements, processor):
            known, hashes = found.setdefault(name, (version, set()))
            if known != version:
                raise RuntimeError(
                    f"{name} is {known} on one processor and {version} on another: narrow its "
                    "range in pyproject.toml."
                )
            hashes.add(sha256)
    lines = []
    for name, (version, hashes) in sorted(found.items()):
        each = [f"    --hash=sha256:{sha256}" for sha256 in sorted(hashes)]
        lines.append(" \\\n".join([f"{name}=={version}", *each]))
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write both files."""
    if sys.version_info[:2] != PYTHON or sys.platform != "linux":
        # pip evaluates markers for the Python that runs it, whatever platform it is asked for.
        sys.exit(f"make lock needs Python {'.'.join(map(str, PYTHON))} on Linux, as the image has.")
    for name, what in (("requirements.txt", "Libraries"), ("build-requirements.txt", "Builder")):
        python, processors = ".".join(map(str, PYTHON)), " and ".join(PROCESSORS)
        head = HEAD.format(what=what, python=python, processors=processors)
        (LOCKS / name).write_text(head + locked(required()[name]), "utf-8")


if __name__ == "__main__":
    main()
