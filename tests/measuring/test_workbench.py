"""Guard zones, runs between them, and the memory that they take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from unittest import mock

import pytest
import torch
from support.clock.machine import FORWARD, FakeAlgorithm, FakeClock, linear
from support.races import SIZES
from support.races import fake as named
from torch import Tensor

from mucudnn.core.errors import UnavailableError, UnsoundError
from mucudnn.core.problem import ConvProblem, MemoryFormat, Operation
from mucudnn.kernels.algorithm import BaseAlgorithm, Workspace
from mucudnn.kernels.memory import peak_allocated_bytes
from mucudnn.kernels.registry import algorithm
from mucudnn.kernels.torch_convolution import reference
from mucudnn.measuring import workbench
from mucudnn.measuring.candidates import Candidate, find_candidates
from mucudnn.measuring.float64_results import Float64Results
from mucudnn.measuring.guard_zones import GUARD_BYTES, GuardedBuffer
from mucudnn.measuring.operands import operand_bytes, random_operands
from mucudnn.measuring.workbench import Workbench

BATCH = 8


@dataclass(frozen=True, slots=True)
class Rogue(BaseAlgorithm):
    """Right in all operations, with sums in ``prepared`` for BACKWARD_FILTER; then ``mischief`` has its turn."""

    mischief: Callable[[Tensor, Tensor, Tensor], object] = lambda result, prepared, scratch: None
    prepared_bytes: int = 64
    scratch_bytes_per_sample: int = 32
    mark: int = 1  # what it prepares
    name: str = "rogue"
    version: int = 1
    deterministic: bool = True

    def supports(self, problem: ConvProblem) -> None:
        return None

    def is_local(self, problem: ConvProblem) -> bool:
        return True

    def supports_micro_batch(self, problem: ConvProblem, micro_batch_size: int) -> None:
        return None

    def workspace(self, problem: ConvProblem, micro_batch_size: int) -> Workspace:
        return Workspace(self.prepared_bytes, self.scratch_bytes_per_sample * micro_batch_size)

    def internal_bytes(self, problem: ConvProblem, micro_batch_size: int) -> int:
        return 0

    def open(self, problem: ConvProblem, w: Tensor, prepared: Tensor) -> None:
        assert prepared.numel() == self.prepared_bytes
        prepared.fill_(self.mark)

    def step(self, problem: ConvProblem, x: Tensor, w: Tensor, y: Tensor, bias: Tensor | None, *rest: Tensor) -> None:
        prepared, scratch = rest
        assert (prepared.numel(), scratch.numel()) == (self.prepared_bytes, self.scratch_bytes_per_sample * x.shape[0])
        result = reference(problem, x, w, y)
        written = {Operation.FORWARD: y, Operation.BACKWARD_DATA: x, Operation.BACKWARD_FILTER: w}[problem.operation]
        written.copy_(result + written if problem.operation is Operation.BACKWARD_FILTER else result)
        self.mischief(written, prepared, scratch)
        scratch.zero_()

    def close(self, problem: ConvProblem, w: Tensor, prepared: Tensor) -> None:
        assert (prepared == self.mark).all() or not prepared.numel()


def candidate(rogue: Rogue, problem: ConvProblem = FORWARD, size: int = 2) -> Candidate:
    (found,), _ = find_candidates(problem, [rogue], [size])
    return found


def poke(tensor: Tensor, offset: int) -> None:
    """Write a byte, counted from behind the end of a dense tensor."""
    everything = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    everything[tensor.storage_offset() * tensor.itemsize + tensor.numel() * tensor.itemsize + offset] = 7


@pytest.mark.parametrize("operation", Operation)
def test_a_sound_candidate_has_its_error(operation: Operation) -> None:
    problem = FORWARD.with_operation(operation)
    assert Workbench(problem, BATCH).relative_error(candidate(Rogue(), problem)) < 1e-6


@pytest.mark.parametrize("operation", Operation)
@pytest.mark.parametrize(("index", "name"), [(0, "the result"), (1, "what it prepares"), (2, "its scratch")])
@pytest.mark.parametrize("behind", [0, GUARD_BYTES - 1])
def test_one_that_writes_behind_a_buffer_is_unsound(operation: Operation, index: int, name: str, behind: int) -> None:
    problem = FORWARD.with_operation(operation)
    rogue = Rogue(lambda *buffers: poke(buffers[index], behind - (behind and 1000)))
    bench = Workbench(problem, 2)
    with pytest.raises(UnsoundError, match=f"it wrote around {name}: 1 bytes, up to"):
        bench.relative_error(candidate(rogue, problem))
    assert bench.relative_error(candidate(Rogue(), problem)) < 1e-6


@pytest.mark.parametrize("operation", [Operation.FORWARD, Operation.BACKWARD_DATA])
def test_what_is_left_unwritten_in_any_sample_is_not_finite(operation: Operation) -> None:
    problem = FORWARD.with_operation(operation)
    before: list[Tensor] = []

    class Lazy(Rogue):
        def step(self, problem: ConvProblem, x: Tensor, w: Tensor, y: Tensor, *rest: Tensor | None) -> None:
            written = y if problem.operation is Operation.FORWARD else x
            before.append(written[1].clone())
            Rogue.step(self, problem, x, w, y, *rest)  # type: ignore[arg-type]
            written[1] = before[-1]

    with pytest.raises(UnsoundError, match="the result is not finite"):
        Workbench(problem, BATCH).relative_error(candidate(Lazy(), problem, 4))


def test_one_that_reads_what_nobody_wrote_is_not_finite() -> None:
    def read(result: Tensor, prepared: Tensor, scratch: Tensor) -> None:
        result.add_(0 * scratch.view(torch.float32)[0])

    with pytest.raises(UnsoundError, match="the result is not finite"):
        Workbench(FORWARD, 2).relative_error(candidate(Rogue(read)))


@pytest.mark.parametrize("operation", Operation)
def test_a_wrong_result_is_told_from_an_inexact_one(operation: Operation) -> None:
    problem = FORWARD.with_operation(operation)
    bench = Workbench(problem, 2)
    inexact = Rogue(lambda result, *_: result.mul_(1.05))
    assert bench.relative_error(candidate(inexact, problem)) == pytest.approx(0.05, rel=1e-3)
    with pytest.raises(UnsoundError, match=r"the result is wrong: its relative error is 0\.5"):
        bench.relative_error(candidate(Rogue(lambda result, *_: result.mul_(1.5)), problem))


@pytest.mark.parametrize("operation", Operation)
def test_streams_compute_with_what_their_algorithms_prepared(operation: Operation) -> None:
    problem, read = FORWARD.with_operation(operation), list[list[int]]()
    first, second = (
        candidate(
            Rogue(lambda _, prepared, scratch: read.append(prepared.unique().tolist()), mark=mark, name=name), problem
        )
        for mark, name in enumerate(("one", "two"), 1)
    )
    bench = Workbench(problem, BATCH)
    for one in (first, second, first, first):
        bench.stream(one)()
    bench.relative_error(second)
    read_before = len(read)
    bench.stream(second)()
    assert read[:4] + read[read_before:] == [[1], [2], [1], [1], [2]]


@pytest.mark.parametrize("operation", Operation)
def test_the_memory_of_the_search_is_bounded_as_stated(operation: Operation) -> None:
    """However many candidates there are, whatever the order of their sizes."""
    problem = ConvProblem(operation, 4, 30, 30, 8, 3, 3, padding=(1, 1))
    rogues = [
        Rogue(name=f"r{i}", prepared_bytes=(i + 1) * 2**19 * (i < 3), scratch_bytes_per_sample=i * 2**18)
        for i in range(12)
    ]
    candidates, _ = find_candidates(problem, rogues, (1, 2, 4, BATCH))
    operands = random_operands(problem, BATCH)
    comparing_bytes = Float64Results(problem, operands).peak_bytes()

    def search() -> None:
        bench = Workbench(problem, BATCH)
        streams = []
        for one in candidates:
            bench.relative_error(one)
            bench.set_up(one)()
            streams.append(bench.stream(one))
        for stream in [*streams, *reversed(streams)]:
            stream()

    peak = peak_allocated_bytes(search)
    prepared = [rogue.prepared_bytes for rogue in rogues if rogue.prepared_bytes]
    if operation is Operation.BACKWARD_FILTER:
        prepared = [max(prepared)]
    scratch = max(one.workspace.scratch_bytes for one in candidates)
    guards = 2 * GUARD_BYTES * (4 + len(prepared))
    inside = peak_allocated_bytes(partial(reference, problem, operands.x, operands.w, operands.y))  # of the rogues
    assert peak <= operand_bytes(problem, BATCH) + scratch + sum(prepared) + guards + comparing_bytes + inside
    assert peak >= scratch


def fake(**settings: object) -> FakeAlgorithm:
    return FakeAlgorithm("one", FakeClock(), linear(0.01), **settings)  # type: ignore[arg-type]


def allow(monkeypatch: pytest.MonkeyPatch, samples: int) -> None:
    """Memory for the tensors of so many samples; to compare their results takes none."""
    monkeypatch.setattr(workbench.Float64Results, "peak_bytes", lambda self: 0)
    monkeypatch.setattr(workbench, "available_bytes", lambda: operand_bytes(FORWARD, samples))


@pytest.mark.parametrize(("samples", "measured"), [(BATCH, BATCH), (7, 4), (3, 2), (1, 1)])
def test_where_the_mini_batch_does_not_fit_fewer_samples_are_measured_on(
    monkeypatch: pytest.MonkeyPatch, samples: int, measured: int
) -> None:
    allow(monkeypatch, samples)
    bench = Workbench(FORWARD, BATCH)
    assert bench.operands.batch_size == measured
    candidates, _ = find_candidates(FORWARD, [fake()], (1, BATCH))
    bench.stream(candidates[0])()
    assert bench.slice_count(candidates[0]) == measured
    if measured < BATCH:
        with pytest.raises(MemoryError, match=f"for the tensors of {measured} samples only"):
            bench.stream(candidates[1])


def test_where_not_one_sample_fits_the_error_says_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    allow(monkeypatch, 0)
    with pytest.raises(UnavailableError, match=r"one sample takes 1.*not enough free memory on cpu.*free some"):
        Workbench(FORWARD, BATCH)


@pytest.mark.parametrize("operation", Operation)
@pytest.mark.parametrize("k", [8, 10])  # oneDNN pads 10 to whole blocks
def test_a_proof_counts_what_a_run_for_counting_does(operation: Operation, k: int) -> None:
    problem = ConvProblem(operation, c=6, h=20, w=20, k=k, r=3, s=3, padding=(1, 1))
    (candidate,), _ = find_candidates(problem, [algorithm("native")], [BATCH])
    with mock.patch.object(workbench.time, "perf_counter", iter((10.0, 13.0)).__next__):
        proof = Workbench(problem, BATCH).proof(candidate)
    assert proof.internal_bytes == candidate.count_scratch_bytes() > 0
    assert proof.relative_error < 1e-5
    assert proof.time_s == 3.0


# Buffers between guard zones: what is written around them is noticed, and they never exist twice.


SIZE = 100


@pytest.fixture
def buffer() -> GuardedBuffer:
    buffer = GuardedBuffer("cpu")
    buffer.require(1000)
    buffer.arm(SIZE)
    return buffer


def write(buffer: GuardedBuffer, start: int, count: int) -> None:
    """``start``: from the begin of the part."""
    everything = torch.empty(0, dtype=torch.uint8).set_(buffer.part(SIZE).untyped_storage())
    everything[GUARD_BYTES + start : GUARD_BYTES + start + count] = 0


@pytest.mark.parametrize(
    ("start", "count", "where"),
    [
        (-1, 1, "1 bytes, from 1 bytes before the begin"),
        (-GUARD_BYTES, 8, f"8 bytes, from {GUARD_BYTES} bytes before the begin"),
        (SIZE, 4, "4 bytes, up to 4 bytes behind the end"),  # within the buffer: it is the part that is guarded
        (SIZE + GUARD_BYTES - 1, 1, f"1 bytes, up to {GUARD_BYTES} bytes behind the end"),
    ],
)
def test_every_byte_of_both_zones_is_watched(buffer: GuardedBuffer, start: int, count: int, where: str) -> None:
    write(buffer, start, count)
    assert buffer.trespass(SIZE) == where
    buffer.arm(SIZE)
    assert buffer.trespass(SIZE) is None


def test_what_is_not_supported_is_kept_with_the_reason_and_never_run() -> None:
    never, partly = named("never", unsupported="no such filter"), named("partly", unsupported_sizes=[2])
    candidates, failures = find_candidates(FORWARD, [never, partly], SIZES)
    assert [c.micro_config.micro_batch_size for c in candidates] == [1, 4, 8]
    assert [(f.micro_config.algorithm, f.reason) for f in failures] == [
        ("never", "no such filter"),
        ("partly", "not this size"),
    ]
    assert not never.sizes_run


def test_undivided_torch_is_a_candidate_whatever_is_said_of_slices() -> None:
    candidates, _ = find_candidates(FORWARD, [named("native", unsupported_sizes=SIZES)], SIZES)
    assert [c.micro_batch_size for c in candidates] == [8]


def test_a_stream_goes_through_fresh_slices_and_wraps_around() -> None:
    one = named("one")
    candidates, _ = find_candidates(FORWARD, [one], [2])
    next_step = Workbench(FORWARD, 5).stream(candidates[0])
    for _ in range(3):
        next_step()
    sample = FORWARD.c * FORWARD.h * FORWARD.w
    assert one.offsets_run == [0, 2 * sample, 0]


def test_operands_are_random_numbers_in_the_problem_s_format_and_leave_the_global_generator_alone() -> None:
    problem = ConvProblem(
        Operation.FORWARD, c=4, h=7, w=6, k=5, r=3, s=3, dtype="bfloat16", memory_format=MemoryFormat.CHANNELS_LAST
    )
    before = torch.random.get_rng_state()
    operands = random_operands(problem, 3)
    assert torch.equal(before, torch.random.get_rng_state())
    assert operands.x.shape == problem.x_shape(3)
    assert operands.y.shape == problem.y_shape(3)
    for tensor in (operands.x, operands.w, operands.y):
        assert tensor.dtype is torch.bfloat16
        assert tensor.is_contiguous(memory_format=torch.channels_last)
        assert (tensor != 0).float().mean() > 0.9
