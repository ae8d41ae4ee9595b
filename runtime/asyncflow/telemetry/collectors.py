"""Collectors of metrics whose values are set, counted or exported elsewhere.

Invariant: a value that another object counts is read from it at each request of ``/metrics``, never copied.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from typing import ClassVar

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from asyncflow.errors import AsyncFlowError


class _SingleValue(Collector):
    """A metric without labels whose value is set as a whole; it has no sample while the value is None."""

    family: ClassVar[type[CounterMetricFamily | GaugeMetricFamily]]

    def __init__(self, name: str, words: str, *, value: float | None = None) -> None:
        self._named = name, words
        self._value = value

    def set(self, value: float) -> None:
        """Set the value."""
        self._value = value

    def collect(self) -> Iterable[Metric]:
        """Yield the metric."""
        yield self.family(*self._named, value=self._value)

    def describe(self) -> Iterable[Metric]:
        """Yield the metric, from which a registry takes its name."""
        return self.collect()


class Total(_SingleValue):
    """A counter whose value is computed elsewhere, and never falls; exported as ``<name>_total``."""

    family = CounterMetricFamily


class Figure(_SingleValue):
    """A gauge that has no sample until it is set, because 0 would look like a value."""

    family = GaugeMetricFamily


class LabelledTotal(Collector):
    """A counter with one label whose values are counted elsewhere."""

    def __init__(self, name: str, words: str, label: str, counts: Callable[[], Mapping[str, float]]) -> None:
        self._describe = (name, words, label)
        self._counts = counts

    def collect(self) -> Iterable[Metric]:
        """Yield the counter with its present values."""
        name, words, label = self._describe
        family = CounterMetricFamily(name, words, labels=[label])
        for value, count in self._counts().items():
            family.add_metric([value], count)
        yield family


class Relayed(Collector):
    """The metrics of another process, as of the last call of ``refresh``."""

    def __init__(self, source: Callable[[], Awaitable[str]]) -> None:
        self._source = source
        self._text = ""

    async def refresh(self) -> None:
        """Fetch the metrics of the other process; if it does not answer, there are none."""
        text = ""
        with suppress(AsyncFlowError):
            text = await self._source()
        self._text = text

    def collect(self) -> Iterable[Metric]:
        """Yield the fetched metrics."""
        yield from text_string_to_metric_families(self._text)


def by_rank(texts: Mapping[str, str]) -> CollectorRegistry:
    """Return the metrics of several ranks as one registry; each sample gets its rank as the label ``rank``.

    texts: by rank, its ``/metrics`` in Prometheus' text format.
    """
    families: dict[str, Metric] = {}
    for rank, text in texts.items():
        for family in text_string_to_metric_families(text):
            merged = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                merged.add_sample(sample.name, {**sample.labels, "rank": rank}, sample.value)
    registry = CollectorRegistry()
    registry.register(_Families(families.values()))
    return registry


class _Families(Collector):
    """A collector of given families."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families
