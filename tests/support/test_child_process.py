"""Ports that a test draws."""

import socket

from tests.support.child_process import HOST, free_port, ports_of_this_worker


def test_a_port_comes_again_only_after_all_others() -> None:
    drawn = [free_port() for _ in range(len(ports_of_this_worker()) // 2)]
    assert len(set(drawn)) == len(drawn)


def test_a_port_that_is_in_use_is_passed_over() -> None:
    taken = free_port()
    with socket.socket() as listener:
        listener.bind((HOST, taken))
        assert taken not in {free_port() for _ in ports_of_this_worker()}
