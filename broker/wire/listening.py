"""Bound sockets of the broker's ports, and the sentence for a port that cannot be used."""

import enum
import errno
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from config.settings import Settings
from magnetar.protocol.server_error import OperatorError

_PRIVILEGED_PORTS: Final = 1024


class PortSetting(enum.Enum):
    """A setting that has a port.  The value is the use of that port, for errors."""

    PORT = "clients"
    HTTP_PORT = "REST and metrics"
    PORT_TLS = "clients over TLS"
    HTTP_PORT_TLS = "REST and metrics over TLS"

    @property
    def setting(self) -> str:
        """The name in the environment and in files."""
        return self.name.lower()

    @property
    def option(self) -> str:
        """The name on the command line."""
        return f"--{self.setting.replace('_', '-')}"


class CannotListen(OperatorError):
    """The broker cannot listen on one of its ports.

    `setting` has the port; None if `bind_host` is wrong, which concerns all.
    """

    def __init__(self, message: str, setting: PortSetting | None) -> None:
        super().__init__(message)
        self.setting: Final = setting


@contextmanager
def explaining_listen_errors(host: str, port: int, setting: PortSetting) -> Iterator[None]:
    """Turn an OSError of the block, which binds this address or listens, into `CannotListen`."""
    try:
        yield
    except OSError as error:
        raise _cannot_listen(error, host, port, setting) from error


def bind_port(host: str, port: int, setting: PortSetting) -> socket.socket:
    """Make a bound socket that does not listen yet.  Raises `CannotListen`."""
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with explaining_listen_errors(host, port, setting):
            bound.bind((host, port))
    except BaseException:
        bound.close()
        raise
    return bound


def ports_of(settings: Settings) -> dict[PortSetting, int]:
    """The ports that the settings ask for."""
    wanted: dict[PortSetting, int | None] = {
        PortSetting.PORT: settings.port if settings.plaintext_ports else None,
        PortSetting.HTTP_PORT: settings.http_port if settings.plaintext_ports else None,
        PortSetting.PORT_TLS: settings.port_tls,
        PortSetting.HTTP_PORT_TLS: settings.http_port_tls,
    }
    return {setting: port for setting, port in wanted.items() if port is not None}


def http_ports(settings: Settings) -> dict[PortSetting, int]:
    """The REST ports among them."""
    ports = ports_of(settings)
    rest = (PortSetting.HTTP_PORT, PortSetting.HTTP_PORT_TLS)
    return {setting: ports[setting] for setting in rest if setting in ports}


def _cannot_listen(error: OSError, host: str, port: int, setting: PortSetting) -> CannotListen:
    where = f"Port {port} for {setting.value}"
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        return CannotListen(
            f"The host {host} is no address of this machine: set bind_host (--bind-host) to one of "
            "its addresses, or to 0.0.0.0 for all of them.",
            None,
        )
    other = f"choose another one by {setting.option} or the setting {setting.setting}."
    if error.errno == errno.EADDRINUSE:
        return CannotListen(f"{where} is in use: stop the process that has it, or {other}", setting)
    if error.errno in (errno.EACCES, errno.EPERM) and port < _PRIVILEGED_PORTS:
        return CannotListen(f"{where} is for privileged users alone: {other}", setting)
    reason = os.strerror(error.errno) if error.errno else str(error)
    return CannotListen(f"{where} on {host} cannot be listened on ({reason}): {other}", setting)
