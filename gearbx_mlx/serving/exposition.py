"""What Prometheus reads, where its library is installed."""

from ..errors import GearbxError
from .metrics import Metrics


def exposition(metrics: Metrics) -> tuple[bytes, str]:
    """Everything in Prometheus's text format, and its media type.

    Raises:
        GearbxError: prometheus_client is not installed.
    """
    try:
        from .prometheus import exposed
    except ImportError as error:
        raise GearbxError("metrics need prometheus_client; install it with: pip install prometheus_client") from error
    return exposed(metrics)
