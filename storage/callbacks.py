"""A callback that does nothing."""


def ignore(*_: object) -> None:
    """Stand for a callback that is dropped, so that its object is freed at once.

    Objects that call each other stay in memory until a garbage collection.
    """
