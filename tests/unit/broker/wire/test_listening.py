"""The error of a port that the broker cannot listen on."""

import errno
import socket
from collections.abc import Iterator
from typing import Final

import pytest

from broker.wire.listening import (
    CannotListen,
    PortSetting,
    bind_port,
    explaining_listen_errors,
)

HOST: Final = "127.0.0.1"


@pytest.fixture
def port_in_use() -> Iterator[int]:
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        yield taken.getsockname()[1]


@pytest.mark.parametrize(
    ("setting", "use", "option"),
    [
        (PortSetting.PORT, "clients", "by --port or the setting port"),
        (PortSetting.HTTP_PORT, "REST and metrics", "by --http-port or the setting http_port"),
    ],
)
def test_error_names_the_port_in_use_and_its_setting(
    port_in_use: int, setting: PortSetting, use: str, option: str
) -> None:
    with pytest.raises(CannotListen) as raised:
        bind_port(HOST, port_in_use, setting)
    assert str(raised.value) == (
        f"Port {port_in_use} for {use} is in use: stop the process that has it, or choose another "
        f"one {option}."
    )
    assert raised.value.setting is setting


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_host_of_another_machine_is_blamed_on_bind_host(host: str) -> None:
    with pytest.raises(
        CannotListen, match=rf"{host} is no .*: set bind_host .*0\.0\.0\.0"
    ) as raised:
        bind_port(host, 0, PortSetting.PORT)
    assert raised.value.setting is None


@pytest.mark.parametrize(
    ("code", "port", "message"),
    [
        (errno.EACCES, 80, "Port 80 for clients is for privileged users alone: choose another"),
        (errno.EACCES, 8080, r"Port 8080 for clients on .* \(Permission denied\): choose another"),
        (errno.EINVAL, 80, r"\(Invalid argument\)"),
    ],
)
def test_error_has_the_reason_of_the_system(code: int, port: int, message: str) -> None:
    with (
        pytest.raises(CannotListen, match=message),
        explaining_listen_errors(HOST, port, PortSetting.PORT),
    ):
        raise OSError(code, "any")
