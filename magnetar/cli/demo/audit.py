"""The count that the demo ends with.  Pure."""

from collections import Counter


class Audit:
    """Compares the bills that were read with the orders that were written.

    An order is a customer and a number; the numbers of a customer count from 0.  Each order must
    have exactly one bill, and the bills of a customer must come in the order of their numbers.
    """

    def __init__(self) -> None:
        self._orders: Counter[str] = Counter()
        self._bills: Counter[tuple[str, int]] = Counter()
        self._next: Counter[str] = Counter()
        self.out_of_order = 0

    def order(self, customer: str) -> int:
        """Count an order; returns its number."""
        number = self._orders[customer]
        self._orders[customer] += 1
        return number

    def bill(self, customer: str, number: int) -> None:
        """Count a bill."""
        self._bills[customer, number] += 1
        if self._bills[customer, number] == 1:
            self.out_of_order += number != self._next[customer]
            self._next[customer] = number + 1

    @property
    def orders(self) -> int:
        """How many orders were written."""
        return self._orders.total()

    @property
    def bills(self) -> int:
        """How many bills were read."""
        return self._bills.total()

    @property
    def billed(self) -> int:
        """How many orders have a bill."""
        return sum(number < self._orders[customer] for customer, number in self._bills)

    @property
    def lost(self) -> int:
        """Orders without a bill."""
        return self.orders - self.billed

    @property
    def doubled(self) -> int:
        """Bills too many: second bills of an order, and bills without an order."""
        return self.bills - self.billed

    @property
    def is_whole(self) -> bool:
        """Whether there is one bill for each order, in order."""
        return not (self.lost or self.doubled or self.out_of_order)

    def verdict(self) -> str:
        """The count in one sentence."""
        return (
            f"{self.orders:,} orders, {self.bills:,} bills: {self.lost:,} lost, "
            f"{self.doubled:,} doubled, {self.out_of_order:,} out of order"
        )
