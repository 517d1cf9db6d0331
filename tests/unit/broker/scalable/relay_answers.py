"""What a leader says to a broker that relays."""

from magnetar.protocol import pulsar_pb2 as pb

CONNECTED = pb.BaseCommand(
    type=pb.BaseCommand.CONNECTED,
    connected=pb.CommandConnected(server_version="v", protocol_version=21),
)


def response(request_id: int = 7, **members: object) -> pb.BaseCommand:
    """SCALABLE_TOPIC_SUBSCRIBE_RESPONSE."""
    answer = pb.CommandScalableTopicSubscribeResponse(request_id=request_id, **members)  # type: ignore[arg-type]
    return pb.BaseCommand(
        type=pb.BaseCommand.SCALABLE_TOPIC_SUBSCRIBE_RESPONSE,
        scalable_topic_subscribe_response=answer,
    )
