"""The token-logprob head against the naive one: memory beyond weight, its gradient and hidden states, and time.

    python benchmarks/head.py                        the sizes of a 152k vocabulary; takes minutes on two cores
    python benchmarks/head.py --rows 512 --time-rows 0 --vocab 65536 --hidden 256      a small memory check

Prints one JSON line. Memory is the process's own high-water mark (Linux), so products' workspaces count too.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from learner.head import TokenLogpHead

GIB = 2.0**30


def process_bytes(field: str) -> int:
    """VmRSS (now) or VmHWM (peak since the last reset) of this process, in bytes."""
    match = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    if match is None:
        raise SystemExit(f"no {field} in /proc/self/status: this benchmark needs Linux")
    return int(match.group(1)) * 1024


def make_inputs(rows: int, vocab: int, hidden: int, dtype: torch.dtype) -> tuple[Tensor, nn.Parameter, Tensor]:
    torch.manual_seed(0)
    states = torch.randn(rows, hidden, dtype=dtype).requires_grad_()
    weight = nn.Parameter(torch.randn(vocab, hidden, dtype=dtype).mul_(hidden**-0.5))
    return states, weight, torch.randint(0, vocab, (rows,))


def naive_loss(states: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    log_p = (states @ weight.t()).float().log_softmax(1)
    return log_p.gather(1, targets[:, None]).sum()


def head_loss(chunk_rows: int, with_entropy: bool) -> Callable[[Tensor, nn.Parameter, Tensor], Tensor]:
    def loss(states: Tensor, weight: nn.Parameter, targets: Tensor) -> Tensor:
        out = TokenLogpHead(weight, chunk_rows=chunk_rows)(states, targets, 1.0)
        return out.logp.sum() + 0.01 * out.entropy.sum() if with_entropy else out.logp.sum()

    return loss


def measure_memory(args: argparse.Namespace, dtype: torch.dtype) -> float:
    """Peak bytes of one forward and backward with entropy, less inputs and the weight's gradient, in GiB."""
    loss = head_loss(args.chunk_rows, with_entropy=True)
    loss(*make_inputs(8, 64, args.hidden, dtype)).backward()  # loads kernels and their thread pools
    states, weight, targets = make_inputs(args.rows, args.vocab, args.hidden, dtype)
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    before = process_bytes("VmRSS")
    loss(states, weight, targets).backward()
    return (process_bytes("VmHWM") - before - weight.numel() * weight.element_size()) / GIB


def measure_time(args: argparse.Namespace, dtype: torch.dtype) -> dict[str, float]:
    """Seconds of forward and backward: the faster of two runs each, taken in turn."""
    inputs = make_inputs(args.time_rows, args.vocab, args.hidden, dtype)
    losses = {"naive": naive_loss, "head": head_loss(args.chunk_rows, False), "head_entropy": head_loss(args.chunk_rows, True)}
    seconds: dict[str, list[float]] = {name: [] for name in losses}
    for _ in range(2):
        for name, loss in losses.items():
            for tensor in inputs[:2]:
                tensor.grad = None
            start = time.perf_counter()
            loss(*inputs).backward()
            seconds[name].append(time.perf_counter() - start)
    return {name: min(times) for name, times in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8192, help="loss tokens of the memory measurement")
    parser.add_argument("--time-rows", type=int, default=2048, help="loss tokens of the time measurement; 0 leaves it out")
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--chunk-rows", type=int, default=256)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    args = parser.parse_args()
    dtype = getattr(torch, args.dtype)
    result: dict[str, object] = {**vars(args), "num_threads": torch.get_num_threads()}
    result["memory_beyond_gib"] = round(measure_memory(args, dtype), 3)
    if args.time_rows:
        times = measure_time(args, dtype)
        result |= {f"{name}_s": round(value, 2) for name, value in times.items()}
        result |= {f"{name}_ratio": round(times[name] / times["naive"], 3) for name in ("head", "head_entropy")}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
