"""Text samples: `TextTask`, whose samples are the ids of the tokens of a text, and the records of the source `text`.

A token is a maximal run of letters of any script in the lower-cased text; all other characters separate tokens. Each
line of a file is a document. A record `{"text": "..."}` has a limited number of the tokens of a document.
"""

from __future__ import annotations

import itertools
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from doll.errors import BadRecordsError, ConfigError, SampleError
from doll.records import lines
from doll.task.base import Sample, Task

if TYPE_CHECKING:
    import torch

PADDING: Final = -1  # after the last token of a sample
_LONGEST_LINE_BYTES: Final = 1 << 20
_LETTERS: Final = re.compile(r"[^\W\d_]+")
_OBJECTS: Final = msgspec.json.Decoder(dict[str, Any])

# Words that do not show the topic of a text, and the parts into which words such as "don't" are split.
_ENGLISH: Final = """
a about above after again against all also am an and any are aren as at be because been before being below between both
but by can cannot could couldn d did didn do does doesn doing don down during each few for from further had hadn has
hasn have haven having he her here hers him his how i if in into is isn it its ll m me more most my no nor not of off
on once one only or other our out over own re s same she should shouldn so some such t than that the their them then
there these they this those through to too under until up us ve very was wasn we were weren what when where which while
who whom why will with would wouldn you your
"""
ENGLISH: Final = frozenset(_ENGLISH.split())


class _Text(msgspec.Struct):
    text: str
    number: int = -1


_TEXT: Final = msgspec.json.Decoder(_Text)


def tokens(text: str) -> list[str]:
    """Return the tokens of a text, in order. `" ".join(tokens(text))` has the same tokens."""
    return _LETTERS.findall(text.lower())


def read_lines(path: Path, *, skip: int = 0, max_bytes: int) -> Iterator[bytes]:
    """Yield the lines of `path` in order, without blank lines.

    Args:
        skip: number of lines at the beginning to leave out.
        max_bytes: as in `lines.read_file`.

    Raises:
        ConfigError: the file cannot be read, or has no line after `skip`. The iterator raises it later at a damaged
            part.
    """
    documents = itertools.islice(lines.read_file(path, max_bytes=max_bytes), skip, None)
    first = next(documents, None)
    if first is None:
        raise ConfigError(f"source.skip: expected fewer than the lines of {path}, got {skip}")
    return itertools.chain((first,), documents)


def records(
    documents: Iterable[bytes],
    fields: Sequence[str],
    *,
    tokens_per_record: int,
    max_bytes: int,
    numbers: Iterator[int] | None = None,
) -> Iterator[bytes]:
    """Yield the records of these lines, in order.

    A line that cannot be read as text, or is longer than `max_bytes`, becomes an unchanged record, which a worker
    refuses and dead-letters. A line without any token gives no record.

    Args:
        fields: fields of the JSON object in each line whose texts are joined. Empty: a line is plain text in UTF-8.
        tokens_per_record: maximum number of tokens of a record. A longer document is cut into as few pieces as
            possible, whose lengths differ by at most one token.
        numbers: numbers for the records that contain text. None: the records have no numbers.
    """
    for line in documents:
        text = _text(line, fields) if len(line) <= max_bytes else None
        if text is None:
            yield line
            continue
        document = tokens(text)
        pieces = -(-len(document) // tokens_per_record)
        for piece in range(pieces):
            part = document[piece * len(document) // pieces : (piece + 1) * len(document) // pieces]
            number = {} if numbers is None else {"number": next(numbers)}
            yield msgspec.json.encode({"text": " ".join(part), **number})


def _text(line: bytes, fields: Sequence[str]) -> str | None:
    """Return the text of a line; None if a field has no text."""
    try:
        if not fields:
            return line.decode()
        document = _OBJECTS.decode(line)
    except (ValueError, RecursionError):
        return None
    texts = [text for field in fields if isinstance(text := document.get(field), str)]
    return "\n".join(texts) if len(texts) == len(fields) else None


class Vocabulary:
    """The ids of tokens: the line numbers of a vocabulary file, or hash values.

    Attributes:
        size: number of ids; ids are 0 .. size - 1.
        counts: number of occurrences of each token, float64, shape (size,). None: the file has no counts.
        checksum: checksum of the tokens of the file in their order; 0 if ids are hash values.
    """

    def __init__(
        self, size: int, ids: Mapping[str, int] | None = None, counts: npt.NDArray[np.float64] | None = None
    ) -> None:
        """
        Args:
            ids: ids 0 .. size - 1 of the known tokens. None: the id of each token is a hash value.
        """
        self.size = size
        self.counts = counts
        self.checksum = 0 if ids is None else zlib.crc32("\n".join(ids).encode())
        self._ids = ids

    @classmethod
    def from_file(cls, path: Path) -> Vocabulary:
        """Read a UTF-8 file with one token per line, in all lines or in none followed by its number of occurrences.

        Raises:
            ConfigError: the file cannot be read, or a line is not valid or repeats a token.
        """
        expected = "expected a token (letters in lower case), or a token and how often it occurs"
        ids: dict[str, int] = {}
        counts = []
        for number, line in enumerate(read_lines(path, max_bytes=_LONGEST_LINE_BYTES), 1):
            try:
                token, *rest = line.decode().split()
                count = [int(word) for word in rest]
            except ValueError:
                raise ConfigError(f"{path}: line {number}: {expected}, got {line[:40]!r}") from None
            if tokens(token) != [token] or len(count) > 1 or min(count, default=1) < 1:
                raise ConfigError(f"{path}: line {number}: {expected}, got {line[:40]!r}")
            if token in ids:
                raise ConfigError(f"{path}: line {number}: {token!r} is also in line {ids[token] + 1}")
            ids[token] = len(ids)
            counts += count
        if len(counts) not in (0, len(ids)):
            raise ConfigError(f"{path}: expected counts in all lines or in none, got {len(counts)} in {len(ids)} lines")
        return cls(len(ids), ids, np.array(counts, np.float64) if counts else None)

    def ids(self, words: Iterable[str]) -> list[int]:
        """Return the ids of these tokens, without unknown tokens."""
        if self._ids is not None:
            known = self._ids
            return [known[word] for word in words if word in known]
        # crc32 is the same in every process and version; Python's own hash of strings is not.
        size, crc32 = self.size, zlib.crc32
        return [crc32(word.encode()) % size for word in words]


class TextTask(Task):
    """A task on texts. A record is a JSON object with the text in `text`, as the source `text` sends it.

    x of a sample: ids of the tokens in order, then `PADDING`; int32, shape (max_tokens,). y: number of these tokens; if
    `texts` is set, the number of the text. Tokens that are stop words or are not in the vocabulary are left out. A text
    may have no token left.

    Args:
        vocabulary_size: number of ids that tokens are hashed to. The model cannot distinguish tokens with equal ids.
        vocabulary_file: file for `Vocabulary.from_file`, which replaces the hash.
        texts: number of texts; each record has the number of its text, 0 .. texts - 1, in `number`, as with
            `source.numbered`. 0: records have no numbers.
        max_tokens: maximum number of tokens of a record, at least `source.tokens_per_record`. Longer records are
            refused.
        stop_words: tokens to leave out. `english`: the tokens of `ENGLISH`.
        holdout_path: file of held-out documents, in the format of the source's files.
        holdout_lines: number of lines at its beginning that are held out; `source.skip` keeps them out of the stream.
        fields: fields of its JSON objects, as in the source.
    """

    def __init__(
        self,
        *,
        vocabulary_size: int | None = None,
        vocabulary_file: str | None = None,
        texts: int = 0,
        max_tokens: int = 256,
        stop_words: Sequence[str] | str = (),
        holdout_path: str | None = None,
        holdout_lines: int = 0,
        fields: Sequence[str] = (),
    ) -> None:
        if (vocabulary_size is None) == (vocabulary_file is None):
            raise ValueError("expected either vocabulary_size or vocabulary_file")
        if isinstance(fields, str):
            raise ValueError(f"fields: expected a list of names, got {fields!r}")
        if isinstance(stop_words, str) and stop_words != "english":
            raise ValueError(f"stop_words: expected english or a list of words, got {stop_words!r}")
        if (vocabulary_size is not None and vocabulary_size < 1) or max_tokens < 1:
            raise ValueError(f"expected vocabulary_size and max_tokens above 0, got {vocabulary_size} and {max_tokens}")
        if texts < 0:
            raise ValueError(f"expected texts >= 0, got {texts}")
        if (holdout_path is None) != (holdout_lines == 0) or holdout_lines < 0:
            raise ValueError(f"expected holdout_path and holdout_lines or none of both, got {holdout_lines} lines")
        if vocabulary_file is not None:
            self.vocabulary = Vocabulary.from_file(Path(vocabulary_file))
        else:
            self.vocabulary = Vocabulary(vocabulary_size or 0)
        self.texts = texts
        self.max_tokens = max_tokens
        self.input_shape = (max_tokens,)
        self._stop_words = ENGLISH if isinstance(stop_words, str) else frozenset(stop_words)
        self._holdout = (holdout_path, holdout_lines, tuple(fields))

    def decode(self, record: bytes) -> Sample:
        ids, y = self._parsed(record)
        x = np.full(self.max_tokens, PADDING, np.int32)
        x[: len(ids)] = ids
        return Sample(x, y)

    def decode_many(self, values: Sequence[bytes]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        texts, ys, bad = list[list[int]](), list[int](), list[int]()
        for at, value in enumerate(values):
            try:
                ids, y = self._parsed(value)
            except SampleError:
                bad.append(at)
            else:
                texts.append(ids)
                ys.append(y)
        if bad:
            raise BadRecordsError(bad)
        lengths = np.array(list(map(len, texts)), np.int64)
        x = np.full((len(texts), self.max_tokens), PADDING, np.int32)
        x[np.arange(self.max_tokens) < lengths[:, None]] = np.fromiter(
            itertools.chain.from_iterable(texts), np.int32, int(lengths.sum())
        )
        return x, np.array(ys, np.int64)

    def _parsed(self, record: bytes) -> tuple[list[int], int]:
        """Return the ids of a record's tokens, and y.

        Raises:
            SampleError: the record is not in this format, has too many tokens, or lacks a number.
        """
        try:
            text, number = msgspec.structs.astuple(_TEXT.decode(record))
        except (ValueError, RecursionError) as exc:
            raise SampleError(f'expected a JSON object with a text in "text": {exc}, in {record[:40]!r}') from None
        words = tokens(text)
        if len(words) > self.max_tokens:
            raise SampleError(
                f"expected at most {self.max_tokens} tokens (max_tokens of the task), got {len(words)}: send a long "
                "text in several records, as the source `text` does (source.tokens_per_record)"
            )
        if self.texts and not 0 <= number < self.texts:
            got = "none" if number == -1 else number
            raise SampleError(f'expected a "number" of 0 to {self.texts - 1} (texts of the task), got {got}')
        if self._stop_words:
            words = [word for word in words if word not in self._stop_words]
        ids = self.vocabulary.ids(words)
        return ids, number if self.texts else len(ids)

    def holdout(self) -> Iterable[Sample]:
        path, count, fields = self._holdout
        if path is None:
            return ()
        held_out = itertools.islice(read_lines(Path(path), max_bytes=_LONGEST_LINE_BYTES), count)
        numbers = itertools.repeat(0) if self.texts else None  # held-out documents are never trained on
        pieces = records(
            held_out, fields, tokens_per_record=self.max_tokens, max_bytes=_LONGEST_LINE_BYTES, numbers=numbers
        )
        return [self.decode(piece) for piece in pieces]

    def add_checksum(self, model: torch.nn.Module) -> None:
        """Add the vocabulary's checksum to `model` as a frozen parameter. So another file changes the fingerprint."""
        import torch

        if self.vocabulary.checksum:
            value = torch.tensor([self.vocabulary.checksum])
            model.register_parameter("vocabulary_checksum", torch.nn.Parameter(value, requires_grad=False))
