"""Print the contents of the image as CycloneDX: libraries of Python and packages of Debian.

    python3 make_sbom.py SITE-PACKAGES WHEELS DEBIAN-PACKAGES > sbom.json

SITE-PACKAGES has what is installed, WHEELS the files that it was installed from; DEBIAN-PACKAGES
lists name, version and architecture, a package on each line.  It runs while the image is built, by
the Python that is there, and needs nothing else.
"""

import json
import re
import sys
import uuid
from collections.abc import Iterator, Mapping
from hashlib import sha256
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Final

SPEC: Final = "1.6"
SUBJECT: Final = "magnetar-broker"
COPYRIGHT: Final = Path("/usr/share/doc")
OS_RELEASE: Final = Path("/etc/os-release")
_CLASSIFIER: Final = "License :: "
_NAME_CHARACTERS: Final = 80
"""A longer text of a licence field is no name, but the licence itself."""

Component = dict[str, object]


def canonical(name: str) -> str:
    """A project's name as package indexes write it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def hashes_of(wheels: Path) -> Mapping[str, str]:
    """The SHA-256 of each wheel, by the name of its project."""
    return {
        canonical(path.name.partition("-")[0]): sha256(path.read_bytes()).hexdigest()
        for path in wheels.glob("*.whl")
    }


def licenses_of(distribution: Distribution) -> list[object]:
    """The licences in the metadata of a library: an SPDX expression, or else names."""

    def values(name: str) -> list[str]:
        return distribution.metadata.get_all(name) or []

    if expressions := values("License-Expression"):
        return [{"expression": expressions[0]}]
    named = "".join(values("License")).strip()
    if not named or "\n" in named or len(named) > _NAME_CHARACTERS:
        classified = [each for each in values("Classifier") if _CLASSIFIER in each]
        return [{"license": {"name": each.rpartition(" :: ")[2]}} for each in classified]
    return [{"license": {"name": named}}]


def python_components(site: Path, wheels: Path) -> Iterator[Component]:
    """A component for each installed distribution.  Raises KeyError for one without a wheel."""
    hashes = hashes_of(wheels)
    for each in distributions(path=[str(site)]):
        name = canonical(each.metadata["Name"])
        purl = f"pkg:pypi/{name}@{each.version}"
        yield {
            "type": "library",
            "bom-ref": purl,
            "name": name,
            "version": each.version,
            "purl": purl,
            "licenses": licenses_of(each),
            "hashes": [{"alg": "SHA-256", "content": hashes[name]}],
        }


def debian_components(packages: Path, release: str) -> Iterator[Component]:
    """A component for each package, with its licences if its copyright file names them."""
    for line in packages.read_text("utf-8").splitlines():
        name, version, architecture = line.split("\t")
        purl = f"pkg:deb/debian/{name}@{version}?arch={architecture}&distro=debian-{release}"
        purl = purl.replace("+", "%2B")
        try:
            text = (COPYRIGHT / name / "copyright").read_text("utf-8", errors="replace")
        except OSError:
            text = ""
        readable = text.startswith("Format:")
        found = re.findall(r"^License: *(\S.*)$", text, re.MULTILINE) if readable else []
        yield {
            "type": "library",
            "bom-ref": purl,
            "name": name,
            "version": version,
            "purl": purl,
            "licenses": [{"license": {"name": each.strip()}} for each in sorted(set(found))],
        }


def sbom(site: Path, wheels: Path, packages: Path) -> dict[str, object]:
    """The whole document.  The same contents make the same document."""
    known = dict(
        line.split("=", 1) for line in OS_RELEASE.read_text("utf-8").splitlines() if "=" in line
    )
    release = known["VERSION_ID"].strip('"')
    python = sorted(python_components(site, wheels), key=lambda each: str(each["name"]))
    (subject,) = (each for each in python if each["name"] == SUBJECT)
    others = [each for each in python if each is not subject]
    system: Component = {
        "type": "operating-system",
        "bom-ref": f"debian-{release}",
        "name": "debian",
        "version": release,
    }
    components = [*others, system, *debian_components(packages, release)]
    serial = uuid.uuid5(uuid.NAMESPACE_OID, json.dumps([subject, components], sort_keys=True))
    return {
        "bomFormat": "CycloneDX",
        "specVersion": SPEC,
        "serialNumber": serial.urn,
        "version": 1,
        "metadata": {"component": subject | {"type": "application"}},
        "components": components,
    }


if __name__ == "__main__":
    json.dump(sbom(*map(Path, sys.argv[1:4])), sys.stdout, indent=1)
    print()
