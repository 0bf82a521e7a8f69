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

    def find(self, name: str) -> int | None:
        """The place of the prompt with this id."""
        place = int(self.find_hashes(np.array([hash_text(name)], dtype=np.uint64))[0])
        return place if place >= 0 and self.ids[place] == name else None

    def find_hashes(self, hashes: NDArray[np.uint64]) -> NDArray[np.int32]:
        """The places of the prompts with these hashes, -1 for those that are none's."""
        rank = np.minimum(np.searchsorted(self._hashes, hashes), len(self._hashes) - 1)
        found: NDArray[np.int32] = np.where(self._hashes[rank] == hashes, self._order[rank], np.int32(-1))
        return found

    def where(self, wanted: NDArray[np.bool_]) -> tuple[NDArray[np.int32], NDArray[np.uint64]]:
        """Places and hashes of the prompts of a mask by place, in the order of their hashes."""
        chosen: NDArray[Any] = wanted[self._order]
        return self._order[chosen], self._hashes[chosen]
