"""The code that is compared, in directories of its own: that of a commit, and the work tree's.

Rules: both are copies below `build/bench/revs`, made anew for every run, so that both stand alike
and neither changes while it is measured.  What cannot be had raises `CheckoutFailed`, one sentence.
"""

import os
import shutil
import subprocess
import textwrap
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.support.broker_process import ROOT
from tests.support.tools import completed, digest_of

REVISIONS: Final = ROOT / "build" / "bench" / "revs"
WORK_TREE: Final = "work-tree"
GIT_TIMEOUT_S: Final = 120
SHORT: Final = 8
"""Characters of a commit's hash that people are shown."""
NAMED: Final = 3
NOT_RUN: Final = {"bench", "examples", "scripts", "tests"}


class CheckoutFailed(RuntimeError):
    """The code that was asked for cannot be had; the message says why."""


@dataclass(frozen=True)
class Checkout:
    """A directory with code, and the name that people are shown."""

    name: str
    directory: Path
    commit: str
    title: str
    changed: tuple[str, ...] = ()
    """Files of the work tree that are in no commit."""

    @property
    def described(self) -> str:
        """One line that describes the code."""
        text = f"{self.name}: {self.title}"
        if self.name not in self.commit:
            text = f"{self.name}: {self.commit[:SHORT]} {self.title}"
        if not self.changed:
            return text
        more = len(self.changed) - NAMED
        some = ", ".join(self.changed[:NAMED]) + (f" and {more} more" if more > 0 else "")
        return f"{text}, with uncommitted changes: {some}"


def commit_of(revision: str, root: Path = ROOT) -> str:
    """Return the whole hash of the commit that a revision names."""
    try:
        return _git(
            root, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}"
        ).strip()
    except CheckoutFailed:
        raise CheckoutFailed(f"{revision!r} names no commit of this repository.") from None


def put_commit(revision: str, place: Path = REVISIONS, root: Path = ROOT) -> Checkout:
    """Put the files of a commit in place."""
    commit = commit_of(revision, root)
    name = commit[:SHORT]
    directory = _emptied(place / name)
    archive = place / f"{name}.tar"
    try:
        _git(root, "archive", "--format=tar", f"--output={archive}", commit)
        _run(["tar", "-x", "-f", str(archive), "-C", str(directory)], root)
    finally:
        archive.unlink(missing_ok=True)
    return Checkout(name, directory, commit, _title(root, commit))


def put_work_tree(place: Path = REVISIONS, root: Path = ROOT) -> Checkout:
    """Put the files of the work tree in place, committed or not, without those git ignores."""
    commit = commit_of("HEAD", root)
    directory = _emptied(place / WORK_TREE)
    listed = _git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    for name in sorted(set(listed.split("\0")) - {""}):
        if not os.path.lexists(root / name):
            continue  # deleted, and not yet so in a commit
        target = directory / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(root / name, target, follow_symlinks=False)
    status = _git(root, "status", "--porcelain", "--untracked-files=all")
    changed = tuple(line[3:] for line in status.splitlines())
    return Checkout("this", directory, commit, _title(root, commit), changed)


def project_of(checkout: Path) -> dict[str, Any]:
    """Read the table `project` of a checkout's pyproject.toml."""
    try:
        document = tomllib.loads((checkout / "pyproject.toml").read_text("utf-8"))
        project: dict[str, Any] = document["project"]
    except (OSError, KeyError, tomllib.TOMLDecodeError) as error:
        raise CheckoutFailed(f"{checkout.name} has no pyproject.toml to read: {error}") from error
    return project


def projects_of(checkout: Path) -> list[dict[str, Any]]:
    """Read the distributions that a checkout makes: the library, and the broker if it is another.

    The broker's version is the library's, and its build adds the list of what it needs.
    """
    library = project_of(checkout)
    file = checkout / "magnetar_broker" / "pyproject.toml"
    if not file.exists():
        # Without commands: that of this tree, beside what both need, must not be found.
        return [library, {"name": "magnetar-broker"}]
    document = tomllib.loads(file.read_text("utf-8"))
    added = document["tool"]["hatch"]["metadata"]["hooks"]["custom"]
    return [library, document["project"] | added | {"version": library.get("version", "0")}]


def packages(checkout: Path) -> set[str]:
    """Find the top-level packages that a broker may run."""
    return {each.parent.name for each in checkout.glob("*/__init__.py")} - NOT_RUN


def code_digest(checkout: Path, names: Iterable[str]) -> str:
    """Hash the modules of these packages."""
    sources = [path for name in names for path in (checkout / name).rglob("*.py")]
    return digest_of(sorted(sources), checkout)


def _emptied(directory: Path) -> Path:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    return directory


def _title(root: Path, commit: str) -> str:
    return textwrap.shorten(_git(root, "log", "-1", "--format=%s", commit), 80, placeholder=" ...")


def _git(root: Path, *arguments: str) -> str:
    return _run(["git", *arguments], root)


def _run(command: list[str], directory: Path) -> str:
    try:
        done = completed(command, directory, timeout_s=GIT_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CheckoutFailed(f"{command[0]} could not be run: {error}") from error
    if done.returncode != 0:
        raise CheckoutFailed(f"{' '.join(command)} failed: {done.stderr.strip()}")
    return done.stdout
