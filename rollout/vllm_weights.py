"""Loading received tensors into a running vLLM model, and proving beforehand that they fill it.

``load_weights`` of vLLM's models cannot prove a push: with one part of a fused tensor missing it returns the same names and
raises nothing. So every load is first *rehearsed*: the model's own loaders run on tensors without storage, what each would
have copied is counted, and only a push that fills every parameter exactly is loaded. A refused push has touched nothing.

Four traps of vLLM 0.32 shape the rest. Weights of CPU layers are repacked when they are loaded, so a bare ``load_weights``
fails or is silently ignored: it must run inside a layerwise reload. A tied head keeps its old packed copy through that
reload: it is packed again here. Experts are packed only when their kernel is built, which a reload skips: it is built anew
here. And what was computed with the old weights stays in the prefix cache: the caller resets it.
"""

from __future__ import annotations

import bisect
import inspect
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.layerwise import (
    _get_original_loader,
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.meta import get_numel_loaded, to_meta_tensor
from vllm.model_executor.model_loader.reload.utils import get_tensor_load_numel
from vllm.platforms import current_platform

from rollout.weights import Bucket, tensor_bytes


def bucket_tensors(buckets: Sequence[Bucket]) -> dict[str, Tensor]:
    """The buckets' tensors by name: views of their bytes, to be read only."""
    tensors = {}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")  # bytes in Ray's store are read-only
        for bucket in buckets:
            for place, spec in enumerate(bucket.specs):
                flat = torch.frombuffer(tensor_bytes(bucket, place), dtype=getattr(torch, spec.dtype))
                tensors[spec.name] = flat.view(spec.shape)
    return tensors


@torch.inference_mode()
def load_tensors(worker: Any, tensors: dict[str, Tensor]) -> list[str]:
    """Makes ``tensors`` (checkpoint names) the weights of a vLLM worker's model.

    Returns one line for each way in which they do not fill the model exactly; then nothing was loaded. An exception means that
    the weights may be half written.
    """
    model = worker.model_runner.get_model()
    config = worker.vllm_config
    with set_current_vllm_config(config), torch.device(worker.device):
        tied = _tied_parameters(model)
        initialize_layerwise_reload(model)
        problems = _rehearse(model, tensors, tied)
        with _new_expert_kernels(model):
            if not problems:
                model.load_weights(tensors.items())
            # Also after a refusal: layers into which nothing was loaded get their own tensors back.
            finalize_layerwise_reload(model, config.model_config)
        if not problems:
            repack_tied_heads(model, tied)
    return problems


def repack_tied_heads(model: nn.Module, tied: Sequence[str]) -> None:
    """Packs the heads again whose weight is another layer's: nothing was loaded into them by their own name."""
    for name, module in model.named_modules():
        if isinstance(module, ParallelLMHead) and f"{name}.weight" in tied:
            module.quant_method.process_weights_after_loading(module)


@contextmanager
def _new_expert_kernels(model: nn.Module) -> Iterator[None]:
    """Has the kernels of experts built anew by the layers loaded meanwhile, on CPU, where that packs their weights.

    With a kernel at hand vLLM takes the new weights for packed already: they would be read in the wrong order, without a word.
    """
    methods = [getattr(module, "quant_method", None) for module in model.modules()] if current_platform.is_cpu() else []
    kernels = [(method, method.moe_kernel) for method in methods if isinstance(method, FusedMoEMethodBase)]
    for method, _ in kernels:
        method.moe_kernel = None
    try:
        yield
    finally:
        for method, kernel in kernels:
            if method.moe_kernel is None:  # nothing was loaded
                method.moe_kernel = kernel


def _tied_parameters(model: nn.Module) -> list[str]:
    """Names of parameters that are the same object as one named before."""
    first: dict[int, str] = {}
    names = [(name, first.setdefault(id(p), name)) for name, p in model.named_parameters(remove_duplicate=False)]
    return [name for name, canonical in names if name != canonical]


class _Rehearsal:
    """What the model's loaders would have copied: elements by parameter, and which tensor went where."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        spans = sorted((tensor.data_ptr(), name) for name, tensor in tensors.items())
        self._starts = [start for start, _ in spans]
        self._names = [name for _, name in spans]
        self.num_copied: dict[str, int] = defaultdict(int)
        self.sources: dict[str, list[str]] = defaultdict(list)

    def loader(self, parameter: str, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        def count(param: nn.Parameter, loaded_weight: Tensor, *args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(param if param.is_meta else to_meta_tensor(param), loaded_weight, *args, **kwargs)
            bound.apply_defaults()
            num, result = get_numel_loaded(original, bound)
            self.num_copied[parameter] += num
            place = bisect.bisect_right(self._starts, loaded_weight.data_ptr()) - 1
            self.sources[parameter].append(self._names[max(place, 0)])
            return result

        return count


def _rehearse(model: nn.Module, tensors: dict[str, Tensor], tied: Sequence[str]) -> list[str]:
    """Runs ``model.load_weights`` without writing anything, inside an initialized layerwise reload."""
    rehearsal = _Rehearsal(tensors)
    with _counting_loaders(model, rehearsal):
        try:
            model.load_weights(tensors.items())
        except Exception as error:  # whatever the loaders object to (an unknown name, a shape) refuses the push
            return [f"the model's loader objects: {type(error).__name__}: {error}"]
    lines = []
    for name, (module, param) in _loadable(model).items():
        wanted, copied = _num_wanted(module, param), rehearsal.num_copied[name]
        sources = rehearsal.sources[name]
        if name in tied:
            lines += [f"{source}: sent apart, but the engine ties {name} to another tensor" for source in sources]
        elif copied != wanted:
            missing = [part for part in _parts(model, module, name) if part not in tensors]
            lines.append(
                f"{name}: {copied} of {wanted} elements arrived" + (f"; missing {', '.join(missing)}" if missing else "")
            )
    taken = {source for sources in rehearsal.sources.values() for source in sources}
    lines += [f"{name}: sent, but the model's loader does not take it" for name in tensors if name not in taken]
    return lines


@contextmanager
def _counting_loaders(model: nn.Module, rehearsal: _Rehearsal) -> Iterator[None]:
    before = []
    for name, (_, param) in _loadable(model).items():
        before.append((param, getattr(param, "weight_loader", None)))
        param.weight_loader = rehearsal.loader(name, _get_original_loader(param))
    try:
        yield
    finally:
        for param, loader in before:
            if loader is None:
                del param.weight_loader
            else:
                param.weight_loader = loader


def _loadable(model: nn.Module) -> dict[str, tuple[nn.Module, nn.Parameter]]:
    """Every parameter a push must fill. Attention layers hold scales of their own, which no checkpoint of a plain model has."""
    return {
        f"{prefix}.{name}" if prefix else name: (module, param)
        for prefix, module in model.named_modules()
        if not is_deferred_attention_layer(module)
        for name, param in module.named_parameters(recurse=False)
    }


def _num_wanted(module: nn.Module, param: nn.Parameter) -> int:
    """Elements of a checkpoint that fill this rank's part of a parameter: rows that only pad the vocabulary are not counted."""
    if isinstance(module, VocabParallelEmbedding):
        return module.shard_indices.num_org_elements * (param.numel() // module.num_embeddings_per_partition)
    return get_tensor_load_numel(param)


def _parts(model: nn.Module, module: nn.Module, parameter: str) -> list[str]:
    """Checkpoint names of the tensors that fill a parameter: its own, or those of its parts where it is fused."""
    if isinstance(module, RoutedExperts):
        own = parameter.rpartition(".")[2]  # w13_weight
        stems = [(slot.rpartition(".")[2], part) for slot, part, _, _ in module.get_expert_mapping()]
        prefix = module.layer_name.removesuffix("experts")
        return [f"{prefix}{part}{own.removeprefix(stem)}" for stem, part in stems if own.startswith(stem)]
    for fused, parts in getattr(model, "packed_modules_mapping", {}).items():
        if f".{fused}." in parameter:
            return [parameter.replace(f".{fused}.", f".{part}.") for part in parts]
    return [parameter]
