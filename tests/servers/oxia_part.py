"""A real Oxia server: one process, on 127.0.0.1, with as many shards as asked for.

Rules: Go builds it into `build/parts` once, from the version that `oxia/go.mod` names, and again
only when that changed; it serves when it has a leader for every shard.  Version 0.14.0 does not
survive two writers on one shard at once, and the start and the end of a session count as writers:
one writing process with one stream for each shard, and bookies that start one by one.
"""

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import grpc

from storage.metadata.oxia import oxia_pb2 as pb
from tests.servers.java_parts import BUILD, HERE
from tests.support.child_process import (
    HOST,
    ChildFailed,
    ChildProcess,
    free_port,
    port_is_open,
)
from tests.support.tools import built_once, digest_of, run_build

MODULE: Final = HERE / "oxia"
BINARY: Final = BUILD / "oxia"
SHARDS: Final = 4
LIVES: Final = 5
ASKED_TOO_EARLY: Final = "publicRpcServer).GetShardAssignments"
"""In its last words when it was asked for its shards after its port was open and before it knew
them: 0.14.0 does not survive that."""

NAMESPACE: Final = "default"
ANSWER_TIMEOUT_S: Final = 5
SERVICE: Final = "/io.streamnative.oxia.proto.OxiaClient"


def build_oxia() -> Path:
    """The server's binary, which is built if need be."""
    sources = [MODULE / "go.mod", MODULE / "go.sum"]
    built_once(BUILD / "oxia.sha256", digest_of(sources, MODULE), _build)
    return BINARY


def _build() -> None:
    BUILD.mkdir(parents=True, exist_ok=True)
    package = "github.com/oxia-db/oxia/cmd"
    command = ["go", "build", "-trimpath", "-buildvcs=false", "-o", str(BINARY), package]
    run_build("the Oxia server", command, MODULE)


class OxiaServer(ChildProcess):
    """`address` is `host:port`; the only namespace is `default`."""

    def __init__(self, directory: Path, *, shards: int = SHARDS) -> None:
        super().__init__("oxia", directory)
        self.shards = shards
        self.port = free_port()
        self._metrics_port = free_port()

    @property
    def address(self) -> str:
        """`host:port`."""
        return f"{HOST}:{self.port}"

    def command(self) -> list[str]:
        return [
            *(str(build_oxia()), "standalone"),
            *("--shards", str(self.shards)),
            *("--public-addr", self.address),
            *("--metrics-addr", f"{HOST}:{self._metrics_port}"),
            *("--data-dir", str(self.directory / "db"), "--wal-dir", str(self.directory / "wal")),
            *("--db-cache-size-mb", "16"),
        ]

    async def start(self) -> None:
        """Start the process and wait until it serves.

        Clients that ask again and again while it is down may meet it in the instant in which it
        dies of a question, so it has a few lives.
        """
        for life in range(1, LIVES + 1):
            try:
                return await super().start()
            except ChildFailed:
                if life == LIVES or ASKED_TOO_EARLY not in self.log(this_run=True):
                    raise

    async def is_serving(self) -> bool:
        # Its metrics come last, so it knows its shards by then and can be asked.
        return port_is_open(self._metrics_port) and await asyncio.to_thread(self.has_leaders)

    def has_leaders(self) -> bool:
        """Whether it answers and names a leader for every shard; waits for the answer."""
        # Standalone names the address that was dialled as the leader of each shard.
        with grpc.insecure_channel(self.address) as channel:
            call = channel.unary_stream(
                f"{SERVICE}/GetShardAssignments",
                pb.ShardAssignmentsRequest.SerializeToString,
                pb.ShardAssignments.FromString,
            )
            request = pb.ShardAssignmentsRequest(namespace=NAMESPACE)
            answers: Iterator[pb.ShardAssignments] = call(request, timeout=ANSWER_TIMEOUT_S)
            try:
                shards = next(answers).namespaces[NAMESPACE].assignments
            except (grpc.RpcError, StopIteration):
                return False
            return [each.leader for each in shards] == [self.address] * self.shards

    async def owners(self, *keys: str) -> set[str]:
        """Sessions that hold one of these records, which have no partition key."""
        return await asyncio.to_thread(self._owners, keys)

    def _owners(self, keys: Sequence[str]) -> set[str]:
        # Every shard is asked: the routing of keys is for the client under test to know.
        found: set[str] = set()
        with grpc.insecure_channel(self.address) as channel:
            call = channel.unary_stream(
                f"{SERVICE}/Read", pb.ReadRequest.SerializeToString, pb.ReadResponse.FromString
            )
            for shard in range(self.shards):
                request = pb.ReadRequest(shard=shard, gets=[pb.GetRequest(key=k) for k in keys])
                for answer in call(request, timeout=ANSWER_TIMEOUT_S):
                    found |= {
                        f"{shard}/{each.version.session_id}"
                        for each in answer.gets
                        if each.status == pb.OK and each.version.HasField("session_id")
                    }
        return found
