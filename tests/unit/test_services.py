"""Where a job's services are looked for, and what is said where no address is given."""

from __future__ import annotations

import pytest
from doll.errors import ConfigError
from doll.services import Services, resolve
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
    with pytest.raises(ConfigError, match=r"expected redis://host:port/db or .* got 'env:2'"):
        resolve(job())
