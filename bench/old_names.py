"""The names that earlier versions gave to keys and values of rows, records, comparisons and cluster files.

Such a file is read as if it had today's names. All of them pass through here, and the old names stand nowhere
else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: old -> new: what bounds a step, and its parts
BOUNDS = {
    "products": "matmul",
    "links within a node": "intra-node links",
    "links across nodes": "inter-node links",
}
PARTS = {"products_s": "matmul_s", "within_nodes_s": "intra_node_s", "across_nodes_s": "inter_node_s"}
#: within the words for work without a rate of its own, for what it is priced by, and for measured operations
WORK = {"matrix product": "matmul", " within a node": " intra-node", " between nodes": " inter-node"}
#: keys of a cluster's device
DEVICE = {"products": "matmul"}


def measured_today(content: Any) -> Any:
    """The measurement of a row, or a line of a comparison, under today's names; anything else as it is."""
    if not isinstance(content, dict):
        return content
    changed: dict[str, Any] = {}
    if isinstance(bound := content.get("bound"), str):
        changed["bound"] = BOUNDS.get(bound, bound)
    if isinstance(parts := content.get("parts"), dict):
        changed["parts"] = _keys(parts, PARTS)
    if isinstance(priced_by := content.get("priced_by"), list):
        changed["priced_by"] = [_words(each, "work", "by") for each in priced_by]
    return content | changed


def cluster_today(content: dict[str, Any]) -> dict[str, Any]:
    """The content of a cluster file under today's names."""
    changed: dict[str, Any] = {}
    if isinstance(device := content.get("device"), dict):
        changed["device"] = _keys(device, DEVICE)
    if isinstance(measured := content.get("measured"), list):
        changed["measured"] = [_words(each, "operation") for each in measured]
    return content | changed


def trace_today(content: dict[str, Any]) -> dict[str, Any]:
    """A trace of a step whose events have today's words for the class of their work."""
    changed = [
        {**event, "args": _words(args, "class")} if "class" in (args := event.get("args") or {}) else event
        for event in content["traceEvents"]
    ]
    return content | {"traceEvents": changed}


def _keys(content: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """With other keys; one whose new name is there as well stays, for the schema to refuse."""
    return {key if (new := names.get(key, key)) in content else new: each for key, each in content.items()}


def _words(content: Any, *keys: str) -> Any:
    if not isinstance(content, dict):
        return content
    changed = {key: each for key in keys if isinstance(each := content.get(key), str)}
    for old, new in WORK.items():
        changed = {key: text.replace(old, new) for key, text in changed.items()}
    return content | changed
