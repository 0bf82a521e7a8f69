"""From a prompt's id to its place in the data, for ten million prompts: sorted 64-bit hashes, no dictionary of strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from configs.errors import ConfigError


def hash_text(text: str) -> int:
    """64 bits (xxh3). A lone surrogate, which data may hold, has no UTF-8 of its own."""
    return xxhash.xxh3_64_intdigest(text.encode("utf-8", "surrogatepass"))


class PromptIndex:
    """The prompts of a run by id and by hash. It keeps the list of ids that it is given, whose strings are the prompts' own."""

    def __init__(self, ids: Sequence[str]) -> None:
        """Raises ConfigError where an id occurs twice, or two ids have one hash."""
        self.ids = ids
        hashes = np.fromiter((hash_text(name) for name in ids), dtype=np.uint64, count=len(ids))
        self._order = np.argsort(hashes, kind="stable").astype(np.int32)  # places by hash
        self._hashes = hashes[self._order]  # ascending
        for same in np.flatnonzero(self._hashes[1:] == self._hashes[:-1]):
            first, second = (ids[place] for place in self._order[same : same + 2])
            fault = (
                f"the id {first!r} occurs twice" if first == second else f"the ids {first!r} and {second!r} have one 64-bit hash"
            )
            raise ConfigError(f"data.sources: {fault}; give one of the two prompts another id")

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def nbytes(self) -> int:
        """Without the ids."""
        return self._order.nbytes + self._hashes.nbytes

    def find(self, names: Sequence[str]) -> NDArray[np.int32]:
        """The places of the prompts with these ids. Raises KeyError for one that is none's."""
        places = self.find_hashes(np.array([hash_text(name) for name in names], dtype=np.uint64))
        for name, place in zip(names, places.tolist(), strict=True):
            if place < 0 or self.ids[place] != name:
                raise KeyError(name)
        return places

    def find_hashes(self, hashes: NDArray[np.uint64]) -> NDArray[np.int32]:
        """The places of the prompts with these hashes, -1 for those that are none's."""
        rank = np.minimum(np.searchsorted(self._hashes, hashes), len(self._hashes) - 1)
        found: NDArray[np.int32] = np.where(self._hashes[rank] == hashes, self._order[rank], np.int32(-1))
        return found

    def hashes_of(self, places: NDArray[Any]) -> NDArray[np.uint64]:
        by_place = np.empty_like(self._hashes)
        by_place[self._order] = self._hashes
        return by_place[places]
