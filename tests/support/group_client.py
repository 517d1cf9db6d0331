"""The commands of a client that begins attempts and commits groups, on one bare connection."""

from collections.abc import Mapping, Sequence

from magnetar.protocol import pulsar_pb2 as pb
from tests.support.key_client import KeyClient, Kind, Txn


class GroupClient(KeyClient):
    """One that has opened a key, or attached to it."""

    async def begin_attempt(
        self,
        nonce: str,
        batch: tuple[str, int] | None = None,
        timeout_ms: int = 60_000,
        epoch: int | None = None,
    ) -> pb.CommandBeginAttemptResponse:
        """BEGIN_ATTEMPT, as it is answered."""
        command = pb.CommandBeginAttempt(
            tc_id=self.coordinator,
            key=self.key,
            epoch=self.epoch if epoch is None else epoch,
            nonce=nonce,
            timeout_ms=timeout_ms,
        )
        if batch is not None:
            command.query, command.batch = batch
        answer = await self.raw.request(Kind.BEGIN_ATTEMPT, command)
        return answer.begin_attempt_response

    async def attempt(self, nonce: str) -> Txn:
        """Most and least bits of a new attempt."""
        begun = await self.begin_attempt(nonce)
        return begun.txnid_most_bits, begun.txnid_least_bits

    async def commit(
        self,
        nonce: str,
        group: int | None,
        winners: Mapping[int, Mapping[str, tuple[int, int]]] | Sequence[int] = (),
        batch: tuple[str, int] = ("q", 0),
        positions: str | None = None,
    ) -> pb.CommandCommitGroupResponse:
        """COMMIT_GROUP; winners by least bits, with (messages, hash sum) by segment."""
        counted = winners if isinstance(winners, Mapping) else {each: {} for each in winners}
        command = pb.CommandCommitGroup(
            tc_id=self.coordinator,
            key=self.key,
            epoch=self.epoch,
            nonce=nonce,
            group_least_bits=group,
            query=batch[0],
            batch=batch[1],
            positions=positions,
            winners=[
                pb.GroupWinner(
                    attempt_least_bits=attempt,
                    counts=[
                        pb.SegmentCount(segment=name, messages=messages, hash_sum=hash_sum)
                        for name, (messages, hash_sum) in counts.items()
                    ],
                )
                for attempt, counts in counted.items()
            ],
        )
        answer = await self.raw.request(Kind.COMMIT_GROUP, command)
        return answer.commit_group_response

    async def abort(self, epoch: int | None = None) -> bool:
        """ABORT_GROUP."""
        answer = await self.raw.request(
            Kind.ABORT_GROUP,
            pb.CommandAbortGroup(
                tc_id=self.coordinator,
                key=self.key,
                epoch=self.epoch if epoch is None else epoch,
            ),
        )
        return answer.abort_group_response.aborted

    async def extend(self, group: int, timeout_ms: int) -> int:
        """EXTEND_GROUP: the deadline."""
        answer = await self.raw.request(
            Kind.EXTEND_GROUP,
            pb.CommandExtendGroup(
                tc_id=self.coordinator,
                key=self.key,
                epoch=self.epoch,
                group_least_bits=group,
                timeout_ms=timeout_ms,
            ),
        )
        return answer.extend_group_response.deadline_ms
