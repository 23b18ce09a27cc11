"""What does it cost to average gradients over ranks: in one piece, tensor by tensor, or in DDP's buckets?

    python benchmarks/collectives.py [--ranks 2] [--json PATH] [--quick]

As many processes as ranks, each on a core of its own where there are as many, or on a CUDA device of its own with NCCL.
For 1e3 to 1e7 parameters, split as the weights, biases and norms of four layers, they average:

- per parameter, the reference: an all-reduce for each tensor;
- DDP's buckets: tensors in reverse order copied into buckets of 1 MiB, then 25 MiB each, one all-reduce for each, and
  copied back. DDP starts them during the backward pass; here nothing runs beside them;
- one piece: the flat gradient, as a job on several machines or on CUDA does it;
- shared memory: the flat gradient, as ranks on the CPUs of one machine do it.
"""

import argparse
import json
import math
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from shared.timing import machine, table
from torch import Tensor

from unilab_fabric.parallel.reduce import Ranks
from unilab_fabric.parallel.shared import open_shared_sum

REFERENCE = "per parameter"
SIZES = (1_000, 10_000, 100_000, 1_000_000, 10_000_000)
LAYERS = 4
BUCKETS = (1 << 20, 25 << 20)
"""Bytes of DDP's first bucket and of the others."""
DEADLINE_S = 300.0
Times = dict[str, list[float]]


def parameter_sizes(total: int) -> list[int]:
    """Sizes of about as many parameters: a square matrix, a bias and two vectors of a norm, in each layer."""
    width = max(1, round(math.sqrt(2.25 + total / LAYERS) - 1.5))
    return LAYERS * [width * width, width, width, width]


def buckets(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """DDP's: the last parameters come first, as their gradients do; a bucket is full before it is too large."""
    found: list[list[Tensor]] = [[]]
    room = BUCKETS[0]
    for tensor in reversed(tensors):
        if found[-1] and tensor.nbytes > room:
            found.append([])
            room = BUCKETS[1]
        found[-1].append(tensor)
        room -= tensor.nbytes
    return found


def reduce_bucket(bucket: Sequence[Tensor]) -> None:
    """Copies in, all-reduce, copies out."""
    whole = torch.cat([tensor.flatten() for tensor in bucket])
    dist.all_reduce(whole)
    for tensor, part in zip(bucket, torch.split(whole, [tensor.numel() for tensor in bucket]), strict=True):
        tensor.copy_(part.view_as(tensor))


def candidates(flat: Tensor, sizes: Sequence[int], ranks: Ranks) -> dict[str, Callable[[], None]]:
    """What is timed, by name: each averages `flat` over ranks."""
    tensors = list(torch.split(flat, list(sizes)))
    packed = buckets(tensors)

    def per_parameter() -> None:
        for tensor in tensors:
            dist.all_reduce(tensor)
        flat.div_(ranks.world_size)

    def in_buckets() -> None:
        for bucket in packed:
            reduce_bucket(bucket)
        flat.div_(ranks.world_size)

    alone = replace(ranks, shared=None)
    ways = {REFERENCE: per_parameter, "DDP's buckets": in_buckets, "one piece": lambda: alone.mean_(flat, "gradient")}
    if ranks.shared is not None:
        ways["shared memory"] = lambda: ranks.mean_(flat, "gradient")
    return ways


def together(calls: Mapping[str, Callable[[], None]], repeats: int, seconds: float, device: torch.device) -> Times:
    """Milliseconds of a call, one figure for each repeat of about `seconds` [s]; all ranks make the same calls."""
    counts = {}
    for name, call in calls.items():
        call()
        took = _timed(call, 2, device) / 2
        agreed = torch.tensor(min(max(seconds / took, 2.0), 5000.0), device=device)  # a float on every rank
        dist.broadcast(agreed, 0)
        counts[name] = int(agreed)
    times: Times = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            dist.barrier()
            times[name].append(1e3 * _timed(call, counts[name], device) / counts[name])
    return times


def _timed(call: Callable[[], None], count: int, device: torch.device) -> float:
    start = time.perf_counter()
    for _ in range(count):
        call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def work(rank: int, size: int, cuda: bool, folder: str, repeats: int, seconds: float, totals: Sequence[int]) -> None:
    """One process; rank 0 leaves the times in the folder."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    backend, store = "nccl" if cuda else "gloo", f"file://{folder}/store"
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=size)
    ranks = Ranks(rank, size, on_cuda=cuda)
    if not cuda:
        ranks = replace(ranks, shared=open_shared_sum(rank, size, ranks.gather))
    found = {}
    for total in totals:
        sizes = parameter_sizes(total)
        flat = torch.zeros(sum(sizes), device=device)
        found[total] = together(candidates(flat, sizes, ranks), repeats, seconds, device)
    if rank == 0:
        (Path(folder) / "times.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def measure(size: int, cuda: bool, repeats: int, seconds: float, totals: Sequence[int]) -> dict[int, Times]:
    """Starts the processes and ends them all. Exits where one fails."""
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            spawn.Process(target=work, args=(rank, size, cuda, folder, repeats, seconds, totals))
            for rank in range(size)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + DEADLINE_S
        while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
            if any(process.exitcode for process in processes):
                break
            time.sleep(0.05)
        failed = [rank for rank, process in enumerate(processes) if process.exitcode != 0]
        for process in processes:
            process.kill()
            process.join()
        if failed:
            sys.exit(f"error: the processes of ranks {failed} have failed or not ended in time")
        found = json.loads((Path(folder) / "times.json").read_text())
    return {int(total): times for total, times in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the numbers there")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="few short repeats: shows that it runs, not how fast")
    arguments = parser.parse_args()
    if arguments.ranks < 2:
        parser.error(f"--ranks is {arguments.ranks}; allowed: 2 or more")
    cuda = torch.cuda.device_count() >= arguments.ranks
    described = machine()
    transport = "NCCL" if cuda else "gloo"
    print(f"{described['processor']}, {described['device']}, torch {described['torch']}")
    print(f"{arguments.ranks} ranks, {transport}")
    repeats, seconds, totals = (2, 0.02, SIZES[:2]) if arguments.quick else (5, 0.3, SIZES)
    numbers = {}
    for total, times in measure(arguments.ranks, cuda, repeats, seconds, totals).items():
        count = sum(parameter_sizes(total))
        numbers[total] = table(f"{count:,} parameters, {4 * count / 1e6:.3g} MB", times, REFERENCE)
    if arguments.json is not None:
        result = {**described, "ranks": arguments.ranks, "transport": transport, "sizes": numbers}
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
