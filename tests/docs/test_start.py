"""A broker that is alone starts without what is only for clusters, for offloading, for
authentication or for the commands that ask a broker: imports are most of its start.

A process of its own starts one, as `magnetar standalone` does, and tells what it has loaded: when
clients are served, and when the REST interface, which is imported after that, is there too.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

TIMEOUT_S: Final = 60
OF_CLUSTERS: Final = (
    "broker.admin.channel",
    "broker.app.cluster_membership",
    "broker.placement.channel",
    "broker.placement.channel_client",
    "broker.placement.channel_server",
    "broker.placement.several",
    "broker.scalable.feed_follower",
    "broker.app.shared_stores",
    "grpc",
    "kazoo",
    "storage.ledger.bookkeeper",
    "storage.metadata.oxia",
    "storage.metadata.zookeeper",
    "xxhash",
)
OF_OFFLOADING: Final = (
    "obstore",
    "storage.offload.format",
    "storage.offload.objects",
    "storage.offload.reading",
    "storage.offload.writing",
)
OF_SECURITY: Final = (
    "bcrypt",
    "broker.app.security",
    "broker.wire.login",
    "broker.wire.tls_server",
    "cryptography",
    "jwt",
    "security.authentication",
    "security.own_credentials",
    "security.tls",
    "security.token_keys",
    "security.token_provider",
    "security.tokens",
)
WITH_REST: Final = (
    "broker.policies.authorizer",
    "broker.wire.handlers.access",
    "security.authenticator",
    "security.failed_logins",
    "security.providers",
)
"""Modules of security that the REST interface loads too."""
OF_NATIVE_SCHEMAS: Final = ("broker.policies.native_schemas", "google.protobuf.descriptor_pb2")
OF_REST: Final = (*WITH_REST, "aiohttp", "broker.admin.app")
OF_OPERATORS: Final = (
    "broker.cli.operator_commands",
    "broker.cli.rest_commands",
    "broker.cli.tokens",
    "magnetar.cli.security_options",
    "rich",
)
OF_SPARK: Final = ("magnetar.client", "magnetar.spark", "pandas", "pyarrow", "pyspark")

SCRIPT: Final = """
import asyncio, importlib, json, random, sys
from broker.cli.commands import quick_imports
with quick_imports():
    from broker.cli import serving
from broker.app.service import Broker
from config.settings import load_settings
from storage.clock import SystemClock

async def main():
    settings = load_settings(
        None, {"data_dir": sys.argv[1], "bind_host": "127.0.0.1", "port": 0, "http_port": 0}
    )
    broker = Broker(settings, clock=SystemClock(), rng=random.Random(1))
    try:
        await broker.start()
        served = sorted(sys.modules)
        importlib.import_module(serving.ADMIN_MODULE)
        print(json.dumps([served, sorted(sys.modules)]))
    finally:
        await broker.stop()

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> tuple[set[str], set[str]]:
    """Modules when clients are served, and when REST is loaded."""
    directory = tmp_path_factory.mktemp("start") / "data"
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(directory)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    served, with_rest = json.loads(done.stdout)
    return set(served), set(with_rest)


@pytest.mark.parametrize(
    "module",
    [*OF_CLUSTERS, *OF_OFFLOADING, *OF_OPERATORS, *OF_SECURITY, *OF_NATIVE_SCHEMAS, *OF_REST],
)
def test_clients_are_served_without(loaded: tuple[set[str], set[str]], module: str) -> None:
    assert module not in loaded[0]


@pytest.mark.parametrize(
    "module", [*OF_CLUSTERS, *OF_OPERATORS, *OF_SECURITY, *OF_NATIVE_SCHEMAS, *OF_SPARK]
)
def test_the_rest_interface_loads_no(loaded: tuple[set[str], set[str]], module: str) -> None:
    assert module not in loaded[1]


def test_a_module_that_is_loaded_is_seen(loaded: tuple[set[str], set[str]]) -> None:
    """And every name above is one that could be."""
    served, with_rest = loaded
    assert {"broker.app.service", "storage.metadata.sqlite"} <= served
    assert set(OF_REST) <= with_rest
    root = Path(__file__).resolve().parents[2]
    for module in (*OF_CLUSTERS, *OF_OFFLOADING, *OF_OPERATORS, *OF_SECURITY, *OF_REST):
        path = root / module.replace(".", "/")
        if path.parent != root:
            assert path.with_suffix(".py").is_file() or path.is_dir(), f"{module} is gone"
