"""A block of device work as one launch: run in the ordinary way a few times, then recorded into a graph and replayed.

Nothing here knows what the block does. A graph holds the addresses of what it reads and writes, so the owner names the
tensors that outlive the block, and a block whose tensors have moved is recorded anew. docs/cuda-graphs.md has the rules
for what may stand in a block.
"""

import gc
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from unilab_fabric.parallel.reduce import Ranks

WARM_UP = 3
"""Ordinary runs before the first recording: libraries, workspaces and NCCL's connections set themselves up in them.

They are real ticks of the run, on the stream that is recorded afterwards, so that nothing has to be undone.
"""


class CaptureRefused(RuntimeError):
    """The block does something that a graph cannot hold; the message is the device's."""


class Graph(Protocol):
    """A recording."""

    def capture(self, block: Callable[[], None]) -> None:
        """Records what `block` does, without doing it. Raises CaptureRefused."""
        ...

    def replay(self) -> None:
        """Does it."""
        ...

    def close(self) -> None:
        """Lets go of the recording."""
        ...


class CudaGraph:
    """A CUDA graph of the current stream; NCCL collectives and random numbers included."""

    def __init__(self, generators: Iterable[torch.Generator]) -> None:
        """`generators` are all that the block draws from: each replay then continues where the last one ended."""
        self._generators = tuple(generators)
        self._graph = torch.cuda.CUDAGraph()
        for generator in self._generators:
            self._graph.register_generator_state(generator)

    def capture(self, block: Callable[[], None]) -> None:
        """See Graph. The stream must not be the default one, and the block must have run on it."""
        states = [generator.get_state() for generator in self._generators]
        collecting = gc.isenabled()
        gc.disable()  # an event or a graph that is freed in the middle would end the capture
        try:
            # NCCL's own threads may call CUDA meanwhile: only this thread is held to the rules
            with torch.cuda.graph(self._graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
                block()
        except RuntimeError as error:  # torch raises no narrower kind
            for generator, state in zip(self._generators, states, strict=True):
                generator.set_state(state)
            raise CaptureRefused(str(error).partition("\n")[0]) from error
        finally:
            if collecting:
                gc.enable()

    def replay(self) -> None:
        """See Graph; returns at once."""
        self._graph.replay()

    def close(self) -> None:
        """See Graph; waits for the device first, as a graph in flight must not go."""
        torch.cuda.synchronize()
        self._graph.reset()


class GraphedBlock:
    """Runs a block that comes in a few variants, each as one launch once it is warm."""

    def __init__(self, new_graph: Callable[[], Graph], ranks: Ranks, device: torch.device) -> None:
        self._new_graph = new_graph
        self._ranks = ranks
        self._device = device
        self._graphs: dict[int, Graph] = {}
        self._addresses: list[int] = []
        self._ran = 0
        self.refused = ""
        """Why a recording was not possible, on whichever rank; from then on everything runs in the ordinary way."""

    @property
    def recorded(self) -> bool:
        """Whether the block is replayed by now."""
        return bool(self._graphs)

    def run(
        self, variant: int, variants: Sequence[int], block: Callable[[int], None], outliving: Iterable[Tensor]
    ) -> None:
        """Does `block(variant)`; `outliving` are the tensors it uses that others change or read between two runs.

        Every rank makes the same calls, as recording begins with a collective.
        """
        with self._ranks.as_one():
            self._run(variant, variants, block, outliving)

    def close(self) -> None:
        """Lets go of the graphs; before the process group is left, which waits for those that hold its collectives."""
        for graph in self._graphs.values():
            graph.close()
        self._graphs.clear()

    def _run(
        self, variant: int, variants: Sequence[int], block: Callable[[int], None], outliving: Iterable[Tensor]
    ) -> None:
        if self.refused or self._ran < WARM_UP:
            self._ran += 1
            block(variant)
            return
        addresses = [tensor.data_ptr() for tensor in outliving]
        if not self._graphs:
            self._record_together(variants, block)
        elif addresses != self._addresses:
            self._record_alone(variants, block)
        self._addresses = addresses
        if self.refused:
            block(variant)
        else:
            self._graphs[variant].replay()

    def _record_together(self, variants: Sequence[int], block: Callable[[int], None]) -> None:
        """All ranks replay, or none: a collective."""
        refusal = self._record(variants, block)
        row = torch.tensor([bool(refusal)], dtype=torch.uint8, device=self._device)
        refusing = self._ranks.gather(row, "refused captures").flatten().nonzero().flatten().tolist()
        if refusing:
            self._fall_back(refusal or f"rank {refusing[0]} could not")

    def _record_alone(self, variants: Sequence[int], block: Callable[[int], None]) -> None:
        """On this rank alone, which then meets the others' collectives either way."""
        refusal = self._record(variants, block)
        if refusal:
            self._fall_back(refusal)

    def _record(self, variants: Sequence[int], block: Callable[[int], None]) -> str:
        """Records all variants anew; returns why that was not possible, or nothing."""
        self.close()
        for variant in variants:
            graph = self._new_graph()
            try:
                graph.capture(partial(block, variant))
            except CaptureRefused as error:
                return str(error)
            self._graphs[variant] = graph
        return ""

    def _fall_back(self, reason: str) -> None:
        self.refused = reason
        self.close()
        print(
            f"note: rank {self._ranks.rank}: the updates of a tick could not be recorded into a CUDA graph and run one "
            f"kernel after the other, which is slower: {reason}",
            file=sys.stderr,
            flush=True,
        )
