"""Tensors laid aside in main memory while another process has the device, and put back behind the same tensor objects."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, UntypedStorage


class Aside:
    """Takes the memory behind tensors away, their contents kept in main memory; ``put_back`` gives both back, bit for bit.

    It works on storages, so that views of a flat buffer, of which optimizers hold many, stay views of it. Nobody may touch one of the
    tensors in between: there is no memory behind it, and torch does not check.
    """

    def __init__(self, tensors: Iterable[Tensor], *, scratch: Iterable[Tensor], but: Iterable[Tensor]) -> None:
        """Memory of ``scratch`` is taken too, its contents are not kept. What ``but`` uses stays where it is."""
        stay = {tensor.untyped_storage().data_ptr() for tensor in but} | {0}
        self._kept: list[tuple[UntypedStorage, Tensor]] = []
        self._scratch: list[tuple[UntypedStorage, int]] = []
        for storage in _storages(tensors, stay):
            copy = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=storage.device.type == "cuda")
            copy.copy_(_as_bytes(storage))
            storage.resize_(0)
            self._kept.append((storage, copy))
        for storage in _storages(scratch, stay):
            self._scratch.append((storage, storage.nbytes()))
            storage.resize_(0)

    @property
    def num_bytes(self) -> int:
        return sum(copy.nbytes for _, copy in self._kept) + sum(num_bytes for _, num_bytes in self._scratch)

    def put_back(self) -> None:
        for storage, copy in self._kept:
            storage.resize_(copy.nbytes)
            _as_bytes(storage).copy_(copy)
        for storage, num_bytes in self._scratch:
            storage.resize_(num_bytes)
        self._kept.clear()
        self._scratch.clear()


def _storages(tensors: Iterable[Tensor], stay: set[int]) -> list[UntypedStorage]:
    storages = {storage.data_ptr(): storage for storage in (tensor.untyped_storage() for tensor in tensors)}
    return [storage for address, storage in storages.items() if address not in stay]


def _as_bytes(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
