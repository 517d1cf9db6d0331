"""Answers receipts and keeps nothing: what the raw generator can do at most.

    python -m bench.sink

Rules: one connection at a time; frames are cut by their announced size, and nothing in a SEND is
looked at; its receipts count from 0. Prints its port, and ends with its standard input.
"""

import socket
import struct
import sys
import threading
from typing import Final

from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.frames import encode_command, encode_send_receipt

_SIZE: Final = struct.Struct(">I")
RECEIVE_BYTES: Final = 1024 * 1024
SEND_TYPE: Final = b"\x08\x06"


def answer(raw: bytes) -> bytes:
    """The encoded answer to an encoded CONNECT, LOOKUP or PRODUCER."""
    command = pb.BaseCommand.FromString(raw)
    reply = pb.BaseCommand()
    if command.type == pb.BaseCommand.CONNECT:
        reply.type = pb.BaseCommand.CONNECTED
        reply.connected.server_version = "sink"
    elif command.type == pb.BaseCommand.LOOKUP:
        reply.type = pb.BaseCommand.LOOKUP_RESPONSE
        reply.lookup_response.request_id = command.lookup.request_id
        reply.lookup_response.response = pb.CommandLookupTopicResponse.Connect
    else:
        reply.type = pb.BaseCommand.PRODUCER_SUCCESS
        reply.producer_success.request_id = command.producer.request_id
        reply.producer_success.producer_name = "sink"
    return encode_command(reply)


def serve(connection: socket.socket) -> None:
    """Answer until the peer goes."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    number = 0
    buffer = b""
    while data := connection.recv(RECEIVE_BYTES):
        buffer += data
        position, end = 0, len(buffer)
        replies: list[bytes] = []
        while position + 4 <= end:
            (size,) = _SIZE.unpack_from(buffer, position)
            if position + 4 + size > end:
                break
            if buffer[position + 8 : position + 10] == SEND_TYPE:
                replies.append(encode_send_receipt(1, number, 0, 1, number))
                number += 1
            else:
                (length,) = _SIZE.unpack_from(buffer, position + 4)
                replies.append(answer(buffer[position + 8 : position + 8 + length]))
            position += 4 + size
        buffer = buffer[position:]
        connection.sendall(b"".join(replies))


def main() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)

        def accept() -> None:
            while True:
                connection, _ = listener.accept()
                with connection:
                    serve(connection)

        threading.Thread(target=accept, daemon=True).start()
        sys.stdin.read()


if __name__ == "__main__":
    main()
