"""Ask the advisory database about the locked libraries of the image (`make audit`).

Status 1 if one of them has a known vulnerability.  Where the database cannot be reached, one
sentence says so and the status is 0: a network that is closed is no fault of the libraries.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
LOCKS: Final = ("deploy/image/requirements.txt", "deploy/image/build-requirements.txt")
TIMEOUT_S: Final = 300
NOT_REACHED: Final = (
    "The advisory database cannot be reached from here, so nothing was audited: run `make audit` "
    "where it can."
)

NETWORK_WORDS: Final = ("connect", "timed out", "timeout", "resolution", "resolve")
"""Words of errors that tell that the database cannot be reached."""


def verdict(printed: str, errors: str = "") -> tuple[int, Sequence[str]]:
    """The exit status and the lines to print, by the JSON and the errors of pip-audit."""
    try:
        libraries = json.loads(printed)["dependencies"]
    except (ValueError, KeyError):
        if any(word in errors.lower() for word in NETWORK_WORDS):
            return 0, [NOT_REACHED]
        last = (errors.strip().splitlines() or ["it printed nothing"])[-1]
        return 1, [f"pip-audit failed: {last}"]
    # A mirror of packages has no advisories: pip-audit skips each package then, and says "found".
    audited = [each for each in libraries if "skip_reason" not in each]
    if not audited:
        return 0, [NOT_REACHED]
    lines = [
        f"{each['name']} {each['version']}: {found['id']}, mended in "
        f"{', '.join(found['fix_versions']) or 'no release yet'}"
        for each in audited
        for found in each["vulns"]
    ]
    left_out = [each["name"] for each in libraries if "skip_reason" in each]
    notes = [f"Not in the database: {', '.join(left_out)}."] if left_out else []
    if lines:
        return 1, [*lines, *notes, "Raise what is mended in pyproject.toml, then run `make lock`."]
    return 0, [f"{len(audited)} libraries have no known vulnerability.", *notes]


def main() -> int:
    """Run pip-audit, and print what it found."""
    command = [sys.executable, "-m", "pip_audit", "--format=json", "--progress-spinner=off"]
    # Everything is in the files, so that pip has nothing to resolve.
    command += ["--require-hashes", "--disable-pip"]
    command += [f"--requirement={ROOT / name}" for name in LOCKS]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        status, lines = verdict(done.stdout, done.stderr)
    except subprocess.TimeoutExpired:
        status, lines = 0, [NOT_REACHED]
    print("\n".join(lines))
    return status


if __name__ == "__main__":
    sys.exit(main())
