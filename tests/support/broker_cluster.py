"""Several broker processes on stores that they share: started, killed, paused, replaced one by one.

Rules: the brokers are numbered from 0 and keep their ports; every process is gone after `kill`,
paused ones too.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tests.support.broker_process import BrokerFailed, BrokerProcess
from tests.support.child_process import HOST
from tests.support.security import Security
from tests.support.stalling_relay import StallingRelay


class BrokerCluster:
    """`count` brokers in one directory.  `settings` name the stores.

    `own_settings` gives further ones of a broker by its number, which replace those of all.
    `process` is the class of the brokers' processes.
    """

    def __init__(
        self,
        directory: Path,
        settings: Mapping[str, object],
        count: int,
        security: Security | None = None,
        own_settings: Callable[[int], Mapping[str, object]] = lambda _: {},
        process: type[BrokerProcess] = BrokerProcess,
    ) -> None:
        self.metadata_store_url = str(settings["metadata_store_url"])
        self.security = security
        self.relays: Sequence[StallingRelay] = ()
        """Before the metadata store, one for each broker, if a test has made them."""
        self.brokers = [
            process(
                directory / f"broker-{number}",
                {**settings, **own_settings(number)},
                security=security,
            )
            for number in range(count)
        ]

    @property
    def url(self) -> str:
        """`pulsar://` and every broker: a client goes on to the next if one does not answer."""
        scheme = "pulsar" if self.security is None else "pulsar+ssl"
        return f"{scheme}://" + ",".join(f"{HOST}:{each.port}" for each in self.brokers)

    @property
    def admin_url(self) -> str:
        """REST of the first broker that runs."""
        running = [each for each in self.brokers if each.running] or self.brokers
        return running[0].web_url

    @property
    def java_arguments(self) -> Mapping[str, str]:
        """The arguments with which a case of the Java client connects, beside the URLs."""
        return {} if self.security is None else self.security.java_arguments

    @property
    def pid(self) -> int:
        """Of the first broker that runs."""
        return next(each.pid for each in self.brokers if each.running)

    def spawn(self) -> None:
        """Start all and return at once."""
        for each in self.brokers:
            each.spawn()

    def start(self) -> None:
        """Start all, and wait until each serves."""
        asyncio.run(self._start())

    async def _start(self) -> None:
        self.spawn()
        await asyncio.gather(*(each.until_serving() for each in self.brokers))

    def start_one(self, number: int) -> None:
        """Start one, and wait until it serves."""
        asyncio.run(self.brokers[number].start())

    def stop(self) -> None:
        """SIGTERM to all, one after the other."""
        for number in range(len(self.brokers)):
            self.stop_one(number)

    def stop_one(self, number: int) -> None:
        """SIGTERM, and wait.  Raises `BrokerFailed` if it does not end well."""
        broker = self.brokers[number]
        if not broker.running:
            return
        status = asyncio.run(broker.terminate())
        if status != 0:
            log = broker.log(this_run=True)[-4000:]
            raise BrokerFailed(f"Broker {number} ended with status {status}:\n{log}")

    def kill(self) -> None:
        """SIGKILL to all that run."""
        for each in self.brokers:
            each.kill()

    def kill_one(self, number: int) -> None:
        """SIGKILL, at once."""
        self.brokers[number].kill()

    def pause(self, number: int) -> None:
        """SIGSTOP."""
        self.brokers[number].pause()

    def resume(self, number: int) -> None:
        """SIGCONT."""
        self.brokers[number].resume()

    def faults(self) -> str:
        """The logs of those that tell of a fault of their own."""
        return "\n".join(
            f"broker {number}:\n{each.log()[-20_000:]}"
            for number, each in enumerate(self.brokers)
            if each.run and each.faults()
        )
