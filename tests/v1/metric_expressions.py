# SPDX-License-Identifier: Apache-2.0
"""What a PromQL expression says about metric families, compared with the families that there are.

Prometheus answers an expression about a family or a label that does not exist with nothing, which looks as if all were
well. So each expression is parsed, and its families, labels and labels' values are looked up. It is also refused where
a counter is used without a rate or a gauge with one, and where two sides have different labels and would not match.
Nothing is evaluated here: `promtool` and Prometheus do that.
"""
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import promql_parser as promql
from prometheus_client.metrics import MetricWrapperBase

RATES = ("rate", "increase")
SUFFIXES = {"counter": ("_total", ), "gauge": ("", ), "histogram": ("_bucket", "_sum", "_count")}
OR = "or"

Labels = frozenset[str]


class ExpressionFault(ValueError):
    """The expression can't be parsed, or would never say what it is meant to say."""


@dataclass(frozen=True)
class SampleFamily:
    """All samples of one name. `counts`: they only grow, as those of counters and histograms do."""
    labels: Labels
    counts: bool


def sample_families(metrics: Iterable[MetricWrapperBase], beside: Labels) -> dict[str, SampleFamily]:
    """Sample name -> family of what is declared with prometheus_client. `beside`: labels that Prometheus adds."""
    found = {}
    for metric in metrics:
        (described, ) = metric.describe()
        for suffix in SUFFIXES.get(described.type, ()):
            labels = beside | set(metric._labelnames) | ({"le"} if suffix == "_bucket" else set())
            found[described.name + suffix] = SampleFamily(frozenset(labels), described.type != "gauge")
    return found


@dataclass(frozen=True)
class ExpressionCheck:
    """`values`: those that a label of a sample name may have, by (name, label), or by ("", label) for all names."""
    families: Mapping[str, SampleFamily]
    values: Mapping[tuple[str, str], Iterable[str]] = field(default_factory=dict)

    def result(self, expression: str) -> Labels:
        """The labels of what the expression gives. Raises ExpressionFault."""
        try:
            parsed = promql.parse(expression)
        except ValueError as error:
            raise ExpressionFault(f"{expression}: {error}") from error
        try:
            return self._labels(parsed) or frozenset()
        except ExpressionFault as fault:
            raise ExpressionFault(f"{expression}: {fault}") from None

    def _labels(self, node: promql.Expr, rate: bool = False) -> Labels | None:
        """Of a part of it; None for a number. `rate`: it is what a rate is taken of."""
        match node:
            case promql.NumberLiteral():
                return None
            case promql.ParenExpr() | promql.UnaryExpr():
                return self._labels(node.expr)
            case promql.MatrixSelector() if rate:
                return self._selected(node.vector_selector, rate)
            case promql.VectorSelector():
                return self._selected(node, rate)
            case promql.Call():
                return self._called(node)
            case promql.AggregateExpr():
                return self._aggregated(node)
            case promql.BinaryExpr():
                return self._combined(node)
        raise ExpressionFault(f"{type(node).__name__} is not known here: teach {__name__}")

    def _selected(self, node: promql.VectorSelector, rate: bool) -> Labels:
        family = self.families.get(node.name)
        if family is None:
            raise ExpressionFault(f"there is no family {node.name}")
        if rate is not family.counts:
            raise ExpressionFault(f"{node.name} is a gauge: no rate of it" if rate else
                                  f"{node.name} is a counter: its rate, not what it has counted")
        for matcher in node.matchers.matchers:
            if matcher.name not in family.labels:
                raise ExpressionFault(f"{node.name} has no label {matcher.name}")
            self._check_values(node.name, matcher)
        return family.labels

    def _check_values(self, name: str, matcher: promql.Matcher) -> None:
        key = (name, matcher.name)
        known = self.values.get(key, self.values.get(("", matcher.name)))
        for one in matcher.value.split("|"):
            if one == ".*":
                continue
            if known is None:
                raise ExpressionFault(f"what values {matcher.name} of {name} has is not known here")
            pattern = one if matcher.op in (promql.MatchOp.Re, promql.MatchOp.NotRe) else re.escape(one)
            if not any(re.fullmatch(pattern, value) for value in known):
                raise ExpressionFault(f"{matcher.name} of {name} is never {one}")

    def _called(self, node: promql.Call) -> Labels | None:
        name = node.func.name
        if name in RATES:
            return self._labels(node.args[0], rate=True)
        if name != "histogram_quantile":
            raise ExpressionFault(f"{name}() is not known here: teach {__name__}")
        labels = self._labels(node.args[1]) or frozenset()
        if "le" not in labels:
            raise ExpressionFault("histogram_quantile() of what has no label le")
        return labels - {"le"}

    def _aggregated(self, node: promql.AggregateExpr) -> Labels:
        inner = self._labels(node.expr) or frozenset()
        if node.modifier is None:
            return frozenset()
        if node.modifier.type is not promql.AggModifierType.By:
            raise ExpressionFault("`without` is not known here: say which labels shall stay, with `by`")
        wanted = frozenset(node.modifier.labels)
        if wanted - inner:
            raise ExpressionFault(f"by {', '.join(sorted(wanted - inner))}: there is no such label")
        return wanted

    def _combined(self, node: promql.BinaryExpr) -> Labels | None:
        left, right = self._labels(node.lhs), self._labels(node.rhs)
        if node.modifier is not None and (node.modifier.matching is not None):
            raise ExpressionFault(f"`{node.modifier}` is not known here: aggregate both sides by the same labels")
        if left is None or right is None:
            return right if left is None else left
        if left != right:
            raise ExpressionFault(f"the two sides of `{node.op}` have different labels: {', '.join(sorted(left))}; "
                                  f"{', '.join(sorted(right))}")
        return left


def legend_labels(text: str) -> Iterator[str]:
    """The labels that a legend of Grafana or an annotation of an alert names."""
    for found in re.finditer(r"\{\{\s*(?:\$labels\.)?([a-z]\w*)\s*\}\}", text):
        yield found[1]
