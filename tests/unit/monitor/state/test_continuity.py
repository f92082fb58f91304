"""The running account of offsets: it sees what is missing or twice, and follows a server that resumes."""

import msgspec
from doll.monitor.state.watched_job import Continuity
from record_builders import term_started, update


def folded(*records: object) -> Continuity:
    account = Continuity()
    for record in records:
        account.feed(record)  # type: ignore[arg-type]
    return account


def test_batches_that_follow_each_other_are_counted_once() -> None:
    account = folded(term_started(1), update(1, 1, (0, 0), (1, 0)), update(1, 2, (0, 1), (0, 2)))
    assert (account.offsets, account.missing, account.twice, account.problem) == (32, 0, 0, "")
    assert account.until == {0: 24, 1: 8}


def test_a_batch_that_is_missing_or_twice_is_named() -> None:
    account = folded(term_started(1), update(1, 1, (0, 0)), update(1, 2, (0, 2)))
    assert (account.missing, account.twice) == (8, 0)
    assert account.problem == "partition 0: offsets 8-15 in no update, by update 2"
    account = folded(term_started(1), update(1, 1, (0, 0)), update(1, 2, (0, 0)))
    assert (account.missing, account.twice) == (0, 8)
    assert account.problem == "partition 0: offsets 0-7 in two updates, by update 2"


def test_the_first_batch_counts_from_the_origin() -> None:
    account = folded(term_started(1, origins=(4, 0)), update(1, 1, (0, 1)))
    assert account.problem == "partition 0: offsets 4-7 in no update, by update 1"


def test_a_log_without_its_beginning_begins_somewhere() -> None:
    account = folded(update(1, 7, (0, 5)), update(1, 8, (0, 6)))
    assert (account.offsets, account.problem) == (16, "")


def test_a_server_that_resumes_takes_back_what_was_not_durable() -> None:
    account = folded(
        term_started(1), update(1, 1, (0, 0)), update(1, 2, (0, 1), (1, 0)), update(1, 3, (0, 2)),
        term_started(2, 1), update(1, 4, (0, 3)), update(2, 2, (0, 1)), update(2, 3, (1, 0), (0, 2)),
    )  # fmt: skip
    assert (account.offsets, account.problem) == (32, "")
    assert account.until == {0: 24, 1: 8}


def test_what_is_durable_is_not_taken_back() -> None:
    account = folded(term_started(1), *(update(1, version, (0, version - 1)) for version in range(1, 5)))
    account.durable(3)
    account.feed(term_started(2, 3))
    account.feed(update(2, 4, (0, 3)))
    assert (account.offsets, account.problem) == (32, "")


def test_a_rollback_goes_on_where_its_grid_begins() -> None:
    for origins, batch in (((8, 0), 1), ((24, 8), 3)):  # learned again, and skipped
        back = msgspec.structs.replace(term_started(3, 4, origins=origins), rolled_back_to=1)
        account = folded(
            term_started(1), *(update(1, version, (0, version - 1)) for version in range(1, 4)), back,
            update(3, 5, (0, batch)),
        )  # fmt: skip
        assert account.problem == ""
        assert account.until[0] == 8 * batch + 8


def test_a_new_generation_begins_again() -> None:
    account = folded(
        term_started(1), update(1, 1, (0, 0)), term_started(2, generation=2, origins=(64, 64)), update(2, 1, (0, 8))
    )
    assert (account.offsets, account.problem) == (8, "")
