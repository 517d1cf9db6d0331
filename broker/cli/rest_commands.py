"""Options and helpers of commands that send REST requests to a broker."""

import os
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Final
from urllib.parse import quote

import typer

from broker.cli.local_broker import LocalAccess
from broker.cli.rest_client import RestFailure, call, client_context
from magnetar.cli.option_group import with_options
from magnetar.cli.security_options import SecurityOptions
from magnetar.protocol.server_error import MagnetarError
from storage.data_directory import ADDRESS_FILE

DEFAULT_ADMIN_URL: Final = "http://127.0.0.1:8080"


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
            help="REST address of a broker; without it that of --data-dir, else "
            f"{DEFAULT_ADMIN_URL}",
        ),
    ] = None
    data_dir: Annotated[
        Path | None,
        typer.Option(
            "--data-dir",
            envvar="MAGNETAR_DATA_DIR",
            help="Without --admin-url: the data directory of a broker that runs on this machine; "
            "its address, and after --secure its certificate and token, are used",
        ),
    ] = None

    @cached_property
    def local(self) -> LocalAccess | None:
        """The broker of this machine; None if an address is given, or nothing is known of one."""
        # Its token is never sent to an address that somebody named.
        if self.admin_url is not None:
            return None
        found = LocalAccess.of(self.data_dir)
        # The image always has the variable, also where a broker of a cluster writes no file.
        by_environment = os.environ.get("MAGNETAR_DATA_DIR")
        if found is None and self.data_dir not in (None, by_environment and Path(by_environment)):
            # The default address may be that of another broker, which this command would change.
            raise typer.BadParameter(
                f"no broker with the data directory {self.data_dir} runs here (its file "
                f"{ADDRESS_FILE} is missing, or cannot be read): start one with `magnetar "
                f"standalone --data-dir {self.data_dir}`, or name its address by --admin-url."
            )
        return found

    @property
    def url(self) -> str:
        """The REST address of the broker."""
        if self.local is not None:
            return self.local.url
        return self.admin_url or DEFAULT_ADMIN_URL

    @property
    def names_credentials(self) -> bool:
        """Whether the command line or the environment has credentials."""
        return not (self.token_text is None and self.basic is None and self.oauth2 is None)

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
        own = None if self.local is None else self.local.token
        if own is not None and not self.names_credentials:
            token = own.as_uri()
        # One for all requests of a command, as it keeps the token of an issuer.
        return RestCredentials(token, basic, oauth2).authorization

    def tls_context(self) -> ssl.SSLContext | None:
        """The TLS context of requests; None for an address without TLS.  Raises `RestFailure`."""
        if not self.url.startswith("https://"):
            return None
        trust, own, key = self.tls_trust_file, self.tls_certificate_file, self.tls_key_file
        local = self.local
        if local is not None and local.broker is not None and own is None:
            own, key = local.broker.client_files
        pinned = None if trust is not None or local is None else local.certificate
        context = client_context(trust, own, key, pinned)
        if not (self.tls_check_certificate and self.tls_check_hostname):
            context.check_hostname = False
        if not self.tls_check_certificate:
            context.verify_mode = ssl.CERT_NONE
        return context


DEFAULT_ADMIN: Final = Admin()
TopicArgument = Annotated[str, typer.Argument(help="topic://tenant/namespace/name, or just a name")]

OrdinaryTopic = Annotated[
    str, typer.Argument(help="persistent://tenant/namespace/name, or just a name")
]

NameArgument = Annotated[
    str, typer.Argument(help="topic://tenant/namespace/name, or just a name; see --namespace")
]
OfNamespace = Annotated[
    bool, typer.Option("--namespace", help="The argument is a namespace: tenant/namespace")
]


def asking(command: Callable[..., None]) -> Callable[..., None]:
    """Replace a command's parameter `admin` by the options of `Admin`."""
    return with_options(command, "admin", Admin)


def topic_path(topic: str) -> str:
    """REST path of a scalable topic given as `topic://t/n/x`, `t/n/x` or `x`."""
    path = _path_below("/admin/v2/scalable/", topic.removeprefix("topic://"))
    if path is None:
        raise typer.BadParameter(
            f"{topic!r} is not a scalable topic: write topic://tenant/namespace/name."
        )
    return path


def ordinary_path(topic: str) -> str:
    """REST path of an ordinary topic given as `persistent://t/n/x`, `t/n/x` or `x`."""
    path = _path_below("/admin/v2/persistent/", topic.removeprefix("persistent://"))
    if path is None:
        raise typer.BadParameter(
            f"{topic!r} is not an ordinary topic, and this is for those alone: write "
            "persistent://tenant/namespace/name."
        )
    return path


def _path_below(base: str, name: str) -> str | None:
    """REST path of a topic given as `t/n/x` or `x`; None if it is no such name."""
    parts = name.split("/", 2)
    if len(parts) == 1:
        parts = ["public", "default", name]
    if len(parts) != 3 or not all(parts) or "://" in name:
        return None
    return base + "/".join(quote(part, safe="") for part in parts)


def quoted_namespace(namespace: str) -> str:
    """The part of a REST path that names a namespace.  Raises typer.BadParameter."""
    parts = namespace.split("/")
    if len(parts) != 2 or not all(parts):
        raise typer.BadParameter(f"{namespace!r} is not a namespace: write tenant/namespace.")
    return quote(namespace)


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
