"""One broker of Apache Pulsar on a ZooKeeper server and bookies that run already.

Rules: cluster metadata is set up once, before the first start; ledgers are as Magnetar's in the
same run: 3 bookies, 2 copies, 2 acknowledgements.
"""

import subprocess
from pathlib import Path
from typing import Final

from tests.java.peer_process import CONFIGURATION, PeerProcess
from tests.support.child_process import free_port

SETUP_TIMEOUT_S: Final = 120
CLUSTER: Final = "standalone"
EMBEDDED: Final = ("managedLedgerDefault", "ledgerStorageClass", "dbStorage")
"""How lines of the recipe begin that are about the bookie inside a standalone broker."""


class PeerBroker(PeerProcess):
    """The peer without stores of its own."""

    def __init__(
        self, directory: Path, metadata_store: str, bookies: str, *, heap: str = "1g"
    ) -> None:
        """As its configuration names them: `zk:HOST:PORT/CHROOT`, and a service URI."""
        super().__init__(free_port(), free_port(), heap=heap)
        self._run_dir = directory
        self._metadata_store = metadata_store
        self._bookies = bookies
        self._set_up = False

    def spawn(self) -> None:
        """Start the process and return at once; the first time after setting the cluster up."""
        if not self._set_up:
            self._set_cluster_up()
        super().spawn()

    def command(self) -> list[str]:
        return self.java("org.apache.pulsar.PulsarBrokerStarter", "-c", CONFIGURATION)

    def configuration(self) -> str:
        kept = [
            line for line in super().configuration().splitlines() if not line.startswith(EMBEDDED)
        ]
        return "\n".join(
            [
                *kept,
                f"metadataStoreUrl={self._metadata_store}",
                f"configurationMetadataStoreUrl={self._metadata_store}",
                f"bookkeeperMetadataServiceUri={self._bookies}",
                "managedLedgerDefaultEnsembleSize=3",
                "managedLedgerDefaultWriteQuorum=2",
                "managedLedgerDefaultAckQuorum=2",
                "",
            ]
        )

    def _set_cluster_up(self) -> None:
        store = self._metadata_store
        arguments = [
            *("--cluster", CLUSTER, "--metadata-store", store),
            *("--configuration-metadata-store", store),
            *("--web-service-url", self.admin_url, "--broker-service-url", self.url),
            *("--existing-bk-metadata-service-uri", self._bookies),
        ]
        self._run_dir.mkdir(parents=True, exist_ok=True)
        with (self._run_dir / "setup.log").open("wb") as log:
            subprocess.run(
                self.java("org.apache.pulsar.PulsarClusterMetadataSetup", *arguments),
                cwd=self._run_dir,
                check=True,
                timeout=SETUP_TIMEOUT_S,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self._set_up = True
