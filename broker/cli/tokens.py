"""`magnetar tokens`: keys and tokens (JWT), with the verbs and options of `pulsar tokens`.

Nothing is sent to a broker.  No error shows a key or a token.
"""

import base64
import json
import os
import re
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Final, TypeVar

import typer

from broker.cli.failure import fail

K = TypeVar("K")
_DURATION: Final = re.compile(r"(\d{1,9})([smhdwy]?)")
_UNITS_S: Final = {
    "": 1,
    "s": 1,
    "m": 60,
    "h": 3600,
    "d": 24 * 3600,
    "w": 7 * 24 * 3600,
    "y": 365 * 24 * 3600,
}
_LONGEST_S: Final = 100 * _UNITS_S["y"]
_KEY_FORMS: Final = "file:///PATH, a path, data:;base64,KEY or base64"

Algorithm = Annotated[
    str | None,
    typer.Option("--signature-algorithm", "-a", help="Algorithm, such as HS256, RS256 or ES256"),
]
SecretKey = Annotated[
    str | None, typer.Option("--secret-key", "-sk", help=f"Secret: {_KEY_FORMS}", metavar="KEY")
]
TokenArgument = Annotated[
    str | None, typer.Argument(help="The token; without it, -i and -f: $TOKEN")
]
FromInput = Annotated[bool, typer.Option("--stdin", "-i", help="Read the token from there")]
TokenFile = Annotated[
    Path | None, typer.Option("--token-file", "-f", help="Read the token from a file")
]


def create_secret_key(
    algorithm: Algorithm = "HS256",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write it to a new file, mode 0600")
    ] = None,
    as_base64: Annotated[bool, typer.Option("--base64", "-b", help="Write it as base64")] = False,
) -> None:
    """Make a secret that signs and verifies tokens."""
    from security.new_keys import new_secret
    from security.token_keys import SECRET_BYTES

    if not output and not as_base64 and sys.stdout.isatty():
        raise fail("a secret is no text: give -o FILE, or -b to print it as base64.")
    secret = new_secret(_one_of(algorithm, SECRET_BYTES))
    data = base64.b64encode(secret) if as_base64 else secret
    if output:
        _write(output, data)
    else:
        typer.echo(data, nl=as_base64)


def create_key_pair(
    private: Annotated[
        Path, typer.Option("--output-private-key", help="New file of the private key, mode 0600")
    ],
    public: Annotated[
        Path, typer.Option("--output-public-key", help="New file of the public key, mode 0600")
    ],
    algorithm: Algorithm = "RS256",
) -> None:
    """Make a key pair: the private key signs tokens, the public key verifies them."""
    from security.new_keys import new_key_pair
    from security.token_keys import PAIR_ALGORITHMS

    pair = new_key_pair(_one_of(algorithm, dict.fromkeys(PAIR_ALGORITHMS)))
    _write(private, pair.private)
    try:
        _write(public, pair.public)
    except typer.Exit:
        private.unlink()  # It is new, and of no use without the other one.
        raise


def create(
    subject: Annotated[str, typer.Option("--subject", "-s", help="Role of the token")],
    expiry: Annotated[
        str | None,
        typer.Option("--expiry-time", "-e", help="Time until it expires: 30m, 1h, 3d, 10y"),
    ] = None,
    never: Annotated[bool, typer.Option("--never", help="It does not expire")] = False,
    secret: SecretKey = None,
    private: Annotated[
        str | None,
        typer.Option("--private-key", "-pk", help=f"Private key: {_KEY_FORMS}", metavar="KEY"),
    ] = None,
    algorithm: Algorithm = None,
    headers: Annotated[
        list[str] | None,
        typer.Option("--headers", "-hs", help="Header, as kid=ID; may be repeated"),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write it to a new file, mode 0600")
    ] = None,
) -> None:
    """Make a token of a role, and print it."""
    from security.identity import InvalidRole, role_of
    from security.token_keys import private_key, signing_secret
    from security.tokens import create_token

    try:
        claims: dict[str, object] = {"sub": role_of(subject)}
    except InvalidRole as error:
        raise typer.BadParameter(str(error)) from error
    if never == (expiry is not None):
        raise typer.BadParameter(
            "write how long the token is valid, as -e 30d, or --never: a token that does not "
            "expire is ended only by the removal of its key."
        )
    if expiry is not None:
        claims["exp"] = int(time.time()) + duration_s(expiry)
    _require_one("--private-key", secret, private)
    if secret is not None:
        key = _key(signing_secret, secret, "The secret key")
    else:
        key = _key(private_key, private or "", "The private key")
    try:
        token = create_token(key, claims, algorithm=algorithm, headers=_headers(headers or []))
    except ValueError as error:
        raise fail(error) from error
    if output:
        _write(output, token.encode())
    else:
        typer.echo(token)


def show(
    token: TokenArgument = None, stdin: FromInput = False, token_file: TokenFile = None
) -> None:
    """Print the header and the claims of a token, which may be forged."""
    from security.errors import CredentialsRefused
    from security.tokens import decode_unverified

    try:
        header, claims = decode_unverified(_token(token, stdin, token_file))
    except CredentialsRefused as refused:
        raise fail(refused) from refused
    typer.echo(f"{_compact(header)}\n---\n{_compact(claims)}")


def validate(
    token: TokenArgument = None,
    stdin: FromInput = False,
    token_file: TokenFile = None,
    secret: SecretKey = None,
    public: Annotated[
        str | None,
        typer.Option("--public-key", "-pk", help=f"Public key: {_KEY_FORMS}", metavar="KEY"),
    ] = None,
    algorithm: Algorithm = None,
) -> None:
    """Check the signature and the times of a token, and print its claims."""
    from security.errors import CredentialsRefused
    from security.token_keys import TokenKeys, public_key, secret_key
    from security.tokens import verified_claims

    data = _token(token, stdin, token_file)
    _require_one("--public-key", secret, public)
    if secret is not None:
        key = _key(secret_key, secret, "The secret key")
    else:
        key = _key(public_key, public or "", "The public key", public=True)
    if algorithm is not None and algorithm not in key.algorithms:
        raise fail(f"the key is for {' or '.join(sorted(key.algorithms))}: leave out -a.")
    try:
        claims, _ = verified_claims(data, TokenKeys([key]), time.time())
    except CredentialsRefused as refused:
        raise fail(f"the token is not valid. {refused}") from refused
    typer.echo(_compact(claims))


def duration_s(text: str) -> int:
    """Seconds of a duration such as `90`, `30m`, `1h`, `3d`, `2w` or `10y`."""
    found = _DURATION.fullmatch(text)
    seconds = int(found[1]) * _UNITS_S[found[2]] if found else 0
    if not 0 < seconds <= _LONGEST_S:
        raise typer.BadParameter(
            f"{text!r} is no time until a token expires: write 30m, 1h, 3d or 10y, up to 100y."
        )
    return seconds


def _one_of(algorithm: str | None, known: Mapping[str, object]) -> str:
    if algorithm is None or algorithm not in known:
        raise typer.BadParameter(
            f"{algorithm!r} is no algorithm of these keys: use one of {', '.join(known)}."
        )
    return algorithm


def _headers(given: list[str]) -> dict[str, str]:
    pairs = [text.partition("=") for text in given]
    if not all(name and sign for name, sign, _ in pairs):
        raise typer.BadParameter("a header is written as NAME=VALUE, such as kid=2026.")
    return {name: value for name, _, value in pairs}


def _write(path: Path, data: bytes) -> None:
    from security.errors import InvalidSecret
    from security.secret_files import write_secret

    try:
        write_secret(path, data)
    except InvalidSecret as error:
        raise fail(error) from error


def _require_one(other: str, *keys: str | None) -> None:
    if sum(key is not None for key in keys) != 1:
        raise typer.BadParameter(f"give one of --secret-key and {other}.")


def _key(make: Callable[[bytes, str], K], text: str, name: str, *, public: bool = False) -> K:
    """Make the key that an option names; `name` is what an error calls it."""
    from security.errors import InvalidSecret
    from security.key_source import key_source
    from security.secret_files import is_file, read_public, read_secret

    try:
        return make(
            key_source(text, name, is_file).read(read_public if public else read_secret), name
        )
    except InvalidSecret as error:
        raise fail(error) from error


def _token(token: str | None, stdin: bool, token_file: Path | None) -> bytes:
    """The token, in the order of Pulsar's tool: argument, input, file, environment."""
    from config.bounds import TOKEN_BYTES
    from security.errors import InvalidSecret
    from security.secret_files import read_public

    if token is not None:
        return token.encode("utf-8", "surrogateescape")
    if stdin:
        return sys.stdin.buffer.read(TOKEN_BYTES + 1)
    if token_file is not None:
        try:
            # Others may read it: a token of a pod is mounted so.
            return read_public(token_file)
        except InvalidSecret as error:
            raise fail(error) from error
    if found := os.environ.get("TOKEN"):
        return found.encode("utf-8", "surrogateescape")
    raise typer.BadParameter("there is no token: give it, or -i, -f FILE or $TOKEN.")


def _compact(value: Mapping[str, object]) -> str:
    # Escaped, as a token that may be forged could move the terminal's cursor.
    return json.dumps(value, separators=(",", ":"))


def register_tokens(app: typer.Typer) -> None:
    """Add the `tokens` group."""
    group = typer.Typer(help="Keys and tokens (JWT) of clients.", no_args_is_help=True)
    group.command("create-secret-key")(create_secret_key)
    group.command("create-key-pair")(create_key_pair)
    group.command("create")(create)
    group.command("show")(show)
    group.command("validate")(validate)
    app.add_typer(group, name="tokens")
