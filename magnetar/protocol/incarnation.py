"""The metadata of SUBSCRIBE by which a broker distinguishes consumers of the same name.

The value differs for each consumer that an application opens, and stays the same over reconnects.
Brokers other than Magnetar's only show it.
"""

from typing import Final

INCARNATION: Final = "__magnetar.incarnation"
