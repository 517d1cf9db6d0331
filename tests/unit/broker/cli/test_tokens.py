"""`magnetar tokens`: what it writes and prints, and that no error shows a secret."""

import base64
import json
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from broker.cli.tokens import duration_s
from config.bounds import TOKEN_BYTES
from magnetar.cli.main import build_app
from security.token_keys import SECRET_BYTES
from security.tokens import decode_unverified
from tests.support.pulsar_tokens import PUBLIC_KEYS, SECRETS

TOKENS = """
import sys
from magnetar.cli.main import build_app
build_app()(["tokens", *sys.argv[1:]])
"""
HS256 = f"data:;base64,{SECRETS['HS256'].key}"
JOE = SECRETS["HS256"].token
QUICK_TO_MAKE = ("RS256", "PS256", "ES256", "ES384", "ES512", "EdDSA")
"""RSA keys for longer hashes are longer, and take a second and more."""


def run(*words: str, given: str | bytes | None = None, token: str | None = None) -> Result:
    app = build_app()
    env = {"TOKEN": token, "COLUMNS": "300"}
    return CliRunner().invoke(app, ["tokens", *words], input=given, env=env)


def output(*words: str, given: str | bytes | None = None, token: str | None = None) -> str:
    done = run(*words, given=given, token=token)
    assert done.exit_code == 0, done.output
    return done.stdout


def refusal(*words: str, given: str | bytes | None = None, status: int = 1) -> str:
    done = run(*words, given=given)
    assert (done.exit_code, done.stdout) == (status, "")
    return done.stderr


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


# Keys


@pytest.mark.parametrize("algorithm", SECRET_BYTES)
def test_secret_is_written_as_it_is_or_as_base64(tmp_path: Path, algorithm: str) -> None:
    length = SECRET_BYTES[algorithm]
    output("create-secret-key", "-a", algorithm, "-o", str(tmp_path / "raw"))
    output("create-secret-key", "-a", algorithm, "-b", "--output", str(tmp_path / "text"))
    assert len((tmp_path / "raw").read_bytes()) == length
    assert len(base64.b64decode((tmp_path / "text").read_bytes(), validate=True)) == length
    assert mode_of(tmp_path / "raw") == mode_of(tmp_path / "text") == 0o600
    assert len(run("create-secret-key", "-a", algorithm).stdout_bytes) == length
    assert len(base64.b64decode(output("create-secret-key", "-a", algorithm, "-b"))) == length
    assert output("create-secret-key", "-b") != output("create-secret-key", "-b")


def test_secret_is_not_printed_on_a_terminal() -> None:
    leader, follower = os.openpty()
    try:
        done = subprocess.run(
            [sys.executable, "-c", TOKENS, "create-secret-key"],
            stdout=follower,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    finally:
        os.close(leader)
        os.close(follower)
    assert (done.returncode, "give -o FILE, or -b" in done.stderr) == (1, True)


@pytest.mark.parametrize("algorithm", QUICK_TO_MAKE)
def test_token_of_a_new_pair_is_valid(tmp_path: Path, algorithm: str) -> None:
    private, public = str(tmp_path / "private"), str(tmp_path / "public")
    pair = ("--output-private-key", private, "--output-public-key", public)
    output("create-key-pair", "-a", algorithm, *pair)
    assert mode_of(tmp_path / "private") == mode_of(tmp_path / "public") == 0o600
    token = output("create", "-s", "joe", "-e", "1h", "-pk", private, "-a", algorithm).strip()
    assert decode_unverified(token.encode())[0] == {"alg": algorithm}
    claims = json.loads(output("validate", "-pk", f"file://{public}", "-a", algorithm, token))
    assert claims["sub"] == "joe"
    assert "which a broker must not have" in refusal("validate", "-pk", private, token)


def test_key_in_use_is_not_written_over(tmp_path: Path) -> None:
    output("create-secret-key", "-o", str(tmp_path / "key"))
    before = (tmp_path / "key").read_bytes()
    assert "choose another name" in refusal("create-secret-key", "-o", str(tmp_path / "key"))
    pair = ("--output-private-key", str(tmp_path / "new"), "--output-public-key")
    assert "choose another name" in refusal(
        "create-key-pair", "-a", "ES256", *pair, str(tmp_path / "key")
    )
    assert (tmp_path / "key").read_bytes() == before
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("command", "algorithm"),
    [
        *(("create-secret-key", name) for name in ("RS256", "none", "hs256", "")),
        *(("create-key-pair", name) for name in ("HS256", "none", "ES256K", "RS1")),
    ],
)
def test_algorithm_of_other_keys_is_refused(command: str, algorithm: str) -> None:
    files = ("--output-private-key", "x", "--output-public-key", "y")
    more = files if command == "create-key-pair" else ()
    assert "use one of" in refusal(command, "-a", algorithm, *more, status=2)


# Tokens


def test_token_that_does_not_expire_is_that_of_pulsars_tool() -> None:
    assert output("create", "-s", "joe", "--never", "-sk", HS256) == f"{JOE}\n"
    assert output("create", "--subject", "joe", "--never", "--secret-key", HS256) == f"{JOE}\n"


@pytest.mark.parametrize(
    ("text", "expected_s"), [("90", 90), ("30s", 30), ("5m", 300), ("1h", 3600), ("3d", 259_200)]
)
def test_token_expires_after_the_time_that_is_given(text: str, expected_s: int) -> None:
    before = int(time.time())
    token = output("create", "-s", "joe", "-e", text, "-sk", HS256)
    expiry = decode_unverified(token.encode())[1]["exp"]
    assert isinstance(expiry, int)
    assert before + expected_s <= expiry <= before + expected_s + 60


def test_weeks_and_years_are_those_of_pulsars_tool() -> None:
    assert (duration_s("2w"), duration_s("10y")) == (14 * 86_400, 3650 * 86_400)


@pytest.mark.parametrize(
    "text", ["", "0", "0h", "-1h", "1.5h", "1h30m", "1M", "h", "101y", "9" * 30]
)
def test_time_that_is_none_is_refused(text: str) -> None:
    words = ("create", "-s", "joe", f"--expiry-time={text}", "-sk", HS256)
    assert "write 30m, 1h" in refusal(*words, status=2)


def test_expiry_must_be_given_or_refused_aloud() -> None:
    for words in ((), ("--never", "-e", "1h")):
        told = refusal("create", "-s", "joe", "-sk", HS256, *words, status=2)
        assert "--never" in told


def test_headers_are_set() -> None:
    words = ("create", "-s", "joe", "--never", "-sk", HS256)
    token = output(*words, "-hs", "kid=a=b", "--headers", "x=")
    assert decode_unverified(token.encode())[0] == {"alg": "HS256", "kid": "a=b", "x": ""}
    for header in ("kid", "=x"):
        assert "NAME=VALUE" in refusal(*words, "-hs", header, status=2)
    assert "cannot be set" in refusal(*words, "-hs", "alg=none")


def test_subject_that_is_no_role_is_refused() -> None:
    for subject in ("", " joe", "a*", "a\nb"):
        assert "role may" in refusal("create", "-s", subject, "--never", "-sk", HS256, status=2)


def test_token_is_written_to_a_file(tmp_path: Path) -> None:
    output("create", "-s", "joe", "--never", "-sk", HS256, "-o", str(tmp_path / "token"))
    assert (tmp_path / "token").read_text() == JOE
    assert mode_of(tmp_path / "token") == 0o600


def test_exactly_one_key_signs() -> None:
    words = ("create", "-s", "joe", "--never")
    for keys in ((), ("-sk", HS256, "-pk", HS256)):
        assert "give one of --secret-key and --private-key" in refusal(*words, *keys, status=2)
        assert "give one of" in refusal("validate", JOE, *keys, status=2)
    assert "does not fit the key" in refusal(*words, "-sk", HS256, "-a", "HS512")
    assert "is no private key" in refusal(*words, "-pk", HS256)


def test_key_file_that_others_may_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(bytes(range(32)))
    (tmp_path / "key").chmod(0o644)
    for words in (("create", "-s", "joe", "--never"), ("validate", JOE)):
        assert "chmod 600" in refusal(*words, "-sk", str(tmp_path / "key"))


def test_errors_have_nothing_of_a_key_or_token() -> None:
    for key in ("hush!", "data:;base64,hush", "data:,hush", "hush"):
        for words in (("create", "-s", "joe", "--never", "-sk"), ("validate", JOE, "-pk")):
            assert "hush" not in refusal(*words, key)
    for token in ("hush", "hush.hush.hush", f"{JOE}hush"):
        assert "hush" not in refusal("validate", "-sk", HS256, token)


# Show, and validate


def test_token_is_shown_unverified() -> None:
    shown = '{"alg":"HS256"}\n---\n{"sub":"joe"}\n'
    assert output("show", JOE) == shown
    assert output("show", f"{JOE[:-4]}AAAA") == shown
    header = base64.urlsafe_b64encode('{"alg":"none","x":"\u202e\u009b"}'.encode()).decode()
    token = f"{header.rstrip('=')}.{JOE.split('.')[1]}.AAAA"
    assert output("show", token).startswith('{"alg":"none","x":"\\u202e\\u009b"}\n---\n')


def test_token_comes_from_argument_input_file_or_environment(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(f"{JOE}\n")
    key = ("validate", "-sk", HS256)
    for done in (
        output(*key, JOE, token="wrong"),
        output(*key, "-i", given=f"{JOE}\n", token="wrong"),
        output(*key, "--stdin", given=JOE),
        output(*key, "-f", str(tmp_path / "token"), token="wrong"),
        output(*key, "--token-file", str(tmp_path / "token")),
        output(*key, token=JOE),
    ):
        assert done == '{"sub":"joe"}\n'
    assert "there is no token" in refusal("show", status=2)
    assert "cannot be read" in refusal("show", "-f", str(tmp_path / "none"))
    assert "is longer than" in refusal("show", "-i", given="a" * (TOKEN_BYTES + 1))
    assert refusal("show", "-i", given=b"\xff\xfe")


@pytest.mark.parametrize("algorithm", PUBLIC_KEYS)
def test_token_of_pulsars_tool_is_valid(algorithm: str) -> None:
    key, token = PUBLIC_KEYS[algorithm]
    assert output("validate", "-pk", key, token) == '{"sub":"joe"}\n'


def test_token_that_is_not_valid_is_refused_with_the_reason(tmp_path: Path) -> None:
    key = ("validate", "-sk", HS256)
    assert "the token is not valid. No key has signed it" in refusal(*key, f"{JOE[:-4]}AAAA")
    expired = output("create", "-s", "joe", "-e", "1s", "-sk", HS256).strip()
    time.sleep(1.1)
    assert "It expired" in refusal(*key, expired)
    public = ("validate", "-pk", PUBLIC_KEYS["RS256"].key)
    assert "No key is for the algorithm HS256" in refusal(*public, JOE)
    assert "leave out -a" in refusal(*public, "-a", "ES256", PUBLIC_KEYS["RS256"].token)
