"""Pure: the exchange of a relaying broker with the leader of a topic, for one ordered consumer.

It has a connection of its own:

    CONNECT -> CONNECTED, SCALABLE_TOPIC_SUBSCRIBE -> its response, then assignments, as they come;
    SCALABLE_TOPIC_UNSUBSCRIBE -> SUCCESS, at any time after the subscribe; SUCCESS also of itself,
    when the consumer has closed down at its segments.

CONNECT has the relaying broker's own credentials, which AUTH_CHALLENGE asks for again.
The client's request goes to the leader, and the leader's answers to the client, unchanged.
"""

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from magnetar.protocol.pulsar_pb2 import (
    AuthData,
    BaseCommand,
    CommandAuthResponse,
    CommandConnect,
    CommandPing,
    CommandPong,
    CommandScalableTopicSubscribe,
    CommandScalableTopicSubscribeResponse,
    CommandScalableTopicUnsubscribe,
    FeatureFlags,
    MetadataError,
    ServerError,
    ServiceNotReady,
)

RELAY_CLIENT = "Magnetar relay of "
"""How `client_version` begins in the CONNECT of a relaying broker; its client's follows."""


class ExchangeState(enum.Enum):
    """The state of the exchange."""

    GREETING = "greeting"
    REGISTERING = "registering"
    SERVING = "serving"
    LEAVING = "leaving"
    """The consumer is being taken back: nothing of the leader goes to the client any more."""
    ENDED = "ended"


_AWAITED: Mapping[ExchangeState, frozenset[int]] = {
    ExchangeState.GREETING: frozenset({BaseCommand.CONNECTED, BaseCommand.ERROR}),
    ExchangeState.REGISTERING: frozenset(
        {BaseCommand.SCALABLE_TOPIC_SUBSCRIBE_RESPONSE, BaseCommand.ERROR}
    ),
    ExchangeState.SERVING: frozenset(
        {BaseCommand.SCALABLE_TOPIC_ASSIGNMENT_UPDATE, BaseCommand.SUCCESS}
    ),
    ExchangeState.LEAVING: frozenset(
        {
            BaseCommand.SCALABLE_TOPIC_SUBSCRIBE_RESPONSE,
            BaseCommand.SCALABLE_TOPIC_ASSIGNMENT_UPDATE,
            BaseCommand.SUCCESS,
            BaseCommand.ERROR,
        }
    ),
    ExchangeState.ENDED: frozenset(),
}
"""The commands that the leader may send in each state, beside those of the connection."""
_OF_THE_CONNECTION = (BaseCommand.PING, BaseCommand.PONG, BaseCommand.AUTH_CHALLENGE)


@dataclass(frozen=True, slots=True)
class Say:
    """Send a command to the leader."""

    command: BaseCommand


@dataclass(frozen=True, slots=True)
class PassOn:
    """Send a command to the client; `first` is the answer to its request."""

    command: BaseCommand
    first: bool = False


@dataclass(frozen=True, slots=True)
class Refused:
    """The leader refuses the consumer for good, with `answer` for the client."""

    answer: BaseCommand


@dataclass(frozen=True, slots=True)
class NotReady:
    """The other broker does not lead the topic, or not yet.

    It is no answer for the client, as it may be so for a moment only.
    """

    why: str


@dataclass(frozen=True, slots=True)
class Left:
    """The consumer was taken back, or has closed down."""


@dataclass(frozen=True, slots=True)
class Broken:
    """The other broker sent something unexpected, which is a defect there."""

    why: str


Effect = Say | PassOn | Refused | NotReady | Left | Broken


class RelayExchange:
    """One ordered consumer's exchange between a relaying broker and the leader of its topic."""

    def __init__(
        self,
        request: CommandScalableTopicSubscribe,
        client_version: str,
        protocol_version: int,
        features: FeatureFlags,
        prove: Callable[[], AuthData] = AuthData,
    ) -> None:
        """Take the client's request, and its version and features from its CONNECT.

        `prove` returns the relaying broker's credentials; what it raises, `begin` and `received`
        raise.
        """
        self.state = ExchangeState.GREETING
        self._heard = False
        self._asked = False
        self._request = request
        # The version says that this connection relays, so that its receiver never relays it again:
        # two brokers that take each other for the leader refuse, and nothing goes round.
        self._connect = CommandConnect(
            client_version=RELAY_CLIENT + client_version,
            protocol_version=protocol_version,
            feature_flags=features,
        )
        self._connect.feature_flags.supports_auth_refresh = True
        self._prove = prove

    def begin(self) -> Say:
        """Return the CONNECT, which is sent first."""
        proof = self._prove()
        self._connect.auth_method_name = proof.auth_method_name or "none"
        self._connect.auth_data = proof.auth_data
        return Say(BaseCommand(type=BaseCommand.CONNECT, connect=self._connect))

    def leave(self) -> Say | None:
        """Take the consumer back; None if nothing was asked of the leader for it."""
        if self.state not in (ExchangeState.REGISTERING, ExchangeState.SERVING):
            return None
        self.state = ExchangeState.LEAVING
        leaving = CommandScalableTopicUnsubscribe(
            # Any other than the subscription's own will do.
            request_id=self._request.request_id ^ 1,
            consumer_id=self._request.consumer_id,
        )
        return Say(
            BaseCommand(
                type=BaseCommand.SCALABLE_TOPIC_UNSUBSCRIBE, scalable_topic_unsubscribe=leaving
            )
        )

    def keep_alive(self) -> Say | NotReady | None:
        """Return a PING for a leader that sent nothing since the last call.

        Called at a fixed interval.  If it has not answered by the next call it is gone: NotReady.
        """
        heard, self._heard = self._heard, False
        if heard:
            self._asked = False
            return None
        if self._asked:
            return NotReady("it says nothing any more")
        self._asked = True
        return Say(BaseCommand(type=BaseCommand.PING, ping=CommandPing()))

    def end(self) -> None:
        """End the exchange: nothing is sent or taken in any more."""
        self.state = ExchangeState.ENDED

    def received(self, command: BaseCommand) -> Effect | None:
        """Return the effect of a command of the leader, if any."""
        kind, state = command.type, self.state
        self._heard = True
        if kind in _OF_THE_CONNECTION:
            return self._kept_up(kind)
        if kind not in _AWAITED[state] or not self._is_ours(command):
            return Broken(
                f"{BaseCommand.Type.Name(kind)} came while {state.value} an ordered consumer: "
                "look at the log of the broker that sent it."
            )
        if state is ExchangeState.GREETING:
            return self._greeted(command)
        if state is ExchangeState.REGISTERING:
            return self._answered(command)
        if state is ExchangeState.SERVING and kind != BaseCommand.SUCCESS:
            return PassOn(command)
        return Left() if kind in (BaseCommand.SUCCESS, BaseCommand.ERROR) else None

    def _kept_up(self, kind: int) -> Say | None:
        """Return the answer to a command that is about the connection alone."""
        if kind == BaseCommand.PING:
            return Say(BaseCommand(type=BaseCommand.PONG, pong=CommandPong()))
        if kind == BaseCommand.AUTH_CHALLENGE:
            response = CommandAuthResponse(response=self._prove())
            return Say(BaseCommand(type=BaseCommand.AUTH_RESPONSE, auth_response=response))
        return None

    def _is_ours(self, command: BaseCommand) -> bool:
        """Whether a command is for this consumer or its request, if it names one."""
        if command.type == BaseCommand.SCALABLE_TOPIC_SUBSCRIBE_RESPONSE:
            response = command.scalable_topic_subscribe_response
            return response.request_id == self._request.request_id
        if command.type == BaseCommand.SCALABLE_TOPIC_ASSIGNMENT_UPDATE:
            update = command.scalable_topic_assignment_update
            return update.consumer_id == self._request.consumer_id
        return True

    def _greeted(self, command: BaseCommand) -> Effect:
        if command.type == BaseCommand.ERROR:
            return NotReady(command.error.message)
        self.state = ExchangeState.REGISTERING
        return Say(
            BaseCommand(
                type=BaseCommand.SCALABLE_TOPIC_SUBSCRIBE, scalable_topic_subscribe=self._request
            )
        )

    def _answered(self, command: BaseCommand) -> Effect:
        if command.type == BaseCommand.ERROR:
            return self._refused(command.error.error, command.error.message, None)
        response = command.scalable_topic_subscribe_response
        if response.HasField("error"):
            return self._refused(response.error, response.message, command)
        self.state = ExchangeState.SERVING
        return PassOn(command, first=True)

    def _refused(self, code: ServerError, message: str, answer: BaseCommand | None) -> Effect:
        if code in (ServiceNotReady, MetadataError):
            return NotReady(message)
        return Refused(answer or self._error_answer(code, message))

    def _error_answer(self, code: ServerError, message: str) -> BaseCommand:
        """Return an ERROR in the form that the client expects: in the answer to its request."""
        response = CommandScalableTopicSubscribeResponse(
            request_id=self._request.request_id,
            error=code,
            message=message,
        )
        return BaseCommand(
            type=BaseCommand.SCALABLE_TOPIC_SUBSCRIBE_RESPONSE,
            scalable_topic_subscribe_response=response,
        )
