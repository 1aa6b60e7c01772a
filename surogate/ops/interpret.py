"""Run a graph with the NumPy references of its ops, in float64: the slow, plain meaning of a graph.

Tests compare compiled programs, gradient rules and graph passes against it. Views (``split``, ``reshape``, ...) are ops
like any other here; storage, in-place results and dtypes narrower than float64 play no part, so the result is what the
program would give without rounding.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from surogate.graph import Graph, GraphError, Value
from surogate.ops import get_op

_FLOATS = ("f32", "f64", "bf16")


def interpret(graph: Graph, sources: Mapping[str, np.ndarray]) -> dict[Value, np.ndarray]:
    """Compute every value of ``graph``.

    Args:
        graph: the graph, in execution order.
        sources: an array for each source by name. Floating ones are widened to float64, integers are taken as they
            are. Constants of the graph may be left out.

    Returns:
        Each source and each result that is present, by value. A state's new value is that of ``graph.updates[state]``.

    Raises:
        GraphError: a source without an array, or an array of another shape than its value's type.
    """
    values: dict[Value, np.ndarray] = {}
    for source in graph.sources:
        array = sources.get(source.name, graph.constants.get(source.name))
        if array is None:
            raise GraphError(f"{graph.name}: no array for {source}")
        values[source] = np.asarray(array, np.float64) if source.dtype in _FLOATS else np.asarray(array)
        _check(graph, source, values[source])
    for node in graph.nodes:
        operands = [None if i is None else values[i] for i in node.inputs]
        results = get_op(node.op).reference(operands, node.attrs)
        for value, result in zip(node.outputs, results, strict=True):
            if value is not None:
                if result is None:
                    raise GraphError(f"{graph.name}: {node.format()}: the reference leaves out {value}")
                values[value] = np.asarray(result)
                _check(graph, value, values[value])
    return values


def _check(graph: Graph, value: Value, array: np.ndarray) -> None:
    if array.shape != value.shape:
        raise GraphError(f"{graph.name}: {value} is {value.type}, its array is {array.shape}")
