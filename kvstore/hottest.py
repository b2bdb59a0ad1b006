"""What a store answers about its hottest branches: how often they are used, by whom, and where they lie."""

import heapq
from collections.abc import Iterable, Mapping
from itertools import pairwise

from kvstore.branch_tree import WINDOW_MINUTES, Branch, BranchTree, Told, path_of
from kvstore.branches import Branches
from kvstore.directory import Shelf
from kvstore.errors import KVStoreError
from kvstore.keys import NamespaceDigest
from kvstore.layout import Part
from kvstore.state import State
from kvstore.tenant import tenant_of

MAX_TOLD = 100
TOLD = 20
"""Branches that are told unless another number is asked for."""

TOLD_IN_STATS = 8


def branches_answer(
    state: State, namespaces: Iterable[NamespaceDigest] | None = None, *, limit: int = TOLD
) -> dict[str, object]:
    """Return the branches that were looked up most lately, of all namespaces or of some, ready for JSON.

    The hottest first; a branch's ``parent`` is told before it.
    """
    kept = state.branches
    if kept is None or not kept.is_on:
        return {"is_on": False, "window_s": WINDOW_MINUTES * 60, "lookups": 0, "branches": []}
    trees, minute = kept.trees(namespaces), kept.minute
    found = [(told, name, tree) for name, tree in trees for told in tree.told(minute, limit=limit)]
    # A branch that leaves another has fewer lookups, or as many and more depth.
    hottest = heapq.nsmallest(limit, found, key=lambda at: (-at[0].tally.lookups, at[0].node.depth_blocks))
    return {
        "is_on": True,
        "window_s": WINDOW_MINUTES * 60,
        "lookups": round(sum(tree.root.tally(minute).lookups for _, tree in trees)),
        "sample_ratio": kept.sample_ratio,
        "lost_samples": kept.lost_samples,
        "kept_branches": kept.num_branches,
        "branches": [_branch(state, kept, told, name, tree) for told, name, tree in hottest],
    }


def watched_namespaces(state: State) -> list[NamespaceDigest]:
    """Return the namespaces that hit rates by size, or branches, are known of."""
    sized = [] if state.size_curve is None else state.size_curve.namespaces()
    branched = [] if state.branches is None else state.branches.namespaces()
    return list(dict.fromkeys([*sized, *branched]))


def _branch(
    state: State, kept: Branches, told: Told, namespace: NamespaceDigest, tree: BranchTree
) -> dict[str, object]:
    node, known = told.node, state.directory.namespace(namespace)
    depth = node.depth_blocks
    return {
        "key": node.keys[-1].hex(),
        "namespace": namespace.hex(),
        "tenant": None if known is None else tenant_of(known.tenant_salt).hex(),
        "parent": None if told.parent is None else told.parent.keys[-1].hex(),
        "leaves_at_blocks": told.leaves_at_blocks,
        "blocks": depth,
        "tokens": depth * tree.block_tokens,
        "match": _counted(told.tally.matches, told.tally.match_hits),
        "fetch": _counted(told.tally.fetches, told.tally.fetch_hits),
        "last_use_s": round(max(0.0, kept.now_s - node.last_use_s), 1),
        "tiers": _tiers(state, namespace, tree.part, node),
    }


def _counted(lookups: float, hits: float) -> dict[str, int]:
    return {"lookups": round(lookups), "hits": round(hits)}


def _tiers(state: State, namespace: NamespaceDigest, part: Part, node: Branch) -> Mapping[str, int]:
    """Return how many blocks of a branch, from the start on, are in each tier, as its checkpoints tell.

    A checkpoint stands for the blocks from the one before it on.
    """
    try:
        shelf = state.directory.shelf(namespace, part)
    except KVStoreError:  # forgotten since: nothing of it is stored
        return {}
    return {} if shelf.is_stale else _spread(state, shelf, node)


def _spread(state: State, shelf: Shelf, node: Branch) -> dict[str, int]:
    spread: dict[str, int] = {}
    down = state.down_tiers()
    path = path_of(node)
    for (before, _), (depth, key) in pairwise([(0, path[0][1]), *path]):
        entry = shelf.entries.get(key)
        if entry is None:
            continue
        for name in (tier for tier in state.policies if tier not in down and entry.is_ready(tier)):
            spread[name] = spread.get(name, 0) + depth - before
        for name, beliefs in state.beliefs.items():
            if entry.name in beliefs:
                spread[name] = spread.get(name, 0) + depth - before
    return spread
