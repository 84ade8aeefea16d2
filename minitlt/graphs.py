"""Captured forwards: the hundreds of launches of a decoding step, recorded once and replayed.

A CUDA graph repeats fixed launches at fixed addresses, so it wants fixed shapes. Steps come with
any number of rows; they are padded up to a bucket (`row_bucket`), and one graph is kept for each
(bucket, query length). Inputs are copied into the graph's own buffers. A padding row is a root
of token 0 at position 0 of the slot with its number: the target reserves slots up to the bucket,
so these slots are nobody's, and what a padding row writes there is never read.

Weights and cache are replaced in place, so that a graph stays valid over refreshes; only a cache
that moved makes the owner call `clear`. All graphs share one memory pool, whose size is logged.
Results live in that pool: they hold until the next call.

Left out: graphs of prefill (its shapes rarely repeat) and of more than MAX_ROWS rows, where
launches no longer matter. How to try it: `pytest tests/test_graphs.py` (on a CPU, with a capture
that runs instead of recording), `pytest -m gpu`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

MAX_ROWS = 256

Inputs = tuple[Tensor, Tensor, Tensor]
Outputs = tuple[Tensor, ...]
Forward = Callable[[Tensor, Tensor, Tensor], Outputs]
Capture = Callable[[Callable[[], Outputs]], tuple[Callable[[], Any], Outputs]]


def row_bucket(num_rows: int) -> int:
    """The next of 1, 2, 4, 8, 16, 32, 48, 64, .. rows; beyond MAX_ROWS the number itself."""
    if num_rows > MAX_ROWS:
        return num_rows
    if num_rows <= 16:
        return 1 << max(num_rows - 1, 0).bit_length()
    return -(-num_rows // 16) * 16


class CudaCapture:
    """Records what a function launches. Raises what torch raises for a look at the host."""

    def __init__(self) -> None:
        self.pool: Any = None
        self.stream = torch.cuda.Stream()  # one: the matrix library keeps a workspace per stream

    def __call__(self, run: Callable[[], Outputs]) -> tuple[Callable[[], Any], Outputs]:
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):  # compiles kernels and makes workspaces, unrecorded
            run()
        torch.cuda.current_stream().wait_stream(self.stream)
        before = torch.cuda.memory_reserved()
        graph = torch.cuda.CUDAGraph()
        self.pool = self.pool or torch.cuda.graph_pool_handle()
        # thread_local: what another thread asks of the driver does not spoil the recording.
        with torch.cuda.graph(graph, self.pool, self.stream, capture_error_mode="thread_local"):
            outputs = run()
        grown = (torch.cuda.memory_reserved() - before) / 2**20
        logger.info("captured a forward: the pool of graphs grew by %.0f MiB", grown)
        return graph.replay, outputs


class StepGraphs:
    """`forward(tokens_BT, lengths_B, parents_BT)` behind graphs; the same results, padding cut.

    forward: gives a tuple of tensors [B, T, ..] and must not look at the host.
    capture: runs a function once and returns (replay, the tensors that replay fills).
    """

    def __init__(self, forward: Forward, capture: Capture | None = None) -> None:
        self.forward, self._capture = forward, capture or CudaCapture()
        self._graphs: dict[tuple[int, int], tuple[Inputs, Callable[[], Any], Outputs]] = {}

    def __len__(self) -> int:
        return len(self._graphs)

    def clear(self) -> None:
        """Forgets all graphs; the next capture gets a pool of its own."""
        self._graphs.clear()
        if isinstance(self._capture, CudaCapture):
            self._capture.pool = None

    def __call__(self, tokens_BT: Tensor, lengths_B: Tensor, parents_BT: Tensor | None) -> Outputs:
        """parents_BT None means a chain. Slots up to `row_bucket(B)` must be reserved."""
        num_rows, num_nodes = tokens_BT.shape
        if parents_BT is None:
            chain_T = torch.arange(-1, num_nodes - 1, device=tokens_BT.device)
            parents_BT = chain_T.expand(num_rows, -1)
        if num_rows > MAX_ROWS:
            return self.forward(tokens_BT, lengths_B, parents_BT)
        key = (row_bucket(num_rows), num_nodes)
        graph = self._graphs.get(key)
        inputs = graph[0] if graph else self._buffers(*key, tokens_BT.device)
        for buffer, value, pad in zip(
            inputs, (tokens_BT, lengths_B, parents_BT), (0, 0, -1), strict=True
        ):
            buffer[:num_rows] = value
            buffer[num_rows:] = pad
        if graph is None:  # recording runs the forward, so it must see the real rows
            logger.info("graph for up to %d rows of %d nodes", *key)
            graph = self._graphs[key] = (inputs, *self._capture(lambda: self.forward(*inputs)))
        graph[1]()
        return tuple(x[:num_rows] for x in graph[2])

    @staticmethod
    def _buffers(num_rows: int, num_nodes: int, device: torch.device) -> Inputs:
        tokens = torch.zeros(num_rows, num_nodes, dtype=torch.int64, device=device)
        return tokens, tokens.new_zeros(num_rows), torch.full_like(tokens, -1)
