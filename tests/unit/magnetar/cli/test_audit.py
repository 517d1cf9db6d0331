"""The demo's count sees what is lost, doubled or out of order."""

from magnetar.cli.demo.audit import Audit


def ordered(*customers: str) -> Audit:
    audit = Audit()
    for customer in customers:
        audit.order(customer)
    return audit


def test_one_bill_for_each_order_is_whole() -> None:
    audit = ordered("a", "b", "a")
    for customer, number in (("b", 0), ("a", 0), ("a", 1)):
        assert not audit.is_whole
        audit.bill(customer, number)
    assert audit.is_whole
    assert audit.verdict() == "3 orders, 3 bills: 0 lost, 0 doubled, 0 out of order"


def test_numbers_are_counted_for_each_customer() -> None:
    audit = Audit()
    assert [audit.order("a"), audit.order("b"), audit.order("a")] == [0, 0, 1]


def test_a_missing_bill_is_lost_and_those_after_it_are_out_of_order() -> None:
    audit = ordered("a", "a", "a")
    audit.bill("a", 0)
    audit.bill("a", 2)
    assert (audit.lost, audit.doubled, audit.out_of_order) == (1, 0, 1)


def test_a_second_bill_is_doubled() -> None:
    audit = ordered("a", "a")
    for number in (0, 1, 1):
        audit.bill("a", number)
    assert (audit.lost, audit.doubled, audit.out_of_order, audit.is_whole) == (0, 1, 0, False)


def test_a_bill_without_order_does_not_replace_a_missing_one() -> None:
    audit = ordered("a")
    audit.bill("b", 0)
    assert (audit.lost, audit.doubled, audit.is_whole) == (1, 1, False)


def test_bills_that_overtake_are_out_of_order() -> None:
    audit = ordered("a", "a")
    audit.bill("a", 1)
    audit.bill("a", 0)
    assert (audit.lost, audit.doubled, audit.is_whole) == (0, 0, False)
