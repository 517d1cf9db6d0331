"""What the client's commands take and refuse, before anything is connected."""

import io
import os
import signal
import subprocess
import sys
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from magnetar.cli.common import (
    ending_well,
    finishing,
    one_line,
    properties_of,
    topic_named,
)
from magnetar.cli.connecting import Where
from magnetar.cli.main import build_app
from magnetar.cli.messages import values_of
from magnetar.credentials.kinds import BasicCredentials, OAuth2Credentials
from magnetar.errors import ConnectionLost
from magnetar.settings import ClientSettings
from magnetar.wire.authentication import authentication_of

COMMANDS = (
    ["produce"],
    ["consume"],
    ["peek"],
    ["tail"],
    ["demo"],
    ["perf", "produce"],
    ["perf", "consume"],
)

VARIABLES = {
    "tls_certificate_file": "MAGNETAR_CLIENT_CERTIFICATE_FILE",
    "tls_key_file": "MAGNETAR_CLIENT_KEY_FILE",
}
"""Variables that are not named after their options, as settings of brokers have those names."""


def running(script: str) -> "subprocess.Popen[bytes]":
    """A Python process with this script; what it prints can be read."""
    return subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=Path(__file__).parents[4],
    )


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_has_help(command: list[str]) -> None:
    done = CliRunner().invoke(build_app(), [*command, "--help"])
    assert done.exit_code == 0, done.output
    assert "Usage" in done.output


def test_version_option_prints_the_version() -> None:
    done = CliRunner().invoke(build_app(), ["--version"])
    assert (done.exit_code, done.output) == (0, f"magnetar {version('magnetar')}\n")


def test_the_demos_worker_is_not_shown() -> None:
    assert "demo-worker" not in CliRunner().invoke(build_app(), ["--help"]).output


def test_perf_ends_at_the_second_interruption_even_if_it_waits_for_something() -> None:
    script = (
        "import asyncio, typer\n"
        "from magnetar.cli.common import ending_well\n"
        "from magnetar.cli.perf import Limits, measured\n"
        "async def stuck(tally, stop):\n"
        "    for said in ('ready', 'told'):\n"
        "        print(said, flush=True)\n"
        "        await stop.wait()\n"
        "    await asyncio.sleep(1000)\n"
        "def main():\n"
        "    with ending_well():\n"
        "        measured(stuck, 'Sent', Limits(None, 1.0), False, 'nothing')\n"
        "typer.run(main)\n"
    )
    with running(script) as process:
        assert process.stdout is not None
        for said in (b"ready\n", b"told\n"):
            assert process.stdout.readline() == said
            process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (130, b"Sent no messages.\n", b"")


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_all_that_connect_have_the_same_options(command: list[str]) -> None:
    help_text = CliRunner().invoke(build_app(), [*command, "--help"], env={"COLUMNS": "1000"})
    for each in fields(Where):
        option = "--" + each.name.replace("_", "-")
        variable = f"[env var: {VARIABLES.get(each.name, f'MAGNETAR_{each.name.upper()}')}]"
        line = next((line for line in help_text.output.splitlines() if option + " " in line), "")
        assert (variable in line) is (command != ["demo"]), (option, help_text.output)


def test_options_are_what_connect_takes(tmp_path: Path) -> None:
    settings = ClientSettings(**Where().options)
    assert settings == ClientSettings()
    names = {each.name for each in fields(ClientSettings)}
    given = {each.name for each in fields(Where)}
    given |= {each.partition("_")[0] for each in given if each.startswith(("basic_", "oauth2_"))}
    assert names - given == {
        "connect_timeout_s",
        "keep_alive_s",
        "close_timeout_s",
        "description",
    }


async def test_a_token_of_a_file_is_read_whenever_it_is_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "a token"
    authentication = authentication_of(ClientSettings(**Where(token_file=file).options))
    for text in ("first", "second"):
        file.write_text(f"{text}\n")
        assert await authentication.data() == text.encode()


def test_credentials_are_those_of_the_options() -> None:
    basic = Where(basic_user="ann", basic_password="secret").options
    assert basic["basic"] == BasicCredentials("ann", "secret")
    oauth2 = Where(
        oauth2_issuer_url="http://issuer",
        oauth2_client_id="id",
        oauth2_client_secret="secret",
        oauth2_audience="urn:brokers",
        oauth2_require_https=False,
    ).options
    assert oauth2["oauth2"] == OAuth2Credentials(
        "http://issuer", "id", "secret", audience="urn:brokers", require_https=False
    )


def test_repr_of_the_options_hides_secrets() -> None:
    options = Where(token="marked"), Where(basic_user="ann", basic_password="marked")
    assert "marked" not in repr(options)


def test_variables_of_the_environment_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAGNETAR_TOKEN", "marked")
    done = CliRunner().invoke(build_app(), ["peek", "t", "--basic-user", "ann"])
    assert done.exit_code == 2
    assert "MAGNETAR_TOKEN" in done.output
    assert "marked" not in done.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["produce", "t", "-p", "nothing"], "write NAME=VALUE"),
        (["produce", "t", "-m", "x", "-f", __file__], "not both"),
        (["produce", "t", "-f", "/nowhere"], "does not exist"),
        (["produce", "a/b"], "write topic://tenant/namespace/name"),
        (["produce", "t", "-n", "0"], "greater than"),
        (["consume", "t"], "--subscription"),
        (["consume", "t", "-s", "s", "--type", "other"], "'queue'"),
        (["perf", "produce", "t", "--compression", "rar"], "'zstd'"),
        (["demo", "--orders", "1"], "greater than"),
        (["peek", "t", "--token", "a", "--token-file", "b"], "not both"),
        (["peek", "t", "--basic-user", "a"], "need a password"),
        (["peek", "t", "--basic-password", "a"], "give a name"),
        (["peek", "t", "--oauth2-audience", "a"], "incomplete"),
        (["peek", "t", "--token", "file:x"], "file:///PATH"),
    ],
)
def test_invalid_arguments_exit_with_status_2(arguments: list[str], said: str) -> None:
    done = CliRunner().invoke(build_app(), arguments)
    assert done.exit_code == 2, done.output
    assert said in done.output


@pytest.mark.parametrize("command", ["produce", "consume"])
def test_perf_has_a_topic_of_its_own_by_default(command: str) -> None:
    shown = CliRunner().invoke(build_app(), ["perf", command, "--help"], env={"COLUMNS": "200"})
    assert "[default: perf]" in shown.output


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("orders", "topic://public/default/orders"),
        ("a/b/orders", "topic://a/b/orders"),
        ("a/b/orders/x", "topic://a/b/orders/x"),
        ("persistent://a/b/c", "persistent://a/b/c"),
    ],
)
def test_a_bare_name_is_that_of_a_scalable_topic(given: str, name: str) -> None:
    assert topic_named(given) == name


def test_properties_are_split_at_the_first_sign() -> None:
    assert properties_of(["a=b=c", "d="]) == {"a": "b=c", "d": ""}


def test_messages_are_repeated_as_a_whole() -> None:
    assert list(values_of(["a", "ü"], None, 2)) == [b"a", "ü".encode(), b"a", "ü".encode()]


def test_lines_of_a_file_are_messages_without_their_ends(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"one\r\n\ntwo \xff\nthree")
    assert list(values_of([], path, 1)) == [b"one", b"", b"two \xff", b"three"]
    assert len(list(values_of([], path, 3))) == 12


@pytest.mark.parametrize("times", [1, 2])
def test_lines_of_standard_input_are_messages(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"one\ntwo\n")))
    assert list(values_of([], None, times)) == [b"one", b"two"] * times


@pytest.mark.parametrize(
    ("raised", "status"), [(KeyboardInterrupt(), 7), (ConnectionLost("Gone;\n look."), 1)]
)
def test_a_command_ends_with_the_status_that_says_why(
    raised: BaseException, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit) as ended, ending_well(interrupted=7):
        raise raised
    assert ended.value.exit_code == status
    said = capsys.readouterr().err
    assert said == ("magnetar: Gone; look.\n" if status == 1 else "")


def test_error_is_printed_on_one_line_without_control_characters() -> None:
    assert one_line(ConnectionLost("Gone;\n \x1b[2Jlook.")) == r"Gone; \x1b[2Jlook."
    assert one_line(ConnectionLost("")) == "ConnectionLost"


def interrupted_while_finishing(times: int) -> list[int]:
    done: list[int] = []
    try:
        with finishing():
            for number in range(times):
                os.kill(os.getpid(), signal.SIGINT)
                done.append(number)
    except KeyboardInterrupt:
        done.append(-1)
    return done


def test_interrupted_command_finishes_the_send_in_progress() -> None:
    assert interrupted_while_finishing(1) == [0, -1]


def test_a_second_interruption_does_not_wait() -> None:
    assert interrupted_while_finishing(2) == [0, -1]
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


def test_a_reader_that_goes_away_ends_it_without_a_word() -> None:
    script = (
        "import typer\n"
        "from magnetar.cli.common import ending_well\n"
        "def main():\n"
        "    with ending_well():\n"
        "        while True: print('x' * 1000)\n"
        "typer.run(main)\n"
    )
    with running(script) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(30) == 0
        assert process.stderr.read() == b""


@pytest.mark.parametrize(
    "command",
    [["produce", "t", "-m", "x"], ["consume", "t", "-s", "s"], ["peek", "t"], ["tail", "t"]],
    ids=lambda command: command[0],
)
def test_no_broker_is_one_sentence(command: list[str]) -> None:
    done = CliRunner().invoke(build_app(), [*command, "--url", "pulsar://127.0.0.1:1"])
    assert done.exit_code == 1
    assert done.output.startswith("magnetar: No connection to pulsar://127.0.0.1:1 could be made")
    assert len(done.output.splitlines()) == 1


@pytest.mark.parametrize(
    ("command", "loaded"), [("standalone", False), ("topics", False), ("peek", True), (None, True)]
)
def test_a_broker_starts_without_loading_the_client(command: str | None, loaded: bool) -> None:
    script = (
        "import sys; from magnetar.cli.main import build_app; "
        f"build_app({command!r}); print('magnetar.cli.commands' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=Path(__file__).parents[4],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert done.stdout == f"{loaded}\n", done.stderr
