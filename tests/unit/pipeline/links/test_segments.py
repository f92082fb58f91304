"""Segments of a link: when one is used again, what does not fit, and what the other end may not say."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from mmap import mmap

import numpy as np
import pytest
from doll.errors import DollError
from doll.pipeline.links import frames
from doll.pipeline.links.frames import Array, ArraySpec, LinkFrameError
from doll.pipeline.links.link import StageLink, shared_pair
from doll.pipeline.links.segments import LinkSegments, segments_pair

PAGE = 4096
Pair = tuple[LinkSegments, LinkSegments]


@pytest.fixture
def pair() -> Iterator[Pair]:
    ends = segments_pair(2, 4 * PAGE, min_bytes=8)
    yield ends
    for end in ends:
        end.forget()


def specs_of(*arrays: Array) -> list[ArraySpec]:
    return [ArraySpec(array.dtype, array.shape) for array in arrays]


def numbers(value: int) -> Array:
    return np.full(100, value, np.int64)


def test_arrays_are_aligned_views_of_the_memory(pair: Pair) -> None:
    arrays: list[Array] = [
        np.arange(3, dtype=np.uint8),
        np.empty((0, 4)),
        np.array(1.5),
        np.ones((2, 3), np.float16),
        numbers(1),
    ]
    got = pair[1].load(pair[0].store(arrays), specs_of(*arrays))
    for a, b in zip(got, arrays, strict=True):
        np.testing.assert_array_equal(a, b)
        assert (a.dtype, a.shape, a.flags.owndata) == (b.dtype, b.shape, False)
        assert a.ctypes.data % 64 == 0


@pytest.mark.parametrize("kept", ["array", "slice", "reshaped", "memoryview"])
def test_a_segment_is_used_again_when_its_last_view_is_gone(pair: Pair, kept: str) -> None:
    places = [pair[0].store([numbers(1), numbers(2)]), pair[0].store([numbers(3)])]
    assert sorted(places) == [1, 2]
    first, second = pair[1].load(places[0], specs_of(numbers(1), numbers(2)))
    view = {"array": second, "slice": second[7:], "reshaped": second.reshape(2, 50).T, "memoryview": second.data}[kept]
    del first, second
    assert pair[0].store([numbers(4)]) == 0
    assert np.asarray(view).ravel()[0] == 2
    del view
    assert pair[0].store([numbers(4)]) == places[0]
    assert pair[0].store([numbers(5)]) == 0


def test_the_memory_of_the_last_segment_is_used_first(pair: Pair) -> None:
    places = set()
    for value in range(10):
        place = pair[0].store([numbers(value)])
        assert pair[1].load(place, specs_of(numbers(value)))[0][0] == value
        places.add(place)
    assert places == {1, 2}, "and the others only when the returns have not been seen"


def test_both_directions_have_segments_of_their_own(pair: Pair) -> None:
    here = pair[1].load(pair[0].store([numbers(1)]), specs_of(numbers(1)))[0]
    there = pair[0].load(pair[1].store([numbers(2)]), specs_of(numbers(2)))[0]
    here += 10
    assert (here[0], there[0]) == (11, 2)


@pytest.mark.parametrize(
    ("size", "is_stored"), [(0, False), (7, False), (8, True), (4 * PAGE, True), (4 * PAGE + 1, False)]
)
def test_what_is_small_or_does_not_fit_is_not_stored(pair: Pair, size: int, is_stored: bool) -> None:
    assert bool(pair[0].store([np.zeros(size, np.uint8)])) == is_stored


def test_a_process_that_was_forked_returns_nothing(pair: Pair) -> None:
    for value in range(2):
        pair[0].store([numbers(value)])
    views = [pair[1].load(place, specs_of(numbers(0))) for place in (1, 2)]
    pid = os.fork()
    if not pid:
        views.clear()
        os._exit(0)
    os.waitpid(pid, 0)
    assert pair[0].store([numbers(4)]) == 0
    views.clear()
    assert pair[0].store([numbers(4)])


def test_views_outlive_the_link(pair: Pair) -> None:
    (view,) = pair[1].load(pair[0].store([numbers(5)]), specs_of(numbers(5)))
    for end in pair:
        end.forget()
    assert view.sum() == 500
    del view  # with nobody to tell


# --- what the other end says


def test_places_that_cannot_be_are_refused(pair: Pair) -> None:
    place = pair[0].store([numbers(1)])
    for wrong in (3, 65535):
        with pytest.raises(
            LinkFrameError, match=f"expected a free segment of 2, got number {wrong - 1}, which does not"
        ):
            pair[1].load(wrong, specs_of(numbers(1)))
    with pytest.raises(LinkFrameError, match="expected arrays in a segment of 16384 bytes, got 16392"):
        pair[1].load(place, [ArraySpec(np.dtype(np.float64), (2049,))])
    view = pair[1].load(place, specs_of(numbers(1)))
    with pytest.raises(LinkFrameError, match=f"got number {place - 1}, which is in use"):
        pair[1].load(place, specs_of(numbers(1)))
    assert view[0][0] == 1


@pytest.mark.parametrize("returned", [b"\x00", b"\x02", b"\xff"])
def test_returns_that_cannot_be_are_refused(returned: bytes) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        sender = LinkSegments(ours, mmap(-1, 2 * PAGE), mmap(-1, 2 * PAGE), segment_bytes=PAGE, min_bytes=8)
        while place := sender.store([numbers(1)]):
            last = place - 1
        assert last == 1
        theirs.sendall(b"\x00")
        assert sender.store([numbers(1)]) == 1
        theirs.sendall(b"\x00" + returned)
        with pytest.raises(LinkFrameError, match=f"expected the return of a segment in use, of 2, got {returned[0]}"):
            sender.store([numbers(1)])
        sender.forget()


@pytest.mark.parametrize(("count", "size"), [(0, 1), (256, 1), (1, 0)])
def test_impossible_pools_are_refused(count: int, size: int) -> None:
    with pytest.raises(ValueError, match="expected 1 to 255 segments of at least 1 byte"):
        segments_pair(count, size)


def test_a_pool_beyond_the_address_space_says_what_to_do() -> None:
    with pytest.raises(DollError, match="use fewer or smaller segments"):
        segments_pair(1, 1 << 60)


# --- on a link


def test_a_frame_that_names_a_wrong_segment_ends_the_link() -> None:
    one, other = shared_pair(1, PAGE, min_bytes=8)
    raw = socket.socket(fileno=os.dup(one.fileno()))
    with raw:
        raw.sendall(frames.at_place(frames.encode(b"", [numbers(1)], 1 << 20), 9))
        with pytest.raises(LinkFrameError, match="expected a free segment of 1, got number 8"):
            other.receive()
        assert raw.recv(1) == b""
    one.close()
    other.close()


def is_in_a_segment(array: Array) -> bool:
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array.base is not None


def test_a_receiver_that_keeps_everything_gets_what_does_not_fit_through_the_socket() -> None:
    one, other = shared_pair(3, 4 * PAGE, min_bytes=8)
    kept = []
    for value in range(6):
        one.send(b"", [numbers(value)])
        kept += other.receive()[1]
    assert [is_in_a_segment(array) for array in kept] == [True] * 3 + [False] * 3
    assert [array[0] for array in kept] == list(range(6))
    kept.clear()
    one.send(b"", [numbers(7)])
    assert is_in_a_segment(other.receive()[1][0])
    one.close()
    other.close()


def test_a_link_without_segments_refuses_them() -> None:
    ends = [StageLink(end) for end in socket.socketpair()]
    one, other = shared_pair(1, PAGE, min_bytes=8)
    one.send(b"", [numbers(1)])
    data = os.read(other.fileno(), 1000)
    os.write(ends[0].fileno(), data)
    with pytest.raises(LinkFrameError, match=r"expected the arrays in the frame \(place 0\), got place 1"):
        ends[1].receive()
    for end in (*ends, one, other):
        end.close()
