"""Runs a function in several gloo processes, one for each rank."""

import multiprocessing
import os
import tempfile
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

from unilab_fabric.parallel.reduce import Ranks


def run_ranks(function, arguments, *, deadline_s=90.0):
    """`function(ranks, *arguments[rank])` in one process for each entry of `arguments`; what each returned, in order.

    `function` is at the top level of a module. A rank that raises or dies, or the deadline, ends all of them and
    fails the test with the traceback.
    """
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            spawn.Process(target=_rank, args=(Path(folder), rank, len(arguments), function, own))
            for rank, own in enumerate(arguments)
        ]
        try:
            for process in processes:
                process.start()
            _join(processes, Path(folder), time.monotonic() + deadline_s)
        finally:
            for process in processes:
                process.kill()
                process.join()
        return [torch.load(_result(Path(folder), rank), weights_only=False) for rank in range(len(processes))]


def _join(processes, folder, deadline):
    while any(process.exitcode is None for process in processes):
        failed = [rank for rank, process in enumerate(processes) if process.exitcode not in (None, 0)]
        if failed or time.monotonic() > deadline:
            break
        time.sleep(0.01)
    codes = [process.exitcode for process in processes]
    if codes != [0] * len(processes):
        errors = [path.read_text() for path in sorted(folder.glob("*.error"))]
        raise AssertionError(f"exit codes of the ranks: {codes} (None: still running)\n" + "\n".join(errors))


def _rank(folder, rank, world_size, function, arguments):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # needs no name resolution
    torch.set_num_threads(1)
    try:
        store = dist.FileStore(str(folder / "store"), world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        try:
            result = function(Ranks(rank, world_size), *arguments)
            dist.barrier()  # none leaves while another still needs it
        finally:
            dist.destroy_process_group()
    except BaseException:
        (folder / f"{rank}.error").write_text(f"rank {rank}:\n{traceback.format_exc()}")
        raise
    torch.save(result, _result(folder, rank))


def _result(folder, rank):
    return folder / f"{rank}.result"
