"""Options and helpers of commands that send REST requests to a broker."""

import inspect
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import wraps
from pathlib import Path
from typing import Annotated, Final
from urllib.parse import quote

import typer

from broker.cli.rest_client import RestFailure, call, client_context

_PANEL: Final = "Connection"


def _option(name: str, variable: str, description: str) -> typer.models.OptionInfo:
    option: typer.models.OptionInfo = typer.Option(
        name, envvar=f"MAGNETAR_{variable}", help=description, rich_help_panel=_PANEL
    )
    return option


@dataclass(frozen=True, slots=True)
class Admin:
    """The REST interface that a command asks: its connection options.

    Those of TLS have the names that commands of the client have.
    """

    admin_url: Annotated[str, _option("--admin-url", "ADMIN_URL", "REST address of a broker")] = (
        "http://127.0.0.1:8080"
    )
    tls_trust_file: Annotated[
        Path | None,
        _option(
            "--tls-trust-file",
            "TLS_TRUST_FILE",
            "PEM of the authorities to trust for brokers",
        ),
    ] = None
    tls_certificate_file: Annotated[
        Path | None,
        _option("--tls-certificate-file", "TLS_CERTIFICATE_FILE", "PEM of our certificate"),
    ] = None
    tls_key_file: Annotated[
        Path | None, _option("--tls-key-file", "TLS_KEY_FILE", "PEM of its key")
    ] = None
    tls_check_certificate: Annotated[
        bool,
        _option(
            "--tls-check-certificate/--no-tls-check-certificate",
            "TLS_CHECK_CERTIFICATE",
            "Without: any broker is trusted, for tests",
        ),
    ] = True
    tls_check_hostname: Annotated[
        bool,
        _option(
            "--tls-check-hostname/--no-tls-check-hostname",
            "TLS_CHECK_HOSTNAME",
            "Without: any name in the certificate is accepted, for tests",
        ),
    ] = True

    def tls_context(self) -> ssl.SSLContext | None:
        """The TLS context of requests; None for an address without TLS.  Raises `RestFailure`."""
        if not self.admin_url.startswith("https://"):
            return None
        context = client_context(self.tls_trust_file, self.tls_certificate_file, self.tls_key_file)
        if not (self.tls_check_certificate and self.tls_check_hostname):
            context.check_hostname = False
        if not self.tls_check_certificate:
            context.verify_mode = ssl.CERT_NONE
        return context


DEFAULT_ADMIN: Final = Admin()


def asking(command: Callable[..., None]) -> Callable[..., None]:
    """Replace a command's parameter `admin` by the connection options."""
    names = [each.name for each in fields(Admin)]

    @wraps(command)
    def with_options(**given: object) -> None:
        admin = Admin(**{name: given.pop(name) for name in names})  # type: ignore[arg-type]
        command(admin=admin, **given)

    own = [each for each in inspect.signature(command).parameters.values() if each.name != "admin"]
    added = inspect.signature(Admin).parameters.values()
    parameters = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in (*own, *added)]
    with_options.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    with_options.__annotations__ = {each.name: each.annotation for each in parameters}
    return with_options


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
        return call(admin.admin_url, method, path, body, tls=admin.tls_context())
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
