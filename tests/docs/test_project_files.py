"""The files that a stranger meets first: licence, guide for contributors, checks, the version."""

import re
import subprocess
import tomllib
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

ROOT: Final = Path(__file__).resolve().parents[2]
PROJECT: Final[Mapping[str, Any]] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
APACHE_2_0: Final = "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"
"""SHA-256 of https://www.apache.org/licenses/LICENSE-2.0.txt."""
FRONT: Final = ("LICENSE", "NOTICE", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
CONTRIBUTING: Final = ROOT / "CONTRIBUTING.md"
WORKFLOW: Final = ROOT / ".github/workflows/check.yml"
HOOKS: Final = ROOT / ".pre-commit-config.yaml"
NAMES_A_RELEASE: Final = ("CHANGELOG.md", "pyproject.toml", "deploy/")
"""Where the version may be written.  `test_deploy.py` compares manifests with pyproject.toml."""
LOCKED: Final = ("go.mod", "go.sum", "pom.xml")
"""These name the versions of other projects."""


def tracked() -> list[str]:
    """The files of the project; new ones, not committed yet, included."""
    found = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    return [name for name in found if (ROOT / name).is_file() and not (ROOT / name).is_symlink()]


def top_level_names(names: list[str]) -> set[str]:
    """The folders and files in the project's root."""
    return {name.partition("/")[0] for name in names}


def load(path: Path) -> dict[str, Any]:
    """The only document of a YAML file."""
    document = yaml.safe_load(path.read_text("utf-8"))
    assert isinstance(document, dict)
    return document


def test_license_is_the_apache_license_and_is_declared() -> None:
    assert sha256((ROOT / "LICENSE").read_bytes()).hexdigest() == APACHE_2_0
    project = PROJECT["project"]
    assert project["license"] == "Apache-2.0"
    assert project["license-files"] == ["LICENSE", "NOTICE"]
    assert not [each for each in project["classifiers"] if each.startswith("License")]


def test_no_file_has_the_marks_of_an_unfinished_merge() -> None:
    marks = (b"\n" + b"<" * 7 + b" ", b"\n" + b">" * 7 + b" ")
    marked = [
        name for name in tracked() if any(mark in (ROOT / name).read_bytes() for mark in marks)
    ]
    assert not marked


def test_notice_names_every_protocol_definition() -> None:
    notice = (ROOT / "NOTICE").read_text("utf-8")
    named = set(re.findall(r"\S+\.proto\b", notice))
    assert named == {name for name in tracked() if name.endswith(".proto")}


def test_image_carries_the_license_and_its_context_lets_it_in() -> None:
    copied = re.findall(r"^COPY (.+) \./$", (ROOT / "Dockerfile").read_text("utf-8"), re.MULTILINE)
    assert copied == ["pyproject.toml README.md LICENSE NOTICE"]
    sent = (ROOT / ".dockerignore").read_text("utf-8").splitlines()
    assert {f"!{name}" for name in copied[0].split()} <= set(sent)


def test_readme_links_to_the_other_files() -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    assert set(FRONT) - {"README.md"} <= set(re.findall(r"\]\(([\w.]+)\)", readme))


def test_changelog_begins_with_what_is_unreleased() -> None:
    headings = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    assert headings[0] == "Unreleased"
    for heading in headings[1:]:
        assert re.fullmatch(r"\d+\.\d+\.\d+ - \d{4}-\d{2}-\d{2}", heading), heading


def test_contributing_names_paths_and_modules_that_exist() -> None:
    names = tracked()
    roots = "|".join(re.escape(name) for name in sorted(top_level_names(names)))
    text = CONTRIBUTING.read_text("utf-8")
    paths = set(re.findall(rf"(?<![\w./-])((?:{roots})(?:/[\w./-]*\w)?/?)(?![\w])", text))
    paths = {path for path in paths if "/" in path or "." in path}
    assert len(paths) > 30, "hardly a path was found: has the form of the page changed?"
    missing = {path for path in paths if not (ROOT / path).exists()}
    assert not missing, f"CONTRIBUTING.md names {sorted(missing)}"


def test_contributing_names_make_targets_that_exist() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    named = set(re.findall(r"\bmake ([a-z]+(?:-[a-z]+)*)\b", CONTRIBUTING.read_text("utf-8")))
    assert {"run", "test", "check"} <= named
    assert named <= targets


@pytest.mark.parametrize("walk", ["a REST resource", "a metric"])
def test_code_of_a_walk_goes_into_files_that_exist(walk: str) -> None:
    (section,) = re.findall(
        rf"^### Walk: {walk}\n(.+?)(?=^##|\Z)",
        CONTRIBUTING.read_text("utf-8"),
        re.MULTILINE | re.DOTALL,
    )
    blocks = re.findall(r"^```(\w*)$", section, re.MULTILINE)
    assert blocks.count("python") >= 2, "a test and what makes it pass"
    assert "tests/unit/" in section
    assert "broker/" in section


def test_version_is_written_once() -> None:
    """Programs ask what is installed (`importlib.metadata`): that has it from pyproject.toml."""
    version = PROJECT["project"]["version"]
    literal = re.compile(rf"(?<![\w.]){re.escape(version)}(?![\w.]*\d)")
    elsewhere = [
        name
        for name in tracked()
        if not name.startswith(NAMES_A_RELEASE)
        and not name.endswith(LOCKED)
        and literal.search((ROOT / name).read_bytes().decode("utf-8", "replace"))
    ]
    assert not elsewhere, f"{elsewhere} repeat the version {version} of pyproject.toml"


def test_hooks_run_what_the_check_runs() -> None:
    """Installed tools only: a hook that is fetched may be another version than `make check` has."""
    (repository,) = load(HOOKS)["repos"]
    assert repository["repo"] == "local"
    hooks = repository["hooks"]
    assert {hook["language"] for hook in hooks} == {"system"}
    entries = [hook["entry"] for hook in hooks]
    assert entries == [".venv/bin/ruff format --force-exclude", ".venv/bin/python -m tests check"]
    assert ".venv" in (ROOT / ".gitignore").read_text("utf-8").splitlines()


def test_workflow_runs_the_targets_on_every_python_that_is_named() -> None:
    jobs = load(WORKFLOW)["jobs"]
    versions = jobs["test"]["strategy"]["matrix"]["python"]
    oldest = PROJECT["project"]["requires-python"].removeprefix(">=")
    assert versions[0] == oldest
    classified = {
        found[1]
        for each in PROJECT["project"]["classifiers"]
        if (found := re.fullmatch(r"Programming Language :: Python :: (3\.\d+)", each))
    }
    assert oldest in classified
    assert classified <= set(versions), "a classifier names a Python that nothing tests"
    runs = {
        name: [step["run"] for step in job["steps"] if "run" in step] for name, job in jobs.items()
    }
    assert runs == {"test": ["make test"], "audit": ["make audit"], "whole": [".ci/run"]}
    for job in jobs.values():
        for step in job["steps"]:
            assert re.fullmatch(r"actions/[\w-]+@v\d+", step.get("uses", "actions/any@v1"))
