"""Which rows are held out: a rule of the rows alone, so that a run, its plan and the embedded model agree on them."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Sequence


def held_out_places(strata: Sequence[str], keys: Sequence[str], per_stratum: int) -> set[int]:
    """Places of the held-out rows: in each stratum those with the lowest hashes of their split key.

    At most ``per_stratum`` and at most a fifth of the stratum (rounded down). Rows of one key are held out together or not at
    all: a key with more rows than there is room for is passed over. Neither the order of the rows nor other strata matter.
    """
    places: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for place, (stratum, key) in enumerate(zip(strata, keys, strict=True)):
        places[stratum][key].append(place)
    sizes = Counter(strata)
    held: set[int] = set()
    for stratum, by_key in places.items():
        room = min(per_stratum, sizes[stratum] // 5)
        for key in sorted(by_key, key=_split_hash):
            if room == 0:
                break
            if len(by_key[key]) <= room:
                held.update(by_key[key])
                room -= len(by_key[key])
    return held


def _split_hash(key: str) -> bytes:
    return hashlib.blake2b(key.encode(), digest_size=16).digest()
