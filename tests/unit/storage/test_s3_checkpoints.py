"""What only the S3 store must get right: there is no lock, so every gap between two requests is somebody's chance.

The rest is in tests/contract. Requests go to moto, which answers as S3 does, conditional writes included.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from doll.errors import CheckpointError, FencedError
from doll.storage.checkpoints import Checkpoint
from doll.storage.s3_checkpoints import S3CheckpointStore

URL = "s3://models/team/digits"


def store() -> S3CheckpointStore:
    return S3CheckpointStore(URL, "digits")


def checkpoint(term: int, version: int) -> Checkpoint:
    weights = np.full(10, version, np.float32)
    return Checkpoint(
        job="digits", fingerprint="f", term=term, version=version, state=b"s", tensors={"weights": weights}
    )


def names(s3: Any) -> list[str]:
    listed = s3.list_objects_v2(Bucket="models", Prefix="team/digits/").get("Contents", ())
    return [item["Key"].removeprefix("team/digits/") for item in listed]


def newest(of: S3CheckpointStore) -> tuple[int, int]:
    checkpoint = of.load_newest("f")
    assert checkpoint is not None
    return checkpoint.term, checkpoint.version


def before(act: Callable[[], object], call: Callable[..., Any]) -> Callable[..., Any]:
    """`call`, with `act` happening just before its first use."""
    left = [act]

    def wrapped(*args: Any) -> Any:
        if left:
            left.pop()()
        return call(*args)

    return wrapped


@pytest.mark.slow
def test_a_claim_between_a_save_s_look_and_its_write_fences_it(s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = store(), store()
    assert old.claim_term() == 1
    old.save(checkpoint(1, 20))
    monkeypatch.setattr(old, "_put_new", before(new.claim_term, old._put_new))
    with pytest.raises(FencedError, match="term 1 is over: term 2 has claimed s3://models/team/digits"):
        old.save(checkpoint(1, 40))
    assert newest(new) == (1, 20)
    new.save(checkpoint(2, 21))  # removes what does not count
    assert names(s3).count("checkpoint-00000001-0000000040.doll") == 0


def test_a_claim_while_a_durable_checkpoint_is_saved_again_leaves_it(s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM saves the version once more, with newer state. Its batches have been acknowledged: it must not go."""
    old, new = store(), store()
    assert old.claim_term() == 1
    old.save(checkpoint(1, 20))
    monkeypatch.setattr(old, "_put_new", before(new.claim_term, old._put_new))
    with pytest.raises(FencedError, match="term 1 is over"):
        old.save(dataclasses.replace(checkpoint(1, 20), state=b"a later clock"))
    assert newest(new) == (1, 20)
    assert store().claim_term() == 3
    assert newest(store()) == (1, 20)


def test_what_a_claim_has_seen_stays_though_its_writer_was_fenced(s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The claim's line names it, and its server has perhaps told workers already that it is durable."""
    old, new = store(), store()
    old.claim_term()
    old.save(checkpoint(1, 20))
    put = old._put_new

    def put_then_claim(*args: Any) -> Any:
        done = put(*args)
        new.claim_term()
        return done

    monkeypatch.setattr(old, "_put_new", put_then_claim)
    with pytest.raises(FencedError):
        old.save(checkpoint(1, 40))
    assert newest(new) == (1, 40)


@pytest.mark.slow
def test_a_late_write_that_nobody_could_take_back_does_not_count(s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old server is killed right after its write: its object stays, and is later than what term 2 began from."""
    old, new = store(), store()
    old.claim_term()
    old.save(checkpoint(1, 20))

    def die(*_: Any) -> None:
        raise KeyboardInterrupt

    put = before(new.claim_term, old._put_new)
    monkeypatch.setattr(old, "_put_new", lambda *args: put(*args) and die())
    with pytest.raises(KeyboardInterrupt):
        old.save(checkpoint(1, 40))
    assert "checkpoint-00000001-0000000040.doll" in names(s3)
    assert new.versions() == [(1, 20)]
    assert newest(new) == (1, 20)
    # The next claim too begins from what term 2 began from, though it never saved.
    third = store()
    assert third.claim_term() == 3
    assert newest(third) == (1, 20)
    third.save(checkpoint(3, 21))
    assert third.versions() == [(1, 20), (3, 21)]
    assert "checkpoint-00000001-0000000040.doll" not in names(s3)


def test_a_save_before_the_claim_s_line_counts(s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new server has claimed and looks what is there: what was saved until then is what it begins from."""
    old, new = store(), store()
    old.claim_term()
    old.save(checkpoint(1, 20))

    claim = new._put_new
    monkeypatch.setattr(new, "_put_new", before(lambda: old.save(checkpoint(1, 40)), claim))
    assert new.claim_term() == 2
    assert newest(new) == (1, 40)


def test_a_claimer_that_died_before_its_line_hinders_nobody(s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first, dying = store(), store()
    first.claim_term()
    first.save(checkpoint(1, 20))
    monkeypatch.setattr(dying, "_put", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        dying.claim_term()
    with pytest.raises(FencedError):
        first.save(checkpoint(1, 40))
    assert store().claim_term() == 3
    assert newest(store()) == (1, 20)


@pytest.mark.slow
def test_a_reply_that_was_lost_is_not_taken_for_another_server(s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """boto3 sends a request again when its reply is lost; S3 then says that the object is there: it is our own."""
    of = store()
    put = of._client.put_object

    def lose_a_reply() -> None:
        sent: list[bool] = []

        def send(**arguments: Any) -> Any:
            if not sent:
                sent.append(True)
                put(**arguments)
            return put(**arguments)

        monkeypatch.setattr(of._client, "put_object", send)

    lose_a_reply()
    assert of.claim_term() == 2  # term 1 is taken, by nobody: no harm
    lose_a_reply()
    of.save(checkpoint(2, 20))
    assert newest(of) == (2, 20)


def test_a_damaged_checkpoint_of_the_same_version_is_written_anew(s3: Any) -> None:
    of = store()
    of.save(checkpoint(1, 20))
    s3.put_object(Bucket="models", Key="team/digits/checkpoint-00000001-0000000020.doll", Body=b"torn")
    of.save(checkpoint(1, 20))
    assert newest(of) == (1, 20)


def test_a_store_that_ignores_conditions_is_refused(s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    of = store()
    put = of._client.put_object
    monkeypatch.setattr(
        of._client,
        "put_object",
        lambda IfNoneMatch="", **arguments: put(**arguments),
    )
    with pytest.raises(CheckpointError, match="ignores `If-None-Match: \\*`"):
        of.claim_term()


def test_checkpoints_that_vanish_while_they_are_read_are_looked_up_again(
    s3: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, reader = store(), store()
    writer.save(checkpoint(1, 20))

    def move_on() -> None:
        for version in (30, 40, 50):
            writer.save(checkpoint(1, version))

    monkeypatch.setattr(reader, "_get", before(move_on, reader._get))
    assert newest(reader) == (1, 50)


@pytest.mark.slow
def test_neighbours_under_a_longer_prefix_are_not_ours(s3: Any) -> None:
    S3CheckpointStore(f"{URL}-2", "digits").save(checkpoint(9, 90))
    assert store().load_newest(None) is None
    assert store().newest_term() == 0
    S3CheckpointStore("s3://models", "digits").save(checkpoint(3, 30))
    assert S3CheckpointStore("s3://models/", "digits").versions() == [(3, 30)]
    assert store().versions() == []


def test_a_list_of_many_pages_is_read_whole(s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    of = store()
    of.save(checkpoint(1, 20))
    of.save(checkpoint(2, 25))
    for _ in range(3):
        of.claim_term()
    monkeypatch.setenv("MOTO_S3_DEFAULT_MAX_KEYS", "2")
    assert len(s3.list_objects_v2(Bucket="models")["Contents"]) == 2
    assert of.versions() == [(1, 20), (2, 25)]
    assert of.newest_term() == 5


def test_trouble_names_the_place_and_s3_s_reason_and_no_secret(s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError, match=r"cannot claim a term in s3://nowhere/x: .*NoSuchBucket"):
        S3CheckpointStore("s3://nowhere/x", "digits").claim_term()
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
    monkeypatch.setattr("doll.storage.s3_checkpoints._ATTEMPTS", 1)
    away = store()  # outside moto's reach
    for call in (away.newest_term, away.claim_term, lambda: away.load_newest(None)):
        with pytest.raises(CheckpointError, match=r"s3://models/team/digits: Could not connect") as caught:
            call()
        assert "hunter2" not in str(caught.value)
        assert "hunter2" not in repr(caught.value.__cause__)
    assert "hunter2" not in repr(away)


def test_a_place_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in ("s3://", "s3://a", "/folder", "s3://Upper/x"):
        with pytest.raises(CheckpointError, match=r"expected s3://bucket/prefix, got"):
            S3CheckpointStore(wrong, "digits")
    with pytest.raises(ValueError, match="keep >= 2"):
        S3CheckpointStore(URL, "digits", keep=1)
    monkeypatch.setenv("AWS_PROFILE", "none-such")
    with pytest.raises(CheckpointError, match=r"cannot reach s3://models/team/digits: .*none-such"):
        store()


@pytest.mark.slow
def test_the_claims_of_the_newest_terms_are_kept(s3: Any) -> None:
    for _ in range(20):
        server = store()
        term = server.claim_term()
        server.save(checkpoint(term, term))
    claims = [name for name in names(s3) if name.endswith(".claim")]
    assert claims == [f"term-{term:08d}.claim" for term in range(13, 21)]
    assert len(names(s3)) == 3 + 8 + 8  # checkpoints, claims and what these began from
    assert newest(store()) == (20, 20)
    assert store().claim_term() == 21


def test_a_base_that_decides_is_kept_however_old(s3: Any) -> None:
    assert store().claim_term() == 1
    store().save(checkpoint(30, 7))  # the topics told this server of its term: it has put no base
    assert "term-00000001.base-00000000-0000000000" in names(s3)
    assert newest(store()) == (30, 7)


@pytest.mark.slow
def test_a_server_that_was_suspended_before_its_claim_takes_no_term_again(
    s3: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    late, others = store(), store()

    def twenty_terms_pass() -> None:
        for _ in range(20):
            term = others.claim_term()
            others.save(checkpoint(term, term))
        assert "term-00000001.claim" not in names(s3)

    # It has looked, and found nothing; its first write comes when the claim of term 1 is there no longer.
    monkeypatch.setattr(late, "_put_claim", before(twenty_terms_pass, late._put_claim))
    assert late.claim_term() == 21
    late.save(checkpoint(21, 21))
    assert newest(store()) == (21, 21)
    with pytest.raises(FencedError):
        others.save(checkpoint(20, 22))


def test_what_s3_refuses_says_which_rights_are_needed(s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import boto3
    from moto.core import set_initial_no_auth_action_count

    iam = boto3.client("iam")
    iam.create_user(UserName="guest")
    key = iam.create_access_key(UserName="guest")["AccessKey"]
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", key["AccessKeyId"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", key["SecretAccessKey"])
    set_initial_no_auth_action_count(0)(
        lambda: _expect_refusal(
            "cannot look into s3://models/team/digits: .*AccessDenied.*with s3:ListBucket on the bucket"
        )
    )()
    for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"):
        monkeypatch.delenv(f"AWS_{name}")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nowhere")
    _expect_refusal("Unable to locate credentials; expected credentials where boto3 looks for them")


def _expect_refusal(words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        store().versions()
