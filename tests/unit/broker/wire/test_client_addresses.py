"""Connections by address: how many one may have, and which make room for others."""

from broker.wire.client_addresses import ClientAddresses


class Client:
    def __init__(self) -> None:
        self.aborted = False

    def abort(self, why: str) -> None:
        self.aborted = True


def added(addresses: ClientAddresses, address: str) -> Client:
    client = Client()
    assert addresses.add(client, address)
    return client


def test_an_address_has_no_more_connections_than_allowed() -> None:
    addresses = ClientAddresses(2, 10)
    first, _ = added(addresses, "10.0.0.1"), added(addresses, "10.0.0.1")
    assert not addresses.add(Client(), "10.0.0.1")
    added(addresses, "10.0.0.2")
    addresses.discard(first)
    addresses.discard(first)
    added(addresses, "10.0.0.1")
    assert len(addresses) == 3


def test_connections_that_were_accepted_together_keep_the_bound() -> None:
    addresses = ClientAddresses(None, 3)
    first, *others = (added(addresses, "10.0.0.1") for _ in range(20))
    assert first.aborted
    assert len(addresses) == 3
    for client in others:
        addresses.logged_in(client)
    assert not addresses.add(Client(), "10.0.0.2")
    assert len(addresses) == 3


class Handshake:
    def __init__(self) -> None:
        self.aborted = False

    def step(self) -> None:
        pass

    def abort(self) -> None:
        self.aborted = True


def test_handshakes_count_and_make_room_first() -> None:
    addresses = ClientAddresses(None, 3)
    silent = added(addresses, "10.0.0.1")
    first, second, third = (Handshake() for _ in range(3))
    for each in (first, second, third):
        assert addresses.handshakes.begin(each, "10.0.0.2")
    # The third one has replaced the first one.
    assert [each.aborted for each in (first, second, third)] == [True, False, False]
    added(addresses, "10.0.0.3")
    assert second.aborted
    assert not silent.aborted
    assert len(addresses) + len(addresses.handshakes) == 3
    added(addresses, "10.0.0.3")
    assert third.aborted
    assert addresses.admits_one()
    assert len(addresses) == 2


def test_handshake_replaces_a_connection_without_login_if_there_is_no_other() -> None:
    addresses = ClientAddresses(None, 1)
    silent = added(addresses, "10.0.0.1")
    assert addresses.handshakes.begin(Handshake(), "10.0.0.2")
    assert silent.aborted
    addresses.handshakes.close()
    addresses.logged_in(added(addresses, "10.0.0.1"))
    assert not addresses.handshakes.begin(Handshake(), "10.0.0.2")
    assert not addresses.admits_one()


def test_a_network_of_ipv6_counts_as_one_address() -> None:
    addresses = ClientAddresses(1, 10)
    added(addresses, "2001:db8::1")
    assert not addresses.add(Client(), "2001:db8::2")
    added(addresses, "2001:db8:0:1::1")


def test_the_oldest_without_login_of_the_busiest_address_makes_room() -> None:
    addresses = ClientAddresses(None, 10)
    lonely = added(addresses, "10.0.0.9")
    logged_in, oldest, newest = (added(addresses, "10.0.0.1") for _ in range(3))
    addresses.logged_in(logged_in)
    assert addresses.make_room()
    assert [each.aborted for each in (lonely, logged_in, oldest, newest)] == [
        *(False, False),
        *(True, False),
    ]
    assert len(addresses) == 3


def test_connections_that_have_logged_in_make_no_room() -> None:
    addresses = ClientAddresses(None, 10)
    client = added(addresses, "10.0.0.1")
    assert addresses.before_login(client) == "10.0.0.1"
    addresses.logged_in(client)
    assert addresses.before_login(client) is None
    assert not addresses.make_room()
    assert not client.aborted


def test_a_connection_that_was_replaced_may_log_in_late_without_effect() -> None:
    addresses = ClientAddresses(None, 10)
    client = added(addresses, "10.0.0.1")
    assert addresses.make_room()
    addresses.logged_in(client)
    addresses.discard(client)
    assert (client.aborted, len(addresses)) == (True, 0)
