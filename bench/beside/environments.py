"""What a checkout runs with: an interpreter that finds its code, what it needs, and nothing else.

Rules: each side has a virtual environment made in the same way, with the interpreter of this run.
Its `.pth` file names the checkout, then the directory of packages: that of this run when the
checkout asks for the same dependencies, else one that pip fills once.  A directory that is named
there has its own `.pth` files left alone, so the editable install of this tree is not to be found.
Modules of both sides are compiled beforehand.  A process tells at its end which modules it ran;
one that ran other code raises `WrongCode`.
"""

import compileall
import hashlib
import re
import shutil
import sys
import sysconfig
import venv
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import distributions, version
from pathlib import Path
from typing import Any, Final

from bench.beside import witness
from bench.beside.checkouts import packages, projects_of
from tests.support.broker_process import ROOT, Code
from tests.support.tools import built_once, run_build

DEPENDENCIES: Final = ROOT / "build" / "bench" / "dependencies"
WITNESS_MODULE: Final = "beside_witness"
TOLD: Final = "modules.told"


class WrongCode(Exception):
    """A broker ran modules of another checkout; the message names some.  It ends the bench."""


@dataclass(frozen=True)
class Environment:
    """The interpreter and the packages that brokers of a checkout run with."""

    code: Code
    own_dependencies: tuple[str, ...]
    """Requirements that only the checkout has, or only the work tree."""

    def code_telling(self, directory: Path) -> Code:
        """Return the code for a broker that writes into this directory which modules it ran."""
        told = {witness.VARIABLE: str(directory / TOLD)}
        return replace(self.code, variables={**self.code.variables, **told})


def environment_of(checkout: Path, place: Path, root: Path = ROOT) -> Environment:
    """Make an environment in `place` whose interpreter runs that checkout."""
    ours, theirs = (dependencies(projects_of(each)) for each in (root, checkout))
    if ours == theirs:
        installed = Path(sysconfig.get_path("purelib"))
    else:
        installed = _installed(to_install(ours, theirs))
    python = make_environment(checkout, place, installed)
    # Variables with which an interpreter would look elsewhere: an empty one is none.
    nowhere = {"PYTHONPATH": "", "PYTHONHOME": "", "PYTHONSAFEPATH": ""}
    code = Code(checkout, python, nowhere, main_of(checkout))
    return Environment(code, tuple(sorted(ours ^ theirs)))


def main_of(checkout: Path) -> str:
    """Find the module of the `magnetar` command: commits of one wheel had it with the broker."""
    ours = Code().main
    there = checkout.joinpath(*ours.split(".")).with_suffix(".py").exists()
    return ours if there else "broker.cli.main"


def dependencies(projects: Iterable[Mapping[str, Any]]) -> frozenset[str]:
    """Read what a broker needs, as it is written, without blanks."""
    written = (each for project in projects for each in project.get("dependencies", ()))
    return frozenset(each.replace(" ", "") for each in written)


def to_install(ours: Iterable[str], theirs: Iterable[str]) -> list[str]:
    """Return their requirements; where ours are the same, with the version installed here."""
    wanted = set(theirs)
    shared = wanted & set(ours)
    pinned = [f"{_name(each)}=={version(_name(each))}" for each in shared]
    return sorted([*pinned, *(wanted - shared)])


def make_environment(checkout: Path, place: Path, installed: Path) -> Path:
    """Make a virtual environment without packages of its own.  Return its interpreter."""
    venv.create(place, clear=True, symlinks=True)
    site = site_packages(place)
    shutil.copy(witness.__file__, site / f"{WITNESS_MODULE}.py")
    (site / "beside.pth").write_text(f"{checkout}\n{installed}\nimport {WITNESS_MODULE}\n")
    for project in projects_of(checkout):
        _describe(project, site)
    for directory in (site, *(checkout / name for name in sorted(packages(checkout)))):
        compileall.compile_dir(directory, quiet=2)
    return place / "bin" / "python"


def site_packages(environment: Path) -> Path:
    """Return the directory in which a virtual environment keeps packages."""
    base = {"base": str(environment), "platbase": str(environment)}
    return Path(sysconfig.get_path("purelib", "venv", base))


def _describe(project: Mapping[str, Any], site: Path) -> None:
    """Write the metadata that pip would: entry points are looked for there."""
    name, number = project["name"], project.get("version", "0")
    directory = site / f"{name.replace('-', '_')}-{number}.dist-info"
    directory.mkdir()
    (directory / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n")
    groups = {"console_scripts": project.get("scripts", {}), **project.get("entry-points", {})}
    lines = []
    for group, points in groups.items():
        lines += [f"[{group}]", *(f"{point} = {target}" for point, target in points.items())]
    (directory / "entry_points.txt").write_text("\n".join(lines) + "\n")


def _installed(requirements: list[str]) -> Path:
    """Return the directory of packages that meet these, installed by pip if need be."""
    text = "\n".join([sys.version, *requirements])
    environment = DEPENDENCIES / hashlib.sha256(text.encode()).hexdigest()[:12]
    python = environment / "bin" / "python"

    def install() -> None:
        venv.create(environment, clear=True, symlinks=True, with_pip=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        # What neither side names is as here, else other versions of it would be measured too.
        constraints = environment / "constraints.txt"
        constraints.write_text("".join(f"{each}\n" for each in unnamed(requirements)))
        pip += ["--constraint", str(constraints)]
        run_build("an environment with the commit's dependencies", [*pip, *requirements])

    built_once(environment.with_suffix(".sha256"), text, install)
    return site_packages(environment)


def unnamed(requirements: Iterable[str]) -> list[str]:
    """Return the installed versions of all packages that these requirements do not name."""
    named = {_normal(_name(each)) for each in requirements}
    here = {_normal(each.name): each.version for each in distributions()}
    return sorted(f"{name}=={number}" for name, number in here.items() if name not in named)


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _name(requirement: str) -> str:
    found = re.match(r"[\w.-]+", requirement)
    assert found is not None, requirement
    return found[0]


def told(path: Path) -> dict[str, Path]:
    """Read which modules a process ran, and from which files."""
    lines = path.read_text("utf-8").splitlines()
    return {name: Path(file) for name, _, file in (line.partition("\t") for line in lines)}


def strangers(modules: Mapping[str, Path], checkout: Path, project: Iterable[str]) -> list[str]:
    """Return the modules of the project, the main one too, that are not the checkout's."""
    names = {*project, "__main__"}
    return [
        f"{name} ({file})"
        for name, file in sorted(modules.items())
        if name.partition(".")[0] in names and not file.is_relative_to(checkout)
    ]


def must_have_run(checkout: Path, path: Path, project: Iterable[str]) -> dict[str, Path]:
    """Read which modules a process ran.  Raises `WrongCode` unless they are the checkout's."""
    try:
        modules = told(path)
    except FileNotFoundError:
        raise WrongCode(f"A broker of {checkout.name} did not tell which code it ran.") from None
    foreign = strangers(modules, checkout, project)
    if foreign:
        raise WrongCode(f"A broker of {checkout.name} ran other code: {', '.join(foreign[:3])}.")
    if "broker" not in {name.partition(".")[0] for name in modules}:
        raise WrongCode(f"A broker of {checkout.name} ran no module of `broker`.")
    return modules
