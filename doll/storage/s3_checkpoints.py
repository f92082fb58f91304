"""Store checkpoints as objects under one prefix of an S3 bucket, for parameter servers that share no file system.

`checkpoint-<term>-<version>.doll` is a checkpoint. `term-<n>.claim` states that term n is claimed. The newest claims
are kept, and a claim below them is not valid, so no term is claimed twice. `term-<n>.base-<term>-<version>` names the
base of term n: the checkpoint from which it began. S3 has no lock, so the newest base decides: of the terms below n,
only the base and older checkpoints are valid.

A document, such as `marks.json` with aliases and pins (`doll.storage.version_marks`), is replaced only if its content
has not changed since it was read.

Order of the steps of `claim_term`: 1. put the claim, if it does not exist; 2. list; 3. put the base. Order of the steps
of `save`: 1. list, and look for a higher claim; 2. put the checkpoint, if it does not exist; 3. list again; 4. delete
old ones. A checkpoint is durable only after step 3. If the server finds a higher claim in step 3, step 2 of that claim
may or may not have listed the checkpoint. Both cases are correct, because the checkpoint's batches have not been
acknowledged. The server does not delete the checkpoint, because the term of that claim may have begun from it, or a
repeated save may have found it durable. If the checkpoint is not valid, the next save of a later term deletes it. S3
stores an object completely or not at all, and a list shows all stored objects. Therefore a crash between two steps
leaves either a complete checkpoint, or a checkpoint that is not valid.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from doll import telemetry
from doll.errors import CheckpointError
from doll.storage.blobs import Buffer
from doll.storage.checkpoints import (
    Checkpoint,
    CheckpointStore,
    checkpoint_name,
    checkpoints_among,
    claim_name,
    claims_among,
    is_forgotten,
    old_claims,
    unused_parts,
)
from doll.storage.version_marks import NO_HISTORY, StoredVersion, VersionHistory

if TYPE_CHECKING:
    from botocore.exceptions import BotoCoreError, ClientError

log = telemetry.get_logger(__name__)

_CONNECT_S: Final = 5.0
_READ_S: Final = 30.0
_ATTEMPTS: Final = 5
_CLAIMS: Final = 1000
_BASE: Final = re.compile(r"term-(\d+)\.base-(\d+)-(\d+)")
_URL: Final = re.compile(r"s3://([a-z0-9][a-z0-9.-]{1,61}[a-z0-9])(?:/(.*))?")
_EXISTS_CODES: Final = ("PreconditionFailed", "ConditionalRequestConflict")
_MISSING_CODES: Final = ("NoSuchKey", "404")
_REFUSED_CODES: Final = ("AccessDenied", "403", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken")
_RIGHTS: Final = (
    "; expected credentials where boto3 looks for them (such as AWS_PROFILE), of a user with s3:ListBucket on the "
    "bucket and s3:GetObject under the prefix, and to write there s3:PutObject and s3:DeleteObject"
)


class _Listing(NamedTuple):
    """The objects under the prefix at one moment: all checkpoints, and the base of the newest term."""

    checkpoints: list[tuple[int, int]]
    newest_term: int
    base_term: int
    base: tuple[int, int]
    old_claims: list[str]
    objects: dict[str, tuple[float, int]]  # by name: the time when it was stored (Unix time), and its size

    def counts(self, key: tuple[int, int]) -> bool:
        """Return whether a checkpoint existed when the newest term began, or belongs to that term."""
        return key[0] >= self.base_term or key <= self.base

    def versions(self) -> list[tuple[int, int]]:
        return [key for key in self.checkpoints if self.counts(key)]

    def stored(self) -> list[StoredVersion]:
        return [StoredVersion(*key, *self.objects[checkpoint_name(*key)]) for key in self.versions()]


class S3CheckpointStore(CheckpointStore):
    """A `CheckpointStore` under `s3://bucket/prefix`. boto3 finds credentials, region and endpoint.

    The user needs s3:ListBucket on the bucket, and s3:GetObject, s3:PutObject and s3:DeleteObject under the prefix. No
    request is sent before the first call. Raise CheckpointError if the URL does not have this form, or boto3 cannot
    make a client.
    """

    def __init__(self, url: str, job: str | None, *, keep: int = 3, history: VersionHistory = NO_HISTORY) -> None:
        super().__init__(job, url.rstrip("/"), keep, history)
        match = _URL.fullmatch(url)
        if match is None:
            raise CheckpointError(f"expected s3://bucket/prefix, got {url!r}")
        prefix = (match[2] or "").strip("/")
        self.url = url.rstrip("/")
        self._bucket = match[1]
        self._prefix = f"{prefix}/" if prefix else ""
        with self._translate_errors("reach"):
            self._client = _client()

    def claim_term(self, above: int = 0) -> int:
        with self._translate_errors("claim a term in"):
            listing = self._list()
            while True:
                term = self._put_claim(max(listing.newest_term, above) + 1)
                listing = self._list()
                if not is_forgotten(term, listing.newest_term):
                    break
            newest = max(listing.versions(), default=(0, 0))
            self._put(f"term-{term:08d}.base-{newest[0]:08d}-{newest[1]:010d}", b"")
            return term

    def _put_claim(self, first: int) -> int:
        """Claim the first free term from `first` on, and return it."""
        for term in range(first, first + _CLAIMS):
            if self._put_new(claim_name(term), b""):
                break
        else:
            raise CheckpointError(f"{_CLAIMS} terms of {self.url} were taken while this one was claimed")
        if self._put_new(claim_name(term), b""):
            raise CheckpointError(
                f"{self.url}: this store ignores `If-None-Match: *`, so two parameter servers could write to it at "
                "once: expected S3, or a store that knows conditional writes"
            )
        return term

    def newest_term(self) -> int:
        with self._translate_errors("look into"):
            return self._list().newest_term

    def save(self, checkpoint: Checkpoint) -> None:
        """Save as `CheckpointStore` describes. An object stored before a FencedError is valid only if the higher claim
        has listed it."""
        self._check_owner(checkpoint)
        name = checkpoint_name(checkpoint.term, checkpoint.version)
        with self._translate_errors("save a checkpoint in"):
            self._check_term(checkpoint, listing := self._list())
            encoded = self._encode(checkpoint, listing.versions())
            self._put_whole(name, encoded.parts)
            listing = self._list()
            # The stored object is not deleted if a higher claim exists, because that claim may begin from it.
            self._check_term(checkpoint, listing)
            self._require_base(checkpoint, encoded, listing.versions())
            self._note_saved(checkpoint, encoded)
            old = {item.key for item in self._obsolete(listing.stored())}
            old |= set(listing.checkpoints).difference(listing.versions())  # checkpoints that are not valid
            gone = [checkpoint_name(*key) for key in sorted(old, reverse=True)]
            parts = unused_parts(listing.objects.keys() - set(gone))
            self._delete(gone + parts + listing.old_claims)

    def _write_part(self, name: str, data: Sequence[Buffer], checkpoint: Checkpoint) -> None:
        with self._translate_errors("save a checkpoint in"):
            self._check_term(checkpoint, self._list())
            self._put_whole(name, data)

    def _put_whole(self, name: str, data: Sequence[Buffer]) -> None:
        whole = b"".join(data)
        if not self._put_new(name, whole) and self._get(name)[0] != whole:
            self._put(name, whole)  # saved before, and since damaged or of an older state

    def delete(self, keys: Iterable[tuple[int, int]]) -> None:
        with self._translate_errors("delete a checkpoint in"):
            for key in self._but_newest(keys):
                self._client.delete_object(Bucket=self._bucket, Key=self._prefix + checkpoint_name(*key))
            self._delete(unused_parts(self._list().objects))

    def _read_file(self, name: str, size: int | None = None) -> bytes:
        with self._translate_errors("read a checkpoint in"):
            data, _ = self._get(name, {} if size is None else {"Range": f"bytes=0-{size - 1}"})
        if data is None:
            raise FileNotFoundError(name)
        return data

    def versions(self) -> list[tuple[int, int]]:
        with self._translate_errors("look into"):
            return self._list().versions()

    def stored(self) -> list[StoredVersion]:
        with self._translate_errors("look into"):
            return self._list().stored()

    def read_document(self, name: str) -> tuple[bytes | None, str]:
        with self._translate_errors(f"read {name} in"):
            return self._get(name)

    def replace_document(self, name: str, data: bytes, known: str) -> str | None:
        with self._translate_errors(f"change {name} in"):
            return self._put_new(name, data, known)

    def _check_term(self, checkpoint: Checkpoint, listing: _Listing) -> None:
        self._refuse_if_superseded(checkpoint, listing.newest_term, listing.checkpoints)

    # --- requests ---------------------------------------------------------------------------------------------------

    def _list(self) -> _Listing:
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=self._prefix)
        objects = {
            item["Key"][len(self._prefix) :]: (item["LastModified"].timestamp(), item["Size"])
            for page in pages
            for item in page.get("Contents", ())
        }
        names = list(objects)
        checkpoints = checkpoints_among(names)
        bases = [(int(m[1]), (int(m[2]), int(m[3]))) for name in names if (m := _BASE.fullmatch(name))]
        base_term, base = max(bases, default=(0, (0, 0)))
        newest_term = max([0, *claims_among(names), *(term for term, _ in checkpoints)])
        # The newest base decides which checkpoints are valid, even if it is old.
        old = [name for name in old_claims(names, newest_term) if not name.startswith(f"term-{base_term:08d}.base-")]
        return _Listing(checkpoints, newest_term, base_term, base, old, objects)

    def _put_new(self, name: str, data: bytes, known: str = "") -> str | None:
        """Store an object as a new one, or as a replacement of the object with the entity tag `known`, and return its
        entity tag. Return None if the condition is not met. This can also happen in a retry after a lost reply."""
        from botocore.exceptions import ClientError

        condition = {"IfMatch": known} if known else {"IfNoneMatch": "*"}
        try:
            answer = self._client.put_object(Bucket=self._bucket, Key=self._prefix + name, Body=data, **condition)
        except ClientError as exc:
            if _code(exc) in (*_EXISTS_CODES, *(_MISSING_CODES if known else ())):
                return None
            raise
        return str(answer["ETag"])

    def _put(self, name: str, data: bytes) -> None:
        self._client.put_object(Bucket=self._bucket, Key=self._prefix + name, Body=data)

    def _get(self, name: str, more: Mapping[str, str] = {}) -> tuple[bytes | None, str]:
        """Return the content of an object and its entity tag; None and "" if the object does not exist."""
        from botocore.exceptions import ClientError

        try:
            answer = self._client.get_object(Bucket=self._bucket, Key=self._prefix + name, **more)
            with answer["Body"] as body:
                return body.read(), answer["ETag"]
        except ClientError as exc:
            if _code(exc) in _MISSING_CODES:
                return None, ""
            raise

    def _delete(self, names: list[str]) -> None:
        from botocore.exceptions import BotoCoreError, ClientError

        for name in names:
            try:
                self._client.delete_object(Bucket=self._bucket, Key=self._prefix + name)
            except (BotoCoreError, ClientError) as exc:  # the new checkpoint is safe; old ones only cost money
                log.warning("checkpoint_not_deleted", file=name, error=str(exc))

    @contextmanager
    def _translate_errors(self, what: str) -> Iterator[None]:
        """Convert boto3's errors to CheckpointError, with the operation and S3's reason, and without secrets."""
        from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError

        try:
            yield
        except (BotoCoreError, ClientError) as exc:
            hint = _RIGHTS if isinstance(exc, NoCredentialsError) or _code(exc) in _REFUSED_CODES else ""
            raise CheckpointError(f"cannot {what} {self.url}: {exc}{hint}") from exc


def _client() -> Any:
    import boto3
    from botocore.config import Config

    retries: Any = {"mode": "standard", "total_max_attempts": _ATTEMPTS}
    # A new session: two threads must not create boto3's default session at the same time.
    return boto3.session.Session().client(
        "s3", config=Config(connect_timeout=_CONNECT_S, read_timeout=_READ_S, retries=retries)
    )


def _code(exc: BotoCoreError | ClientError) -> str:
    """Return S3's error code; "" for an error that is not an answer of S3."""
    return str(getattr(exc, "response", {}).get("Error", {}).get("Code", ""))
