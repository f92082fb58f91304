"""Where a job's services are looked for, and what is said where no address is given."""

from __future__ import annotations

from pathlib import Path

import pytest
from doll.credentials import secret
from doll.errors import ConfigError
from doll.services import RedisPlace, Services, parse_redis, redis_address, resolve
from job_files import job


def test_the_job_file_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOLL_KAFKA", "env:1")
    monkeypatch.setenv("DOLL_REDIS", "redis://env:2/0")
    assert resolve(job()) == Services("env:1", "redis://env:2/0")
    assert resolve(job("kafka.address=file:3")) == Services("file:3", "redis://env:2/0")


def test_without_any_address_the_error_says_what_to_set() -> None:
    with pytest.raises(ConfigError, match=r"kafka\.address .* DOLL_KAFKA=.* redis\.address .* DOLL_REDIS=.* `doll up`"):
        resolve(job())


def test_only_what_is_missing_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOLL_REDIS", "redis://env:2/0")
    with pytest.raises(ConfigError, match=r"no address for Kafka: (?!.*Redis)"):
        resolve(job())


def test_credentials_in_the_redis_url_are_refused_and_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOLL_KAFKA", "env:1")
    monkeypatch.setenv("DOLL_REDIS", "redis://me:hush@env:2/0")
    with pytest.raises(ConfigError, match="DOLL_REDIS_PASSWORD") as caught:
        resolve(job())
    assert "hush" not in str(caught.value)


def test_another_scheme_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOLL_KAFKA", "env:1")
    monkeypatch.setenv("DOLL_REDIS", "env:2")
    with pytest.raises(ConfigError, match=r"expected redis://host:port/db, redis\+sentinel.* got 'env:2'"):
        resolve(job())


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("redis://h", RedisPlace("single", False, (("h", 6379),))),
        ("rediss://[::1]:6380/2", RedisPlace("single", True, (("::1", 6380),), db=2)),
        ("redis+sentinel://a:1,b/main/3", RedisPlace("sentinel", False, (("a", 1), ("b", 26379)), "main", 3)),
        ("rediss+cluster://a:1,b:2/j", RedisPlace("cluster", True, (("a", 1), ("b", 2)), "j")),
        ("redis://a:1,b:2", None),
        ("redis+sentinel://a:1", None),
        ("redis+cluster://a:1/j/3", None),
        ("redis://h:99999", None),
        ("redis://h/x", None),
    ],
)
def test_the_forms_of_a_redis_url(url: str, place: RedisPlace | None) -> None:
    assert parse_redis(url) == place


def test_the_address_of_a_cluster_names_the_job_whose_keys_are_meant() -> None:
    assert redis_address(job("redis.address=redis+cluster://a:1,b:2")) == "redis+cluster://a:1,b:2/j"
    assert redis_address(job("redis.address=redis+cluster://a:1,b:2/j")) == "redis+cluster://a:1,b:2/j"
    with pytest.raises(ConfigError, match="expected a Cluster's addresses alone"):
        redis_address(job("redis.address=redis+cluster://a:1/other"))


def test_a_secret_may_stand_in_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert secret("DOLL_REDIS_PASSWORD") is None
    (tmp_path / "s").write_text("hush\n")
    monkeypatch.setenv("DOLL_REDIS_PASSWORD_FILE", str(tmp_path / "s"))
    assert secret("DOLL_REDIS_PASSWORD") == "hush"
    monkeypatch.setenv("DOLL_REDIS_PASSWORD", "other-hush")
    with pytest.raises(ConfigError, match="DOLL_REDIS_PASSWORD or DOLL_REDIS_PASSWORD_FILE, got both"):
        secret("DOLL_REDIS_PASSWORD")
    monkeypatch.delenv("DOLL_REDIS_PASSWORD")
    monkeypatch.setenv("DOLL_REDIS_PASSWORD_FILE", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"DOLL_REDIS_PASSWORD_FILE: cannot read .*none: No such file"):
        secret("DOLL_REDIS_PASSWORD")
