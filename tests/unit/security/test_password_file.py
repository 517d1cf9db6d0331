"""Password files: strict lines, two kinds of hashes, and no hint whether a user exists."""

import shutil
import subprocess
import time

import bcrypt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from config.bounds import PASSWORD_BYTES, PASSWORD_FILE_BYTES, PASSWORD_FILE_USERS
from security.errors import CredentialsRefused, InvalidSecret, Refusal
from security.password_file import (
    BCRYPT_PASSWORD_BYTES,
    PasswordFile,
    hash_apr1,
    parse_password_file,
)

APR1 = "$apr1$abcdefgh$cy3DSYyOwfhsyu7QOMQzd."
"""Of the password `hello`, by `openssl passwd -apr1`."""
BCRYPT = "$2b$04$abcdefghijklmnopqrstuuwHJMEGjfAzmL1lWmUmlphguIbWfjYey"


def parse(*lines: str) -> PasswordFile:
    return parse_password_file("\n".join(lines).encode(), "users.htpasswd")


def refusal_of(file: PasswordFile, user: str, password: bytes) -> Refusal:
    with pytest.raises(CredentialsRefused) as refused:
        file.check(user, password)
    return refused.value.reason


@pytest.mark.parametrize("stored", [APR1, BCRYPT, "$2a$" + BCRYPT[4:], "$2y$" + BCRYPT[4:]])
def test_the_password_of_a_user_is_checked(stored: str) -> None:
    file = parse(f"alice:{stored}", f"bob:{APR1}")
    assert file.check("alice", b"hello") == "alice"
    assert refusal_of(file, "alice", b"Hello") is Refusal.INVALID_TOKEN
    assert refusal_of(file, "alice", b"hello ") is Refusal.INVALID_TOKEN
    assert refusal_of(file, "Alice", b"hello") is Refusal.INVALID_AUTH_DATA


def test_comments_empty_lines_and_carriage_returns_are_left_out() -> None:
    file = parse("# users", "", f"alice:{APR1}\r", f"bob:{APR1}", "")
    assert len(file) == 2
    assert file.check("bob", b"hello") == "bob"


@pytest.mark.parametrize(
    "stored",
    [
        "",
        "hello",
        "rqXexS6ZhobKA",
        "{SHA}qvTGHdzF6KLavt4PO0gs2a6pQ00=",
        "$1$abcdefgh$cy3DSYyOwfhsyu7QOMQzd.",
        "$5$abcdefgh$xxx",
        "$6$abcdefgh$xxx",
        "$2x$" + BCRYPT[4:],
        "$2$" + BCRYPT[4:],
        BCRYPT[:-1],
        BCRYPT + "x",
        BCRYPT + " ",
        " " + BCRYPT,
        APR1 + ".",
        APR1[:-1] + "z",
        "$apr1$abcdefghi$cy3DSYyOwfhsyu7QOMQzd.",
        "$apr1$$cy3DSYyOwfhsyu7QOMQzd.",
    ],
)
def test_other_hashes_are_refused_with_the_user_and_not_the_hash(stored: str) -> None:
    with pytest.raises(InvalidSecret, match=r"Line 2 .*'alice'.*htpasswd -B") as refused:
        parse(f"bob:{APR1}", f"alice:{stored}")
    assert not stored or stored not in str(refused.value)


@pytest.mark.parametrize("cost", ["03", "15", "31"])
def test_a_cost_out_of_bounds_is_refused(cost: str) -> None:
    with pytest.raises(InvalidSecret, match=rf"'alice' has the cost {cost}.*-C 10"):
        parse(f"alice:$2b${cost}${BCRYPT[7:]}")


@pytest.mark.parametrize("line", ["alice", "secret", f"alice:{APR1}:x", f"a:b:{APR1}", f"::{APR1}"])
def test_a_line_without_exactly_one_colon_is_refused_by_number(line: str) -> None:
    with pytest.raises(InvalidSecret, match=r"Line 1 of users\.htpasswd .*one colon") as refused:
        parse(line)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("user", ["", " alice", "alice ", "al*", "al\x00ice", "x" * 300])
def test_a_user_that_is_no_role_is_refused(user: str) -> None:
    with pytest.raises(InvalidSecret, match="no role"):
        parse(f"{user}:{APR1}")


def test_a_user_with_two_lines_is_refused() -> None:
    with pytest.raises(InvalidSecret, match="more than one line for the user 'alice'"):
        parse(f"alice:{APR1}", f"alice:{BCRYPT}")


def test_files_without_users_and_large_files_are_refused() -> None:
    for content in (b"", b"# nobody\n\n"):
        with pytest.raises(InvalidSecret, match="no users"):
            parse_password_file(content, "users.htpasswd")
    with pytest.raises(InvalidSecret, match=r"more than .* bytes"):
        parse_password_file(b"#" * (PASSWORD_FILE_BYTES + 1), "users.htpasswd")
    with pytest.raises(InvalidSecret, match=r"more than .* users"):
        parse(*(f"u{number}:{APR1}" for number in range(PASSWORD_FILE_USERS + 1)))
    with pytest.raises(InvalidSecret, match="UTF-8"):
        parse_password_file(b"\xff:x", "users.htpasswd")


@given(content=st.binary(max_size=200))
def test_a_broken_file_raises_nothing_else(content: bytes) -> None:
    try:
        parse_password_file(content, "users.htpasswd")
    except InvalidSecret:
        pass


@pytest.mark.parametrize("password", [b"", b"a\0b", b"x" * (PASSWORD_BYTES + 1)])
def test_a_password_that_none_can_have_is_refused_unhashed(password: bytes) -> None:
    file = parse(f"alice:{APR1}", f"bob:{BCRYPT}")
    for user in ("alice", "bob", "carol"):
        assert refusal_of(file, user, password) is Refusal.INVALID_AUTH_DATA


def test_a_password_that_bcrypt_would_shorten_is_refused() -> None:
    longest = b"x" * BCRYPT_PASSWORD_BYTES
    file = parse(f"alice:{bcrypt.hashpw(longest, bcrypt.gensalt(4)).decode()}")
    assert file.check("alice", longest) == "alice"
    assert refusal_of(file, "alice", longest + b"x") is Refusal.INVALID_TOKEN


@settings(deadline=None)
@given(user=st.text(max_size=20), password=st.binary(max_size=100))
def test_a_login_raises_nothing_else(user: str, password: bytes) -> None:
    file = parse(f"alice:{APR1}", f"bob:{BCRYPT}")
    assert refusal_of(file, "x" + user, password)


def test_an_unknown_user_with_the_password_of_its_stand_in_is_refused() -> None:
    file = parse(f"alice:{APR1}")
    assert refusal_of(file, "mallory", b"hello") is Refusal.INVALID_AUTH_DATA


def test_a_check_of_an_unknown_user_takes_as_long_as_of_a_known_one() -> None:
    slow = bcrypt.hashpw(b"hello", bcrypt.gensalt(9)).decode()
    file = parse(f"alice:{slow}")

    def seconds(user: str) -> float:
        times = []
        for _ in range(3):
            begin = time.thread_time()
            refusal_of(file, user, b"wrong")
            times.append(time.thread_time() - begin)
        return min(times)

    assert 0.5 < seconds("mallory") / seconds("alice") < 2


def test_a_password_file_shows_no_hashes() -> None:
    assert repr(parse(f"alice:{APR1}")) == "PasswordFile(1 users)"


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
@pytest.mark.parametrize("size", [1, 2, 8, 15, 16, 17, 31, 32, 33, 64, 100])
def test_apr1_is_that_of_openssl(size: int) -> None:
    password = ("pässword " * 20).encode()[:size].decode("utf-8", "ignore")
    made = subprocess.run(
        ["openssl", "passwd", "-apr1", "-salt", "aB./9"[: 1 + size % 5], "-stdin"],
        input=password.encode(),
        capture_output=True,
        check=True,
    ).stdout.split()[0]
    _, _, salt, expected = made.split(b"$")
    assert hash_apr1(password.encode(), salt) == expected
