"""The connection options of the client's sub-commands: settings of `magnetar.connect`.

They have the names of those settings.  Each may come from the environment.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Final

import typer

from magnetar.cli.option_group import with_options
from magnetar.cli.security_options import SecurityOptions, environment_option
from magnetar.settings import ClientOptions

DEFAULT_URL: Final = "pulsar://127.0.0.1:6650"


def _option(name: str, said: str) -> typer.models.OptionInfo:
    return environment_option(name, said, "Connection")


@dataclass(frozen=True, slots=True)
class Where(SecurityOptions):
    """The connection options of one command line, its credentials and TLS.

    Raises typer.BadParameter.
    """

    url: Annotated[str, _option("--url", "pulsar:// or pulsar+ssl:// of any broker")] = DEFAULT_URL
    listener_name: Annotated[
        str | None, _option("--listener-name", "Listener whose addresses brokers return")
    ] = None
    operation_timeout_s: Annotated[
        float, _option("--operation-timeout-s", "How long a request may take")
    ] = 30.0

    @property
    def options(self) -> ClientOptions:
        """The keyword arguments for `magnetar.connect`."""
        return ClientOptions(
            token=self.token_text,
            basic=self.basic,
            oauth2=self.oauth2,
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
    return with_options(command, "where", Where)
