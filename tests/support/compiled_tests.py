"""`python -m tests.support.compiled_tests`: compile the files of all tests, once for all workers.

Pytest rewrites each assertion, which takes as long as all else that a worker does before its first
test.  Workers that begin together in a fresh checkout would each do so.
"""

import contextlib
import os
import sys

import pytest


def main() -> int:
    with open(os.devnull, "w", encoding="utf-8") as nowhere, contextlib.redirect_stdout(nowhere):
        status = pytest.main(["--collect-only", "-q", "-m", "", "-p", "no:cacheprovider"])
    print(
        "the files of all tests are compiled" if status == 0 else "not all tests can be collected"
    )
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
