"""Metrics in Prometheus' text format, written by the package prometheus-client."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from graphpass.errors import OptionError

__all__ = ["Metric", "prometheus_text"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric family.

    Attributes:
        name: the family's name; prometheus-client appends ``_total`` to the names of counters.
        text: the help line.
        samples: (values of the labels, number) pairs.
        labels: names of the labels.
        is_counter: True for a counter, False for a gauge.
    """

    name: str
    text: str
    samples: Sequence[tuple[tuple[str, ...], float]]
    labels: tuple[str, ...] = ()
    is_counter: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class _Collector:
    """The collector that prometheus-client reads metrics from."""

    metrics: Sequence[Metric]

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        for metric in self.metrics:
            family = (CounterMetricFamily if metric.is_counter else GaugeMetricFamily)(
                metric.name, metric.text, labels=metric.labels
            )
            for values, number in metric.samples:
                family.add_metric(values, number)
            yield family


def prometheus_text(metrics: Sequence[Metric]) -> str:
    """The metrics in Prometheus' text format, as the body of a ``/metrics`` response.

    Raises:
        OptionError: the package ``prometheus-client`` is not installed.
    """
    try:
        from prometheus_client import CollectorRegistry, generate_latest
    except ImportError as error:
        raise OptionError(
            "Prometheus text needs a package that is not installed",
            expected="prometheus-client",
            found=str(error),
            remedy="pip install 'graphpass[prometheus]'",
        ) from error
    registry = CollectorRegistry()
    registry.register(_Collector(metrics))
    return generate_latest(registry).decode()
