"""What tells a consumer that came back from another one of its name.

In the metadata of SUBSCRIBE, which brokers other than Magnetar's only show: a text that is another
one for each consumer that an application opens, and the same on each of its connections.
"""

from typing import Final

INCARNATION: Final = "__magnetar.incarnation"
