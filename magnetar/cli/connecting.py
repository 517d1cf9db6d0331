"""The connection options of the client's sub-commands: settings of `magnetar.connect`.

They have the names of those settings.  Each may come from the environment.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import wraps
from pathlib import Path
from typing import Annotated, Final

import typer

from magnetar.settings import ClientOptions

DEFAULT_URL: Final = "pulsar://127.0.0.1:6650"
_PANEL: Final = "Connection"


def _option(name: str, variable: str, said: str) -> typer.models.OptionInfo:
    option: typer.models.OptionInfo = typer.Option(
        name, envvar=f"MAGNETAR_{variable}", show_envvar=True, help=said, rich_help_panel=_PANEL
    )
    return option


@dataclass(frozen=True, slots=True)
class Where:
    """The connection options of one command line.

    Raises typer.BadParameter if both a token and a file with one are given.
    """

    url: Annotated[str, _option("--url", "URL", "pulsar:// or pulsar+ssl:// of any broker")] = (
        DEFAULT_URL
    )
    token: Annotated[
        str | None,
        _option("--token", "TOKEN", "Authentication token; others may see it in the command line"),
    ] = None
    token_file: Annotated[
        Path | None, _option("--token-file", "TOKEN_FILE", "File with the token")
    ] = None
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
    listener_name: Annotated[
        str | None,
        _option("--listener-name", "LISTENER_NAME", "Listener whose addresses brokers return"),
    ] = None
    operation_timeout_s: Annotated[
        float,
        _option("--operation-timeout-s", "OPERATION_TIMEOUT_S", "How long a request may take"),
    ] = 30.0

    def __post_init__(self) -> None:
        if self.token is not None and self.token_file is not None:
            raise typer.BadParameter(
                "give a token or a file with one, not both (MAGNETAR_TOKEN and "
                "MAGNETAR_TOKEN_FILE count too)."
            )

    @property
    def options(self) -> ClientOptions:
        """The keyword arguments for `magnetar.connect`."""
        file = self.token_file
        return ClientOptions(
            # The file is read whenever a broker asks for a token: one that expires can be replaced.
            token=self.token if file is None else lambda: file.read_text("utf-8").strip(),
            tls_trust_file=self.tls_trust_file,
            tls_certificate_file=self.tls_certificate_file,
            tls_key_file=self.tls_key_file,
            tls_check_certificate=self.tls_check_certificate,
            tls_check_hostname=self.tls_check_hostname,
            listener_name=self.listener_name,
            operation_timeout_s=self.operation_timeout_s,
        )


def connecting(command: Callable[..., None]) -> Callable[..., None]:
    """Replace a command's parameter `where` by the connection options."""
    names = [each.name for each in fields(Where)]

    @wraps(command)
    def with_options(**given: object) -> None:
        where = Where(**{name: given.pop(name) for name in names})  # type: ignore[arg-type]
        command(where=where, **given)

    own = [each for each in inspect.signature(command).parameters.values() if each.name != "where"]
    added = inspect.signature(Where).parameters.values()
    parameters = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in (*own, *added)]
    with_options.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    with_options.__annotations__ = {each.name: each.annotation for each in parameters}
    return with_options
