"""Which nodes belong to which item of a numbered container (`model.layers` -> 0, 1, 2, …).

The exporter writes the path of the module that made a node into `nn_module_stack`; a path component
that is a number is an item of a ModuleList or Sequential. Shared by the roll pass and the checks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.fx as fx

from headrace.bridge.program import Loop


@dataclass(frozen=True, kw_only=True)
class Region:
    """The nodes of one item, in graph order. `order` is its place among the regions, `index` its
    number.
    """

    index: int
    order: int
    nodes: tuple[fx.Node, ...]


def items_of(node: fx.Node) -> list[tuple[str, int]]:
    """(container, number) for each numbered component of the module path, outermost first."""
    stack = node.meta.get("nn_module_stack") or {}
    path = str(list(stack.values())[-1][0]) if stack else ""
    parts = path.split("@")[0].split(".")
    return [(".".join(parts[:i]), int(part)) for i, part in enumerate(parts) if part.isdigit()]


def containers(graph: fx.Graph) -> list[str]:
    """Containers with at least two items in the graph, outer ones before inner ones."""
    found: dict[str, set[int]] = {}
    for node in graph.nodes:
        if node.op == "call_function" and not isinstance(node.target, Loop):
            for container, index in items_of(node):
                found.setdefault(container, set()).add(index)
    names = [name for name, items in found.items() if len(items) > 1]
    return sorted(names, key=lambda name: (name.count("."), list(found).index(name)))


def find_regions(graph: fx.Graph, container: str) -> list[Region]:
    """The container's items as contiguous stretches of the graph; empty if it has none.

    Nodes between two items go to the item they precede. An item that comes back after another one
    (a module called twice) makes a region of its own.
    """
    stretches: list[tuple[int, list[fx.Node]]] = []
    between: list[fx.Node] = []
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        index = None if isinstance(node.target, Loop) else dict(items_of(node)).get(container)
        if index is None:
            between.append(node)
            continue
        if not stretches:
            stretches.append((index, [node]))
        elif stretches[-1][0] == index:
            stretches[-1][1].extend([*between, node])
        else:
            stretches.append((index, [*between, node]))
        between = []
    return [Region(index=i, order=k, nodes=tuple(nodes)) for k, (i, nodes) in enumerate(stretches)]


def hoist_between(graph: fx.Graph, container: str, regions: Sequence[Region]) -> None:
    """Move nodes between the items that depend on none of them to before the first item.

    Such are per-layer inputs that the model slices in its own forward (Gemma 3n and 4).
    """
    anchor = regions[0].nodes[0]
    tainted: set[fx.Node] = set()
    reached = False
    for node in list(graph.nodes):
        reached = reached or node is anchor
        if not reached or node.op != "call_function":
            continue
        own = not isinstance(node.target, Loop) and container in dict(items_of(node))
        if own or any(n in tainted for n in node.all_input_nodes):
            tainted.add(node)
        else:
            anchor.prepend(node)
