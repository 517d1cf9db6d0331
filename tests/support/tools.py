"""Tools of the machine that some tests need, and what is built with them once and kept.

Rules: where a tool is missing, tests that need it fail when CI runs them (`CI=true`) and are
skipped elsewhere, loudly; what is built is built again only when a source file of it changed, and
what a build leaves half done is not taken for a built one.
"""

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

import pytest

BUILD_TIMEOUT_S: Final = 900
VERSION_TIMEOUT_S: Final = 60
NEEDED_JAVA: Final = 17
NEEDED_GO: Final = (1, 24)


def missing_java() -> str | None:
    """What keeps Java programs from being built and run here, or None."""
    for tool, name in (("mvn", "Maven (mvn)"), ("java", "Java"), ("javac", "A JDK (javac)")):
        if shutil.which(tool) is None:
            return f"{name} is not installed"
    version = _output("java", "-version")
    match = re.search(r'version "(\d+)', version)
    if match is None or int(match.group(1)) < NEEDED_JAVA:
        found = version.partition("\n")[0] or "an unknown one"
        return f"Java {NEEDED_JAVA} or newer is needed, not {found}"
    return None


def missing_go() -> str | None:
    """What keeps Go programs from being built here, or None."""
    if shutil.which("go") is None:
        return "Go is not installed"
    version = _output("go", "env", "GOVERSION")
    match = re.search(r"go(\d+)\.(\d+)", version)
    if match is None or (int(match.group(1)), int(match.group(2))) < NEEDED_GO:
        needed = ".".join(map(str, NEEDED_GO))
        return f"Go {needed} or newer is needed, not {version.strip() or 'an unknown one'}"
    return None


def require(missing: str | None, tests: str, install: str) -> None:
    """Go on if nothing is missing; else fail under CI, and skip elsewhere.

    `tests` names the suite, `install` what to install.
    """
    if missing is None:
        return
    if os.environ.get("CI") == "true":
        pytest.fail(f"the {tests} tests must run under CI, but {missing}. Install {install}.")
    line = f"{tests.upper()} TESTS DO NOT RUN: {missing}. Install {install} to run them."
    warnings.warn(line, stacklevel=2)
    pytest.skip(line)


def digest_of(sources: Iterable[Path], root: Path) -> str:
    """A hash of names and contents; names are relative to `root`."""
    digest = hashlib.sha256()
    for source in sources:
        digest.update(str(source.relative_to(root)).encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()


def built_once(stamp: Path, digest: str, build: Callable[[], None]) -> None:
    """Build, unless `stamp` says that the last build was of this digest.

    Runs of the tests that want it at the same time wait for the one that builds.
    """
    stamp.parent.mkdir(parents=True, exist_ok=True)
    with stamp.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if stamp.exists() and stamp.read_text("utf-8") == digest:
            return
        stamp.unlink(missing_ok=True)
        build()
        stamp.parent.mkdir(parents=True, exist_ok=True)
        stamp.write_text(digest, "utf-8")


def completed(
    command: list[str], directory: Path | None = None, *, timeout_s: float
) -> subprocess.CompletedProcess[str]:
    """A command that has ended, without input, and what it printed."""
    return subprocess.run(
        command,
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
        stdin=subprocess.DEVNULL,
    )


def run_build(what: str, command: list[str], directory: Path | None = None) -> None:
    """Run a build command; a `RuntimeError` shows its output if it fails."""
    result = completed(command, directory, timeout_s=BUILD_TIMEOUT_S)
    if result.returncode != 0:
        raise RuntimeError(f"{what} cannot be built:\n{result.stdout}{result.stderr}")


def copy_jars(pom: Path, directory: Path) -> None:
    """Have Maven put the runtime closure of `pom` into `directory`, and nothing else."""
    shutil.rmtree(directory, ignore_errors=True)
    run_build(
        f"the class path of {pom.name}",
        [
            *("mvn", "-q", "-B", "-f", str(pom), "dependency:copy-dependencies"),
            *(f"-DoutputDirectory={directory}", "-DincludeScope=runtime"),
        ],
    )


def _output(*command: str) -> str:
    done = completed(list(command), timeout_s=VERSION_TIMEOUT_S)
    return done.stdout + done.stderr
