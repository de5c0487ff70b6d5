"""`TraceQueue`: scored traces that wait for a batch, in the form in which checkpoints and batches hold them."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

import msgspec

from .types import QueuedTrace

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(QueuedTrace)


class Queued:
    """A queued trace in its encoded form alone, with the files it holds: thousands wait, and they are only looked
    at again when a batch or a checkpoint is made."""

    __slots__ = ("blob", "group_id", "held", "key", "n_samples", "n_tokens", "policy", "trace_id")

    def __init__(self, trace: QueuedTrace, held: tuple[str, ...]) -> None:
        self.blob, self.held = msgspec.Raw(_encoder.encode(trace)), held
        self.key = (trace.version, trace.arrival)
        self.trace_id, self.group_id, self.policy = trace.trace_id, trace.group_id, trace.policy
        self.n_tokens, self.n_samples = trace.n_tokens, len(trace.samples)

    def trace(self) -> QueuedTrace:
        """Decoded again."""
        return _decoder.decode(self.blob)

    def __lt__(self, other: Queued) -> bool:
        return self.key < other.key


class TraceQueue:
    """The oldest version first, then arrival. A batch is full with `batch_size` traces, or with the first trace
    that reaches `token_batch_size` tokens: exactly one of them is given."""

    def __init__(self, *, batch_size: int | None, token_batch_size: int | None) -> None:
        if (batch_size is None) == (token_batch_size is None):
            raise ValueError("TrainSink needs exactly one of batch_size and token_batch_size")
        size = token_batch_size if batch_size is None else batch_size
        if size is None or size < 1:
            raise ValueError(f"a batch of {size} cannot be filled: give at least 1")
        self._size = size
        self._in_tokens = batch_size is None
        self._heap: list[Queued] = []
        self._tokens = 0

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[Queued]:
        """All of them, in no order."""
        return iter(self._heap)

    @property
    def batches(self) -> int:
        """How many batches it can fill."""
        return (self._tokens if self._in_tokens else len(self._heap)) // self._size

    def push(self, queued: Queued) -> None:
        """One more."""
        heapq.heappush(self._heap, queued)
        self._tokens += queued.n_tokens

    def take(self) -> list[Queued]:
        """What makes the next batch, in its order; all of it if that is less."""
        taken: list[Queued] = []
        left = self._size
        while self._heap and left > 0:
            queued = heapq.heappop(self._heap)
            taken.append(queued)
            self._tokens -= queued.n_tokens
            left -= queued.n_tokens if self._in_tokens else 1
        return taken

    def remove(self, condition: Callable[[Queued], bool]) -> list[Queued]:
        """Take out those of which the condition is true."""
        gone, kept = list[Queued](), list[Queued]()
        for queued in self._heap:
            (gone if condition(queued) else kept).append(queued)
        if gone:
            self._heap = kept
            heapq.heapify(self._heap)
            self._tokens -= sum(queued.n_tokens for queued in gone)
        return gone
