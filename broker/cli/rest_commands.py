"""Options and helpers of commands that send REST requests to a broker."""

import os
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Final, NamedTuple
from urllib.parse import quote

import typer

from broker.cli.rest_client import RestFailure, call, client_context
from magnetar.cli.option_group import with_options
from magnetar.cli.security_options import SecurityOptions
from magnetar.protocol.server_error import MagnetarError

DEFAULT_ADMIN_URL: Final = "http://127.0.0.1:8080"
HTTP_PORT_TLS: Final = 8443
"""The REST port of a broker that was started with `--secure`, unless it is set otherwise."""


class LocalBroker(NamedTuple):
    """A broker of this machine that was started with `--secure`."""

    url: str
    certificate: Path
    token: Path

    @classmethod
    def of(cls, data_dir: Path | None) -> "LocalBroker | None":
        """The broker with this data directory; None if it was not started so, or is not ours."""
        if data_dir is None:
            return None
        files = data_dir / "security"
        certificate, token = files / "certificate.pem", files / "admin.token"
        # Not `Path.is_file`, which raises for a directory that others may not enter.
        if not (os.path.isfile(certificate) and os.path.isfile(token)):
            return None
        port = os.environ.get("MAGNETAR_HTTP_PORT_TLS") or HTTP_PORT_TLS
        return cls(f"https://127.0.0.1:{port}", certificate, token)


@dataclass(frozen=True)
class Admin(SecurityOptions):
    """The REST interface that one command line names, and its credentials and TLS.

    Raises typer.BadParameter.
    """

    admin_url: Annotated[
        str | None,
        typer.Option(
            "--admin-url",
            envvar="MAGNETAR_ADMIN_URL",
            help=f"REST address of a broker [{DEFAULT_ADMIN_URL}, or that of --data-dir]",
        ),
    ] = None
    data_dir: Annotated[
        Path | None,
        typer.Option(
            "--data-dir",
            envvar="MAGNETAR_DATA_DIR",
            help="Without --admin-url: the data directory of a broker that runs on this machine "
            "with --secure; its address, certificate and token are used",
        ),
    ] = None

    @cached_property
    def _local(self) -> LocalBroker | None:
        # Its token is never sent to an address that somebody named.
        return LocalBroker.of(self.data_dir) if self.admin_url is None else None

    @property
    def url(self) -> str:
        """The REST address of the broker."""
        if self._local is not None:
            return self._local.url
        return self.admin_url or DEFAULT_ADMIN_URL

    def authorization(self) -> str | None:
        """The header `Authorization`, or None without credentials.

        Raises `RestFailure` if a file cannot be read, or an issuer gives no token.
        """
        try:
            return self._authorize(self.url)
        except MagnetarError as error:
            raise RestFailure(str(error)) from error

    @cached_property
    def _authorize(self) -> Callable[[str], str | None]:
        # Imported by commands that ask a broker, and not by the broker's own start.
        from magnetar.credentials.rest import RestCredentials

        token, basic, oauth2 = self.token_text, self.basic, self.oauth2
        if self._local is not None and token is None and basic is None and oauth2 is None:
            token = self._local.token.absolute().as_uri()
        # One for all requests of a command, as it keeps the token of an issuer.
        return RestCredentials(token, basic, oauth2).authorization

    def tls_context(self) -> ssl.SSLContext | None:
        """The TLS context of requests; None for an address without TLS.  Raises `RestFailure`."""
        if not self.url.startswith("https://"):
            return None
        trust, own, key = self.tls_trust_file, self.tls_certificate_file, self.tls_key_file
        if self._local is not None:
            trust = trust or self._local.certificate
        context = client_context(trust, own, key)
        if not (self.tls_check_certificate and self.tls_check_hostname):
            context.check_hostname = False
        if not self.tls_check_certificate:
            context.verify_mode = ssl.CERT_NONE
        return context


DEFAULT_ADMIN: Final = Admin()


def asking(command: Callable[..., None]) -> Callable[..., None]:
    """Replace a command's parameter `admin` by the options of `Admin`."""
    return with_options(command, "admin", Admin)


def topic_path(topic: str) -> str:
    """REST path of a scalable topic given as `topic://t/n/x`, `t/n/x` or `x`."""
    local = topic.removeprefix("topic://")
    parts = local.split("/", 2)
    if len(parts) == 1:
        parts = ["public", "default", local]
    if len(parts) != 3 or not all(parts) or "://" in local:
        raise typer.BadParameter(
            f"{topic!r} is not a scalable topic: write topic://tenant/namespace/name."
        )
    return "/admin/v2/scalable/" + "/".join(quote(part, safe="") for part in parts)


def ask(admin: Admin, method: str, path: str, body: object | None = None) -> object:
    """Send one REST request; a failure ends the command with its reason."""
    try:
        return call(
            admin.url,
            method,
            path,
            body,
            authorization=admin.authorization(),
            tls=admin.tls_context(),
        )
    except RestFailure as failure:
        typer.echo(str(failure), err=True)
        raise typer.Exit(1) from failure


def mapping(answer: object) -> Mapping[str, object]:
    """The JSON object in an answer; empty if it is something else."""
    return answer if isinstance(answer, dict) else {}


def or_dash(value: object) -> str:
    """The text of a value, or a dash if there is none."""
    return "-" if value is None or value == "" else str(value)


def printable(name: object) -> str:
    """A name that a client chose, with its control characters escaped for the terminal."""
    text = or_dash(name)
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in text
    )
