"""A real ZooKeeper server: one process, on 127.0.0.1, with ticks of half a second.

Rules: it serves when it says so (`srvr` names its mode); sessions last 1 to 10 s, since the server
clamps them to 2 to 20 ticks; ports and data stay the same over restarts.  With `Security` there is
a second port, with TLS, to which clients show a certificate.
"""

import asyncio
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Final

from kazoo.client import KazooClient

from tests.servers.java_parts import java_command
from tests.support.child_process import HOST, ChildProcess, free_port
from tests.support.security import Security

TICK_MS: Final = 500
HEAP_MB: Final = 512
"""Ten thousand records of one transaction, written and removed, are much for 96 MB."""
ANSWER_TIMEOUT_S: Final = 5
CLIENT_TIMEOUT_S: Final = 15


class ZooKeeperServer(ChildProcess):
    """`address` is `host:port`; `tick_ms` rules how long sessions can and must last."""

    def __init__(
        self, directory: Path, *, tick_ms: int = TICK_MS, security: Security | None = None
    ) -> None:
        super().__init__("zookeeper", directory)
        self.port = free_port()
        self.port_tls = free_port() if security else 0
        self.tick_ms = tick_ms
        self._security = security

    @property
    def address(self) -> str:
        """`host:port`."""
        return f"{HOST}:{self.port}"

    @property
    def address_tls(self) -> str:
        """`host:port` of the port with TLS."""
        return f"{HOST}:{self.port_tls}"

    def command(self) -> list[str]:
        config = self.directory / "zoo.cfg"
        config.write_text(
            f"dataDir={self.directory / 'data'}\n"
            f"clientPort={self.port}\n"
            f"clientPortAddress={HOST}\n"
            f"tickTime={self.tick_ms}\n"
            "maxClientCnxns=0\n"
            "admin.enableServer=false\n"
            "4lw.commands.whitelist=ruok,srvr,mntr,dump\n"
            "metricsProvider.className=org.apache.zookeeper.metrics.impl.NullMetricsProvider\n"
            + self._tls_lines(),
            "utf-8",
        )
        return java_command(
            "org.apache.zookeeper.server.ZooKeeperServerMain", str(config), heap_mb=HEAP_MB
        )

    def _tls_lines(self) -> str:
        if self._security is None:
            return ""
        authority = self._security.authority
        own = authority.issue("zookeeper")
        both = self.directory / "zookeeper.pem"
        both.write_bytes(own.key.read_bytes() + own.chain.read_bytes())
        return (
            f"secureClientPort={self.port_tls}\n"
            f"secureClientPortAddress={HOST}\n"
            "serverCnxnFactory=org.apache.zookeeper.server.NettyServerCnxnFactory\n"
            f"ssl.keyStore.location={both}\n"
            "ssl.keyStore.type=PEM\n"
            f"ssl.trustStore.location={authority.chain}\n"
            "ssl.trustStore.type=PEM\n"
            "ssl.clientHostnameVerification=false\n"
        )

    async def is_serving(self) -> bool:
        return "Mode:" in await self.ask("srvr")

    async def ask(self, word: str) -> str:
        """The answer to one of ZooKeeper's four-letter words; nothing if it does not answer."""
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                reader, writer = await asyncio.open_connection(HOST, self.port)
                try:
                    writer.write(word.encode())
                    return (await reader.read()).decode()
                finally:
                    writer.close()
                    with suppress(OSError):
                        await writer.wait_closed()
        except OSError:  # a timeout is one too
            return ""

    async def owners(self, *paths: str) -> set[str]:
        """Sessions that hold one of these ephemeral nodes."""
        session, found = "", set()
        for line in (await self.ask("dump")).splitlines():
            if line.startswith("0x"):
                session = line.rstrip(":")
            elif line.strip() in paths:
                found.add(session)
        return found

    def fresh_chroot(self) -> str:
        """Makes an empty node that nobody uses; returns its path."""
        path = f"/t{uuid.uuid4().hex[:12]}"
        client = KazooClient(self.address)
        client.start(timeout=CLIENT_TIMEOUT_S)
        try:
            client.create(path)
        finally:
            client.stop()
            client.close()
        return path
