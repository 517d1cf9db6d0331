"""What the image is made of: the lock files, the list of contents, the audit."""

import importlib.util
import json
import re
from collections.abc import Callable, Mapping
from importlib.metadata import distributions
from pathlib import Path
from types import ModuleType
from typing import Final

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scripts.audit import LOCKS, NOT_REACHED, verdict
from scripts.lock_image import PROCESSORS, PYTHON, required

ROOT: Final = Path(__file__).resolve().parents[2]
IMAGE: Final = ROOT / "deploy" / "image"
NAMES: Final = ("requirements.txt", "build-requirements.txt")
ENTRY: Final = re.compile(
    r"^([a-z0-9-]+)==([\w.+!]+)((?: \\\n    --hash=sha256:[0-9a-f]{64})+)\n", re.MULTILINE
)
IN_THE_IMAGE: Final = {
    "implementation_name": "cpython",
    "platform_python_implementation": "CPython",
    "platform_system": "Linux",
    "python_version": ".".join(map(str, PYTHON)),
    "sys_platform": "linux",
    "os_name": "posix",
}


def locked(name: str) -> dict[str, tuple[str, int]]:
    """The version of each library, and how many hashes it has; nothing else may be in the file."""
    text = (IMAGE / name).read_text("utf-8")
    found = {entry[1]: (entry[2], entry[3].count("--hash")) for entry in ENTRY.finditer(text)}
    rest = [line for line in ENTRY.sub("", text).splitlines() if not line.startswith("#")]
    assert not rest, f"{name} has lines that are no library with its hashes"
    return found


def unsatisfied(requirement: str, versions: Mapping[str, tuple[str, int]], extra: str = "") -> bool:
    wanted = Requirement(requirement)
    marker = wanted.marker
    for processor in PROCESSORS:
        here = {**IN_THE_IMAGE, "platform_machine": processor, "extra": extra}
        if marker is None or marker.evaluate(here):
            known = versions.get(canonicalize_name(wanted.name))
            if known is None or not wanted.specifier.contains(known[0], prereleases=True):
                return True
    return False


@pytest.mark.parametrize("name", NAMES)
def test_lock_satisfies_what_the_projects_require(name: str) -> None:
    versions = locked(name)
    assert versions
    wrong = [each for each in required()[name] if unsatisfied(each, versions)]
    assert not wrong, f"run `make lock`: {name} does not satisfy {wrong}"


@pytest.mark.parametrize("name", NAMES)
def test_lock_satisfies_what_its_libraries_require(name: str) -> None:
    """Those that are installed here in the version of the lock say what they require."""
    versions = locked(name)
    wrong = [
        (known, each)
        for found in distributions()
        if versions.get(known := canonicalize_name(found.metadata["Name"]), ("",))[0]
        == found.version
        for each in found.requires or ()
        if unsatisfied(each, versions)
    ]
    assert not wrong, "run `make lock`"


@pytest.mark.parametrize("name", NAMES)
def test_lock_names_no_host_and_libraries_in_c_for_each_processor(name: str) -> None:
    text = (IMAGE / name).read_text("utf-8")
    assert "://" not in text
    assert "index" not in text
    for processor in PROCESSORS:
        assert processor in text.splitlines()[0]
    if name == "requirements.txt":
        in_c = ("aiohttp", "cryptography", "grpcio", "obstore", "pydantic-core", "uvloop")
        counts = locked(name)
        assert {counts[each][1] for each in in_c} == {len(PROCESSORS)}


def test_image_installs_nothing_that_is_not_locked() -> None:
    text = (ROOT / "Dockerfile").read_text("utf-8").replace("\\\n", " ")
    fetches = re.findall(r"bin/pip [^&\n]*(?:install|download|wheel) [^&\n]*", text)
    assert len(fetches) == 4
    for each in fetches:
        assert "--require-hashes" in each or "--no-index" in each, each
    named = set(re.findall(r"-r (\S+)", text))
    assert named == {f"deploy/image/{name}" for name in NAMES} == set(LOCKS)


# The list of contents


@pytest.fixture(scope="module")
def make_sbom() -> ModuleType:
    """A program of the image's build, which is no module of the project."""
    spec = importlib.util.spec_from_file_location("make_sbom", IMAGE / "make_sbom.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def install(tmp_path: Path) -> Callable[..., None]:
    def install(name: str, *lines: str) -> None:
        info = tmp_path / "site" / f"{name.replace('-', '_')}-1.0.dist-info"
        info.mkdir(parents=True)
        head = ["Metadata-Version: 2.4", f"Name: {name}", "Version: 1.0", *lines]
        (info / "METADATA").write_text("\n".join(head) + "\n", "utf-8")
        (tmp_path / "wheels").mkdir(exist_ok=True)
        wheel = tmp_path / "wheels" / f"{name.replace('-', '_')}-1.0-py3-none-any.whl"
        wheel.write_bytes(name.encode())

    return install


def test_list_of_contents_has_names_versions_licences_and_hashes(
    make_sbom: ModuleType, install: Callable[..., None], tmp_path: Path
) -> None:
    install("magnetar-broker", "License-Expression: Apache-2.0")
    install("Some.Library", "License: BSD 3", "Classifier: License :: OSI Approved :: MIT License")
    install("another", "License: Permission is hereby", "        granted, free of charge")
    install("third", "Classifier: License :: OSI Approved :: MIT License")
    (tmp_path / "packages").write_text("libc6\t2.36-9+deb12u10\tamd64\n", "utf-8")
    places = (tmp_path / "site", tmp_path / "wheels", tmp_path / "packages")
    made = make_sbom.sbom(*places)
    assert made == make_sbom.sbom(*places)
    assert (made["bomFormat"], made["specVersion"]) == ("CycloneDX", "1.6")
    subject = made["metadata"]["component"]
    assert (subject["type"], subject["purl"]) == ("application", "pkg:pypi/magnetar-broker@1.0")
    assert subject["licenses"] == [{"expression": "Apache-2.0"}]
    by_name = {each["name"]: each for each in made["components"]}
    assert list(by_name) == ["another", "some-library", "third", "debian", "libc6"]
    assert by_name["some-library"]["licenses"] == [{"license": {"name": "BSD 3"}}]
    assert by_name["third"]["licenses"] == [{"license": {"name": "MIT License"}}]
    assert by_name["another"]["licenses"] == []
    (known,) = by_name["another"]["hashes"]
    assert (known["alg"], len(known["content"])) == ("SHA-256", 64)
    assert "%2Bdeb12u10?arch=amd64&distro=debian-" in by_name["libc6"]["purl"]
    (tmp_path / "wheels" / "third-1.0-py3-none-any.whl").unlink()
    with pytest.raises(KeyError, match="third"):
        make_sbom.sbom(*places)


# The audit


def skipped(name: str) -> dict[str, object]:
    return {"name": name, "skip_reason": "Dependency not found on PyPI"}


def test_a_known_vulnerability_fails_the_audit() -> None:
    bad = {"name": "aiohttp", "version": "3.14.5", "vulns": [{"id": "X-1", "fix_versions": ["4"]}]}
    good = {"name": "attrs", "version": "26.1.0", "vulns": []}
    status, lines = verdict(json.dumps({"dependencies": [good, bad, skipped("third")]}))
    assert status == 1
    assert lines[0] == "aiohttp 3.14.5: X-1, mended in 4"
    assert lines[1] == "Not in the database: third."
    status, lines = verdict(json.dumps({"dependencies": [good]}))
    assert (status, lines) == (0, ["1 libraries have no known vulnerability."])


@pytest.mark.parametrize(
    ("printed", "errors"),
    [
        (json.dumps({"dependencies": [skipped("aiohttp"), skipped("attrs")]}), ""),
        ("", "requests.exceptions.ConnectionError: HTTPSConnectionPool: NameResolutionError"),
        ("", "pip_audit: Could not connect to the service"),
    ],
)
def test_a_database_that_is_not_reached_fails_nothing(printed: str, errors: str) -> None:
    assert verdict(printed, errors) == (0, [NOT_REACHED])


def test_an_audit_that_cannot_read_the_lock_fails() -> None:
    status, lines = verdict("", "a\nERROR: requirement aiohttp lacks a hash\n")
    assert (status, lines) == (1, ["pip-audit failed: ERROR: requirement aiohttp lacks a hash"])


def test_the_workflow_audits() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/check.yml").read_text("utf-8"))["jobs"]
    assert jobs["audit"]["steps"][-1]["run"] == "make audit"
