"""What every kind of link between stages must do, with real sockets, threads and processes."""

from __future__ import annotations

import os
import random
import select
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from doll.pipeline.links import frames, tcp
from doll.pipeline.links.frames import MAX_ARRAYS, MAX_HEADER_BYTES, Array, LinkFrameError
from doll.pipeline.links.link import LinkClosedError, StageLink, shared_pair, socket_pair
from doll.pipeline.links.tcp import Address, Claim
from waiting import WAIT_TIMEOUT_S

BIG = 12_500_000  # numbers of 4 bytes: far more than the buffers of any socket
HUGE = np.zeros(2 * BIG, np.float32)  # more than the largest segment


Pair = tuple[StageLink, StageLink]


def tcp_pair(max_message_bytes: int = 1 << 30) -> Pair:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    return StageLink(one, max_message_bytes), StageLink(other, max_message_bytes)


def authenticated_pair(max_message_bytes: int = 1 << 30) -> Pair:
    """Both ends of a connection that has passed the handshake of `doll.pipeline.links.tcp`."""
    secret = b"s" * tcp.SECRET_BYTES
    door = tcp.Door(Address("127.0.0.1", 0), lambda: secret, lambda claim: "", silent_s=2 * WAIT_TIMEOUT_S)
    one = tcp.connect(door.address, secret, Claim("job", 0, 1, "gang", False), 2 * WAIT_TIMEOUT_S)
    _, other = door.links.get(timeout=WAIT_TIMEOUT_S)
    door.close()
    for end in (one, other):
        end._max_message_bytes = max_message_bytes
    return one, other


def small_shared_pair(max_message_bytes: int = 1 << 30) -> Pair:
    """Everything that fits goes into segments, which are few and too small for the big messages."""
    return shared_pair(3, 1 << 20, max_message_bytes, min_bytes=0)


def large_shared_pair(max_message_bytes: int = 1 << 30) -> Pair:
    """One big message fits, and those after it do not."""
    return shared_pair(1, 5 * BIG, max_message_bytes)


PAIRS: dict[str, Callable[..., Pair]] = {
    "unix": socket_pair,
    "tcp": tcp_pair,
    "authenticated tcp": authenticated_pair,
    "small segments": small_shared_pair,
    "large segments": large_shared_pair,
}


@pytest.fixture(params=PAIRS)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    ends = PAIRS[request.param]()
    yield ends
    for end in ends:
        end.close()


@pytest.fixture
def pool(pair: Pair) -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as executor:
        yield executor
        for end in pair:  # a thread that still waits in a failed test ends
            end.close()


def assert_same(got: list[Array], sent: list[Any]) -> None:
    assert [(a.shape, a.dtype) for a in got] == [(np.asarray(a).shape, np.asarray(a).dtype) for a in sent]
    for a, b in zip(got, sent, strict=True):
        np.testing.assert_array_equal(a, b)
        assert a.flags.writeable
        assert a.flags.c_contiguous


def test_messages_come_in_order_in_both_directions(pair: Pair) -> None:
    for number in range(50):
        for end in pair:
            end.send(b"%d" % number, [np.full((2, number), number, np.float32), np.arange(number)])
    for end in pair[::-1]:
        for number in range(50):
            header, arrays = end.receive()
            assert header == b"%d" % number
            assert_same(arrays, [np.full((2, number), number, np.float32), np.arange(number)])


ROWS = np.arange(60, dtype=np.float32).reshape(3, 4, 5)


@pytest.mark.parametrize(
    "arrays",
    [
        [],
        [np.array(2.5, np.float32)],
        [np.array(7), np.array(8)],
        [np.empty((0,), np.float32)],
        [np.empty((3, 0, 2)), np.ones(3, np.int64), np.empty((0, 5), np.int32)],
        [ROWS.T],
        [ROWS[:, ::2, 1], ROWS[::-1], ROWS[..., None, 3]],
        [np.broadcast_to(np.float32(1.5), (4, 3))],
        [np.ones((1,) * frames.MAX_DIMENSIONS, np.uint8)],
        [np.ones(2, dtype) for dtype in frames.DTYPES],
        [np.array([np.nan, -0.0, np.inf], np.float16)],
        [np.zeros(number) for number in range(MAX_ARRAYS)],
    ],
    ids=lambda arrays: " ".join(str(a.shape) for a in arrays) or "none",
)
def test_arrays_of_any_shape_arrive_as_they_were(pair: Pair, arrays: list[Array]) -> None:
    pair[0].send(b"", arrays)
    header, got = pair[1].receive()
    assert header == b""
    assert_same(got, arrays)


def test_the_other_byte_order_is_converted(pair: Pair) -> None:
    pair[0].send(b"", [np.array([1.5, 2], ">f4")])
    (got,) = pair[1].receive()[1]
    assert got.dtype == np.dtype("<f4")
    assert got.tolist() == [1.5, 2]


def test_arrays_may_change_after_sending_and_received_ones_stay(pair: Pair) -> None:
    array = np.zeros(1000, np.float32)
    kept = []
    for number in range(20):
        array[:] = number
        pair[0].send(b"", [array])
        kept += pair[1].receive()[1]
    array[:] = -1
    assert [a.tolist() for a in kept] == [[number] * 1000 for number in range(20)]


@pytest.mark.slow
def test_both_ends_send_more_than_buffers_hold_at_the_same_time(pair: Pair, pool: ThreadPoolExecutor) -> None:
    arrays = [np.arange(BIG, dtype=np.float32), np.arange(BIG, dtype=np.float32)[::-1]]
    begin = threading.Barrier(4)

    def send(end: StageLink, array: Array) -> None:
        begin.wait()
        for number in range(2):
            end.send(b"%d" % number, [array, array[:3]])

    def receive(end: StageLink) -> list[tuple[bytes, list[Array]]]:
        begin.wait()
        return [end.receive() for _ in range(2)]

    senders = [pool.submit(send, end, array) for end, array in zip(pair, arrays, strict=True)]
    receivers = [pool.submit(receive, end) for end in pair[::-1]]
    for sender, receiver, array in zip(senders, receivers, arrays, strict=True):
        sender.result(WAIT_TIMEOUT_S)
        for number, (header, got) in enumerate(receiver.result(WAIT_TIMEOUT_S)):
            assert header == b"%d" % number
            assert_same(got, [array, array[:3]])


def test_messages_of_several_threads_do_not_mix(pair: Pair, pool: ThreadPoolExecutor) -> None:
    def send(thread: int) -> None:
        for number in range(20):
            pair[0].send(b"%d %d" % (thread, number), [np.full(200_000, 100 * thread + number, np.float32)])

    senders = [pool.submit(send, thread) for thread in range(3)]
    seen: dict[int, int] = {}
    for _ in range(60):
        header, (array,) = pair[1].receive()
        thread, number = map(int, header.split())
        assert number == seen.get(thread, -1) + 1
        seen[thread] = number
        assert (array == 100 * thread + number).all()
    for sender in senders:
        sender.result(WAIT_TIMEOUT_S)


@pytest.mark.parametrize(
    ("header", "arrays", "expected"),
    [
        (bytes(MAX_HEADER_BYTES + 1), [], "at most 65536 bytes of header, got 65537"),
        (b"", [np.zeros(1)] * (MAX_ARRAYS + 1), "at most 130 arrays, got 131"),
        (b"", [np.zeros((1,) * (frames.MAX_DIMENSIONS + 1))], "at most 8 dimensions, got 9"),
        (b"", [np.zeros(2, np.uint64)], "got uint64: convert"),
        (b"", [np.array([None])], "got object: convert"),
    ],
)
def test_what_is_beyond_a_limit_is_refused_and_the_link_goes_on(
    pair: Pair, header: bytes, arrays: list[Array], expected: str
) -> None:
    with pytest.raises(LinkFrameError, match=expected):
        pair[0].send(header, arrays)
    pair[0].send(b"next")
    assert pair[1].receive() == (b"next", [])


@pytest.mark.parametrize("kind", PAIRS)
def test_the_limit_of_a_message_counts_all_arrays(kind: str) -> None:
    one, other = PAIRS[kind](800)
    one.send(b"", [np.zeros(60), np.zeros(40)])
    assert len(other.receive()[1]) == 2
    with pytest.raises(LinkFrameError, match="at most 800 bytes of arrays, got 808"):
        one.send(b"", [np.zeros(60), np.zeros(41)])
    one.close()
    other.close()


# --- the end of a link


def test_what_came_before_the_end_is_received(pair: Pair) -> None:
    pair[0].send(b"last", [ROWS])
    pair[0].close()
    pair[0].close()
    header, arrays = pair[1].receive()
    assert header == b"last"
    assert_same(arrays, [ROWS])
    for _ in range(2):
        with pytest.raises(LinkClosedError, match="the other end of the link, which is gone: it has closed"):
            pair[1].receive()
    for call in (pair[0].receive, lambda: pair[0].send(b"")):
        with pytest.raises(LinkClosedError, match="this end is closed"):
            call()
    assert pair[0].fileno() == -1


def test_a_sender_learns_that_the_other_end_is_closed(pair: Pair) -> None:
    pair[1].close()

    def send_on() -> None:
        for _ in range(1000):  # TCP learns it from the answer to the first
            pair[0].send(b"", [np.zeros(10_000)])

    with pytest.raises(LinkClosedError, match="which is gone"):
        send_on()


def test_close_wakes_threads_that_wait(pair: Pair, pool: ThreadPoolExecutor) -> None:
    receiver = pool.submit(pair[0].receive)
    sender = pool.submit(pair[0].send, b"", [HUGE])
    select.select([pair[1].fileno()], [], [])  # the sender has begun
    pair[0].close()
    for waiting in (sender, receiver):
        with pytest.raises(LinkClosedError):
            waiting.result(WAIT_TIMEOUT_S)
    with pytest.raises(LinkClosedError, match="in the middle of a message"):
        pair[1].receive()


def test_readable_means_that_receive_returns(pair: Pair) -> None:
    def is_readable() -> bool:
        return bool(select.select([pair[1].fileno()], [], [], 0)[0])

    assert not is_readable()
    for _ in range(2):
        pair[0].send(b"one", [ROWS])
    select.select([pair[1].fileno()], [], [])
    pair[1].receive()
    assert is_readable(), "the second message must not be in a buffer of this end"
    pair[1].receive()
    assert not is_readable()
    pair[0].close()
    select.select([pair[1].fileno()], [], [])
    with pytest.raises(LinkClosedError):
        pair[1].receive()


class _InterruptedError(Exception):
    pass


def test_nothing_follows_a_message_that_was_cut_by_a_signal(pair: Pair, pool: ThreadPoolExecutor) -> None:
    def interrupt(signum: int, frame: object) -> None:
        raise _InterruptedError

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:

        def when_begun() -> None:
            select.select([pair[1].fileno()], [], [])
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

        pool.submit(when_begun)
        with pytest.raises(_InterruptedError):
            pair[0].send(b"", [HUGE])
    finally:
        signal.signal(signal.SIGUSR1, before)
    with pytest.raises(LinkClosedError):
        pair[0].send(b"next")
    with pytest.raises(LinkClosedError, match="in the middle of a message"):
        pair[1].receive()


@pytest.mark.slow
def test_a_signal_that_raises_nothing_cuts_nothing(pool: ThreadPoolExecutor, pair: Pair) -> None:
    handled = threading.Event()
    before = signal.signal(signal.SIGUSR1, lambda signum, frame: handled.set())
    sent = np.arange(2 * BIG, dtype=np.float32)
    try:

        def receive() -> tuple[bytes, list[Array]]:
            select.select([pair[1].fileno()], [], [])
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
            assert handled.wait(WAIT_TIMEOUT_S), "the sender was not interrupted"
            return pair[1].receive()

        receiver = pool.submit(receive)
        pair[0].send(b"", [sent])
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert_same(receiver.result(WAIT_TIMEOUT_S)[1], [sent])


def test_a_sender_that_may_not_wait_ends_the_link(pair: Pair) -> None:
    for end in pair:
        end.limit_sending(0.05)
    with pytest.raises(LinkClosedError, match="it has taken nothing for as long as a sender waits"):
        pair[0].send(b"", [HUGE])
    with pytest.raises(LinkClosedError):
        pair[0].send(b"next")
    with pytest.raises(LinkClosedError, match="in the middle of a message"):
        pair[1].receive()


def test_a_receiver_that_may_not_wait_ends_the_link(pair: Pair) -> None:
    pair[1].limit_receiving(0.05)
    with pytest.raises(LinkClosedError, match="it has sent nothing for as long as a receiver waits"):
        pair[1].receive()
    with pytest.raises(LinkClosedError):
        pair[1].receive()
    with pytest.raises(LinkClosedError, match="which is gone"):
        pair[0].receive()


def test_a_message_that_may_not_wait_is_sent_or_left_out(pair: Pair, pool: ThreadPoolExecutor) -> None:
    assert pair[0].try_send(b"now")
    assert pair[1].receive() == (b"now", [])
    sender = pool.submit(pair[0].send, b"", [HUGE])
    select.select([pair[1].fileno()], [], [])  # the sender has begun
    assert not pair[0].try_send(b"never")
    assert_same(pair[1].receive()[1], [HUGE])
    sender.result(WAIT_TIMEOUT_S)
    pair[0].close()
    assert not pair[0].try_send(b"never")


# --- processes that die


def fork(run: Callable[[], None]) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:  # nothing of the test session may run in the child
        run()
    finally:
        os._exit(1)


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_process_killed_in_the_middle_of_a_message(pair: Pair) -> None:
    def child() -> None:
        pair[0].forget()
        pair[1].send(b"whole", [ROWS])
        pair[1].send(b"cut", [HUGE])

    pid = fork(child)
    pair[1].forget()
    header, arrays = pair[0].receive()
    assert header == b"whole"
    assert_same(arrays, [ROWS])
    select.select([pair[0].fileno()], [], [])
    kill(pid)
    with pytest.raises(LinkClosedError, match=r"in the middle of a message, after \d+ bytes"):
        pair[0].receive()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_process_killed_while_it_should_receive(pair: Pair, pool: ThreadPoolExecutor) -> None:
    def child() -> None:
        pair[0].forget()
        pair[1].send(b"ready")
        signal.pause()

    pid = fork(child)
    pair[1].forget()
    assert pair[0].receive() == (b"ready", [])
    sender = pool.submit(pair[0].send, b"", [HUGE])
    kill(pid)
    with pytest.raises(LinkClosedError, match="which is gone"):
        sender.result(WAIT_TIMEOUT_S)
    with pytest.raises(LinkClosedError, match="which is gone"):
        pair[0].receive()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_copy_of_an_end_hides_a_death_until_it_is_forgotten(pair: Pair) -> None:
    def child() -> None:
        pair[0].forget()
        pair[1].send(b"ready")
        signal.pause()

    pid = fork(child)
    assert pair[0].receive() == (b"ready", [])
    kill(pid)
    assert not select.select([pair[0].fileno()], [], [], 0)[0]
    pair[1].forget()
    with pytest.raises(LinkClosedError, match="which is gone"):
        pair[0].receive()


# --- what is no message


def frame(header: bytes = b"head", arrays: tuple[Array, ...] = (ROWS, np.arange(3))) -> bytes:
    return frames.encode(header, arrays, 1 << 20) + b"".join(array.tobytes() for array in arrays)


def received(data: bytes, *, limit_bytes: int = 1 << 20) -> tuple[bytes, list[Array]]:
    """What a link makes of `data` and the end."""
    raw, connection = socket.socketpair()
    with raw:
        link = StageLink(connection, limit_bytes)
        raw.sendall(data)
        raw.shutdown(socket.SHUT_WR)
        try:
            return link.receive()
        except LinkFrameError:
            assert raw.recv(1) == b"", "the other end does not learn it"
            with pytest.raises(LinkClosedError):
                link.receive()
            raise
        finally:
            link.close()


def test_every_cut_of_a_message_is_noticed() -> None:
    data = frame()
    assert received(data)[0] == b"head"
    for length in range(1, len(data)):
        with pytest.raises(LinkClosedError, match=f"in the middle of a message, after {length} bytes"):
            received(data[:length])


@pytest.mark.parametrize(
    ("at", "value", "expected"),
    [
        (0, b"HTTP", "expected a frame that begins with b'dpl1', got b'HTTP'"),
        (4, b"\x83\x00", "at most 130 arrays, got 131"),
        (6, b"\x01\x00", r"expected the arrays in the frame \(place 0\), got place 1"),
        (8, b"\x01\x00\x01\x00", "at most 65536 bytes of header, got 65537"),
        (12, b"\xff" * 8, "at most 1048576 bytes of arrays, got 18446744073709551615"),
        (12, b"\x00" * 8, "expected arrays of 0 bytes, got 264 bytes in float32"),
        (20, b"\x0c\x00", "expected the code of a type below 12 .float32, .*bfloat16.*got 12"),
        (22, b"\x09\x00", "expected a shape of at most 8 dimensions, got 9"),
        (22, b"\x02\x00", "expected a shape of at most 8 dimensions, got 2 in"),
        (28, b"\xff" * 8, r"expected the shape of an array, got \(18446744073709551615, 4, 5\)"),
        (28, b"\x04" + b"\x00" * 7, "expected arrays of 264 bytes, got 344 bytes"),
        (28, b"\x00" * 8 + b"\xff" * 8, r"expected the shape of an array, got \(0, 18446744073709551615, 5\)"),
    ],
)
def test_a_malformed_message_says_what_was_expected(at: int, value: bytes, expected: str) -> None:
    data = frame()
    assert data[at : at + len(value)] != value
    with pytest.raises(LinkFrameError, match=expected):
        received(data[:at] + value + data[at + len(value) :])


def test_nothing_else_comes_of_random_bytes() -> None:
    rng = random.Random(1)
    ends = {"message": 0, "refused": 0, "closed": 0}
    good = frame()
    for trial in range(1500):
        if trial % 3 == 0:
            data = rng.randbytes(rng.randrange(1, 400))
        elif trial % 3 == 1:
            data = good[:4] + rng.randbytes(rng.randrange(1, 400))
        else:
            changed = bytearray(good)
            for _ in range(rng.randrange(1, 4)):
                changed[rng.randrange(190)] = rng.choice((0, 1, 8, 255, rng.randrange(256)))
            data = bytes(changed)
        try:
            header, arrays = received(data)
            assert len(header) <= len(data)
            assert sum(array.nbytes for array in arrays) <= len(data)
            ends["message"] += 1
        except LinkFrameError:
            ends["refused"] += 1
        except LinkClosedError:
            ends["closed"] += 1
    assert all(ends.values()), ends
