"""Kept states: requests that begin alike go on from the state after their common pages.

A page holds what attention reads of its own tokens, but the state of a recurrent layer follows from all tokens before it.
Where a model has such layers, pages of the prefix cache are found only up to a page after which the state was kept. States
are kept where a prompt's chunk ends at a page's border, when no token of the chunk can be rejected any more, and no step
has begun a window: never from within one.

Kept states lie in the same arrays as the requests', after their slots. The least recently used one makes room. A prompt
keeps few, whatever its length: one at its end, one where a text known before parted from it, and otherwise at distances
that double, so that no prompt drives out those of many others.
"""

from jaxspec.engine.prefix_cache import Node


def next_cut(start: int, target: int, *, page_size: int, interval: int, parting: int = 0) -> int | None:
    """Where the chunk of a prompt that begins at `start` has to end for its state to be kept, if anywhere.

    At `interval` tokens, twice, four times and so on as many, for whoever shares an unknown part of this prompt; at `parting`,
    where this one leaves a text that others had, so that the next to leave it there goes on from there; and at the last
    page's border before the last token, from which the same prompt or its continuation goes on.

    Args:
        target: tokens of the prompt. At least one is always computed again.
        interval, parting: multiples of `page_size`.
    """
    last = (target - 1) // page_size * page_size
    doubled = interval << (start // interval).bit_length()
    return min((cut for cut in (doubled, parting, last) if start < cut <= last), default=None)


class Snapshots:
    """Which slots hold kept states, and after which pages. Works without a device.

    A slot is free, kept after a node of the prefix cache, or taken: its state has been copied by a step whose pages have
    not been published yet.

    Args:
        first: of `count` slots, after those of requests.
    """

    def __init__(self, first: int, count: int):
        self._free = list(range(first + count - 1, first - 1, -1))
        self._kept: dict[Node, int] = {}  # the least recently used first

    def __contains__(self, node: Node) -> bool:
        return node in self._kept

    @property
    def free(self) -> list[int]:
        return list(self._free)

    @property
    def kept(self) -> list[int]:
        return list(self._kept.values())

    def find(self, node: Node) -> int:
        """The slot with the state after a node, used now."""
        self._kept[node] = slot = self._kept.pop(node)
        return slot

    def take(self) -> int | None:
        """A slot for the state that the coming step leaves; None if all are taken."""
        if not self._free and self._kept:
            self.drop(next(iter(self._kept)))
        return self._free.pop() if self._free else None

    def keep(self, node: Node, slot: int) -> None:
        """The state in a taken slot is the one after the node, whose pages others may find now."""
        if node in self._kept:
            self.give_back(slot)
        else:
            self._kept[node] = slot

    def give_back(self, slot: int) -> None:
        self._free.append(slot)

    def drop(self, node: Node) -> None:
        """Nobody finds the node's page any more, or its slot is needed."""
        if node in self._kept:
            self._free.append(self._kept.pop(node))

    def clear(self) -> None:
        self._free += self._kept.values()
        self._kept.clear()
