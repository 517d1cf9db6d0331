"""`magnetar tokens` beside `pulsar tokens`: each takes the keys and the tokens of the other.

The tool is part of Apache Pulsar's broker, so this runs with the peer (`make stock-peer`).
"""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.java.peer_process import resolve_jars

TOOL = "org.apache.pulsar.utils.auth.tokens.TokensCliUtils"
OURS = """
import sys
from magnetar.cli.main import build_app
build_app()(["tokens", *sys.argv[1:]])
"""


def run(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def ours(*words: str) -> str:
    return run(sys.executable, "-c", OURS, *words)


@pytest.fixture(scope="module")
def jars(on_peer: bool) -> Path:
    if not on_peer:
        pytest.skip("the tool is part of the peer: add --peer")
    return resolve_jars()


@pytest.mark.parametrize(
    "algorithm", ["HS256", "HS384", "HS512", "RS256", "ES256", "ES384", "ES512"]
)
@pytest.mark.parametrize("keys_of", ["ours", "theirs"])
def test_each_tool_takes_keys_and_tokens_of_the_other(
    jars: Path, tmp_path: Path, algorithm: str, keys_of: str
) -> None:
    def theirs(*words: str) -> str:
        return run("java", "-XX:TieredStopAtLevel=1", "-cp", f"{jars}/*", TOOL, *words)

    make = ours if keys_of == "ours" else theirs
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    signing: tuple[str, ...]
    verifying: tuple[str, ...]
    if algorithm.startswith("HS"):
        make("create-secret-key", "-a", algorithm, "-o", first)
        signing = verifying = ("-sk", first)
    else:
        pair = ("--output-private-key", first, "--output-public-key", second)
        make("create-key-pair", "-a", algorithm, *pair)
        signing, verifying = ("-a", algorithm, "-pk", first), ("-a", algorithm, "-pk", second)
    Path(first).chmod(0o600)  # Their tool goes by the umask.
    token = theirs("create", "-s", "joe", "-e", "1h", *signing)
    assert ours("validate", *verifying, token).startswith('{"sub":"joe","exp":')
    assert ours("show", token) == theirs("show", token)
    token = ours("create", "-s", "joe", "-e", "1h", *signing)
    assert theirs("validate", *verifying, token).startswith("{sub=joe, exp=")
    assert ours("show", token) == theirs("show", token)
