"""An S3 server on the loopback interface, for the tests that need one."""

import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from moto.server import ThreadedMotoServer

from storage.offload.context import Location, parse_location

REGION = "us-east-1"


@dataclass
class S3Server:
    """Where it is, and how many buckets it was asked for."""

    endpoint: str
    buckets: list[str] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs to use it."""
        return {
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_REGION": REGION,
        }

    def new_bucket(self) -> str:
        """An empty one."""
        name = f"bucket-{len(self.buckets)}"
        self.buckets.append(name)
        request = urllib.request.Request(f"{self.endpoint}/{name}", method="PUT")
        with urllib.request.urlopen(request, timeout=10):
            return name

    def new_location(self, prefix: str = "") -> Location:
        """An empty place in a bucket of its own."""
        url = f"s3://{self.new_bucket()}/{prefix}"
        return parse_location(url, region=REGION, endpoint=self.endpoint)


@contextmanager
def s3_server() -> Iterator[S3Server]:
    """A server of this process, as long as the context lasts."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        yield S3Server(f"http://{host}:{port}")
    finally:
        server.stop()
