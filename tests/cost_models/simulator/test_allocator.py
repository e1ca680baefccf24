"""The caching allocator's rules by hand, and its accounts over random requests; what a step reserves."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings

from paraplan.cost_models.simulator import allocator as allocator_module
from paraplan.cost_models.simulator import allocator_replay as reserved_module
from paraplan.cost_models.simulator.allocator import AllocatedBlock, CachingAllocator
from paraplan.cost_models.simulator.allocator_replay import reserved_bytes
from paraplan.cost_models.simulator.simulate import simulate_rank
from paraplan.ir.execution.rank_program import RankProgram
from tests.cost_models.rank_programs import block, call, op, own, program, random_programs, toy_costs

MIB = 1 << 20


@pytest.mark.parametrize(
    ("nbytes", "allocated", "reserved"),
    [
        (1, 512, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (0, 512, 2 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (11 * MIB, 12 * MIB, 12 * MIB),
    ],
)
def test_first_request(nbytes: int, allocated: int, reserved: int) -> None:
    allocator = CachingAllocator(1 << 40)
    allocator.allocate(nbytes)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (allocated, reserved)


def test_smallest_block_that_fits_is_split_and_merged() -> None:
    allocator = CachingAllocator(1 << 40)
    large, small = allocator.allocate(40 * MIB), allocator.allocate(24 * MIB)
    allocator.release(large)
    allocator.release(small)
    part = allocator.allocate(20 * MIB)
    assert part.address == small.address and part.after is not None and part.after.nbytes == 4 * MIB
    whole = allocator.allocate(39 * MIB + 512)
    assert whole.nbytes == 40 * MIB and whole.after is None, "what is left is not more than 1 MiB"
    assert allocator.reserved_bytes == 64 * MIB
    allocator.release(part)
    assert allocator.allocate(24 * MIB).address == small.address
    assert allocator.reserved_bytes == 64 * MIB


def test_free_segments_are_given_back_at_the_limit_only() -> None:
    allocator = CachingAllocator(100 * MIB)
    allocator.release(allocator.allocate(60 * MIB))
    held = allocator.allocate(20 * MIB)
    assert (held.nbytes, allocator.reserved_bytes) == (20 * MIB, 60 * MIB), "part of what is cached"
    allocator.release(held)
    allocator.allocate(80 * MIB)
    assert (allocator.reserved_bytes, allocator.peak_reserved_bytes) == (80 * MIB, 80 * MIB)


@pytest.mark.parametrize("seed", range(4))
def test_accounts_of_random_requests(seed: int) -> None:
    """Blocks never overlap, and what is free and allocated is what is reserved; all freed, segments are whole."""
    rng, allocator = random.Random(seed), CachingAllocator(1 << 40)
    live: list[AllocatedBlock] = []
    for _ in range(600):
        if live and rng.random() < 0.45:
            allocator.release(live.pop(rng.randrange(len(live))))
        else:
            live.append(allocator.allocate(int(2 ** rng.uniform(0, 26))))
        assert sum(block.nbytes for block in live) == allocator.allocated_bytes
    ordered = sorted(live, key=lambda block: block.address)
    assert all(a.address + a.nbytes <= b.address for a, b in pairwise(ordered))
    free = [entry[2] for pool in allocator._free.values() for entry in pool]
    assert sum(block.nbytes for block in free) + allocator.allocated_bytes == allocator.reserved_bytes
    for held in live:
        allocator.release(held)
    whole = [entry[2] for pool in allocator._free.values() for entry in pool]
    assert all(block.before is None and block.after is None for block in whole)
    assert sum(block.nbytes for block in whole) == allocator.reserved_bytes


@pytest.mark.parametrize("seed", range(4))
def test_a_touch_is_an_allocation_given_back_at_once(seed: int) -> None:
    rng, capacity = random.Random(seed), 1 << 30
    touched, plain = CachingAllocator(capacity), CachingAllocator(capacity)
    live: list[tuple[AllocatedBlock, AllocatedBlock]] = []
    for _ in range(400):
        nbytes, kind = int(2 ** rng.uniform(0, 25)), rng.random()
        if kind < 0.4:
            touched.touch(nbytes)
            plain.release(plain.allocate(nbytes))
        elif kind < 0.7 or not live:
            live.append((touched.allocate(nbytes), plain.allocate(nbytes)))
        else:
            for allocator, block in zip((touched, plain), live.pop(rng.randrange(len(live))), strict=True):
                allocator.release(block)
        accounts = [
            (a.reserved_bytes, a.allocated_bytes, a.peak_reserved_bytes, a.peak_allocated_bytes)
            for a in (touched, plain)
        ]
        assert accounts[0] == accounts[1]
        assert all(a.address == b.address for a, b in live)


@given(random_programs())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_replayed_is_what_is_simulated(monkeypatch: pytest.MonkeyPatch, given_program: RankProgram) -> None:
    """Without rounding and splitting apart, the replay's peak is the simulated one to the byte."""
    monkeypatch.setattr(allocator_module, "CUDA_BLOCK_BYTES", 1)
    made: list[CachingAllocator] = []

    def making(capacity: int) -> CachingAllocator:
        made.append(CachingAllocator(capacity))
        return made[-1]

    monkeypatch.setattr(reserved_module, "CachingAllocator", making)
    reserved = reserved_module._reserved_bytes(given_program, 1 << 40)
    peak = simulate_rank(given_program, toy_costs()).peak_bytes
    assert made[0].peak_allocated_bytes == peak <= reserved


@given(random_programs())
@settings(max_examples=60, deadline=None)
def test_less_room_is_made_do_with(given_program: RankProgram) -> None:
    """What would be reserved of any room does; so may less, down to what is alive, and then no more is taken."""
    most = reserved_bytes(given_program, 1 << 40)
    assert reserved_bytes(given_program, most) == most
    peak = simulate_rank(given_program, toy_costs()).peak_bytes
    for room in range(peak, most, max((most - peak) // 8, MIB)):
        taken = reserved_bytes(given_program, room)
        assert taken >= peak and (taken <= room or taken > peak)


def test_segments_are_given_back_for_a_plan_that_has_less_room() -> None:
    """As many bytes alive in pieces of another size: cached where there is room, and else made of what was given
    back."""
    sizes = {"a": 30 * MIB, "b": 30 * MIB, "c": 31 * MIB, "d": 31 * MIB}
    values = {
        "x": own("x", 4),
        "y": own("y", 4),
        "m": own("m", 4),
        **{name: own(name, nbytes) for name, nbytes in sizes.items()},
    }
    instrs = (op("a", "x"), op("b", "x"), op("m", "a b", "a b"), op("c", "m"), op("d", "c"), op("y", "c d", "c d m"))
    code = block("F", "x", "y", values, *instrs)
    given = program([code], {"x0": 4}, [call("F", "x0", "y0")])
    small = 2 * MIB
    assert reserved_bytes(given, 1 << 40) == (2 * 30 + 2 * 32) * MIB + small
    assert reserved_bytes(given, 64 * MIB + small) == 64 * MIB + small
    assert reserved_bytes(given, 63 * MIB + small) > 63 * MIB + small


def test_programs_that_are_equal_are_replayed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether they are one object or two, and not where the room or a step is another."""
    replayed: list[int] = []

    def counted(program: RankProgram, room: int) -> int:
        replayed.append(room)
        return len(program.steps)

    monkeypatch.setattr(reserved_module, "_reserved_bytes", counted)
    code = block("F", "x", "y", {"x": own("x", 77), "y": own("y", 99)}, op("y", "x"))

    def given(out: str) -> RankProgram:
        return program([code], {"x0": 77}, [call("F", "x0", out)])

    first = given("y0")
    assert first is not given("y0")
    for each, room in (
        (first, 1 << 33),
        (first, 1 << 33),
        (given("y0"), 1 << 33),
        (first, 1 << 34),
        (given("z0"), 1 << 33),
    ):
        reserved_bytes(each, room)
    assert replayed == [1 << 33, 1 << 34, 1 << 33]


def test_what_is_left_of_a_segment_made_at_the_limit_is_used() -> None:
    allocator = CachingAllocator(20 * MIB)
    allocator.release(allocator.allocate(10 * MIB))
    first = allocator.allocate(10 * MIB + MIB // 2)  # 10 MiB are given back for a segment of 12
    assert allocator.reserved_bytes == 12 * MIB
    second = allocator.allocate(MIB + MIB // 4)
    assert (allocator.reserved_bytes, second.address) == (12 * MIB, first.address + first.nbytes)
    for held in (first, second):
        allocator.release(held)
    assert allocator.allocate(12 * MIB).address == first.address and allocator.reserved_bytes == 12 * MIB
