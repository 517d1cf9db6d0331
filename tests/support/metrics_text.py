"""The page of metrics of a broker that runs in this process."""

from broker.app.service import Broker
from broker.metrics.page import MetricsPage


async def metrics_text(broker: Broker) -> str:
    """The present metrics as text; nothing is kept from an earlier call."""
    return (await MetricsPage(broker).text()).decode()
