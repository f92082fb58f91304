"""Topics and word vectors of Reuters-21578, by the tasks that ship, in one process without services.

    python -m benchmarks.text topics [--path FILE] [--topics 50] [--passes 1 5] [--one-by-one]
    python -m benchmarks.text words [--path FILE]

`topics` compares held-out perplexities: the plain algorithm, the same with steps at counts that are some updates old
(as of several workers), and scikit-learn's variational Bayes, all with one vocabulary, prior and document completion.
`words` learns vectors and prints the nearest neighbours of some words.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from doll.task.batches import batch_of
from doll.task.text import read_lines, records, tokens
from examples.lda import task as lda
from examples.lda.task import Topics
from examples.words.task import SkipGram

REUTERS = Path(__file__).parents[2] / "shared/data/reuters21578/docs.jsonl.gz"
FIELDS, HELD_OUT, MAX_BYTES = ("title", "body"), 1000, 1 << 20
BATCH, WORDS = 64, 10_000
Ids = npt.NDArray[np.int32]


def corpus(task: Topics | SkipGram, path: Path) -> tuple[Ids, Ids]:
    """Texts of the stream and those held out, as the task decodes them: both of shape (n, max_tokens)."""
    lines = read_lines(path, skip=HELD_OUT, max_bytes=MAX_BYTES)
    stream, _ = task.decode_many(list(records(lines, FIELDS, tokens_per_record=task.max_tokens, max_bytes=MAX_BYTES)))
    return stream, batch_of(task, task.holdout()).x


def arguments(path: Path, folder: str) -> dict[str, Any]:
    """Those of a task on the text at `path`, with a vocabulary of its most frequent words."""
    vocabulary = Path(folder) / "vocabulary.txt"
    write_vocabulary(vocabulary, read_lines(path, skip=HELD_OUT, max_bytes=MAX_BYTES), FIELDS, WORDS)
    return {"vocabulary_file": str(vocabulary), "holdout_path": str(path), "holdout_lines": HELD_OUT, "fields": FIELDS}


def write_vocabulary(path: Path, documents: Iterable[bytes], fields: Sequence[str], size: int) -> None:
    """Write the most frequent tokens of these lines, with how often they occur, for `Vocabulary.from_file`.

    Args:
        fields: as in the source `text`.
        size: the number of tokens at most, by falling counts, then by the alphabet.
    """
    counts: Counter[str] = Counter()
    for record in records(documents, fields, tokens_per_record=1 << 30, max_bytes=MAX_BYTES):
        counts.update(tokens(json.loads(record)["text"]))
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:size]
    path.write_text("".join(f"{token} {count}\n" for token, count in ordered), encoding="utf-8")


def passes(texts: Ids, count: int) -> Iterator[Ids]:
    """The batches of so many passes."""
    for _ in range(count):
        for first in range(0, len(texts), BATCH):
            yield texts[first : first + BATCH]


def plain(task: Topics, texts: Ids, count: int, age: int = 0, together: int | None = None) -> lda.Counts:
    """The counts after `count` passes. Each step is computed at counts that lack the last `age` steps."""
    rng = np.random.default_rng(0)
    counts = lda.Counts(np.zeros((task.vocabulary.size, task.num_topics), np.float32), np.zeros(task.num_topics))
    late: deque[lda.Change] = deque()
    for batch in passes(texts, count):
        sampler = lda.Sampler(counts, batch, task.prior, together=together)
        for _ in range(task.sweeps):
            sampler.sweep(rng)
        late.append(sampler.change())
        while len(late) > age:
            change = late.popleft()
            counts.word_topic[change.words] += change.word_topic
            counts.topic[:] += change.topic
    return counts


def perplexity(probabilities: npt.NDArray[np.float64], held_out: Ids, alpha: float) -> float:
    likelihoods, numbers = lda.completion(probabilities, held_out, alpha)
    return float(np.exp(-likelihoods.sum() / numbers.sum()))


def scikit_learn(task: Topics, texts: Ids, count: int, method: str) -> npt.NDArray[np.float64]:
    """p(word | topic) of scikit-learn's variational Bayes after so many passes."""
    from scipy.sparse import csr_matrix
    from sklearn.decomposition import LatentDirichletAllocation

    rows, places = np.nonzero(texts >= 0)
    shape = (len(texts), task.vocabulary.size)
    matrix = csr_matrix((np.ones(len(rows)), (rows, texts[rows, places])), shape)
    model = LatentDirichletAllocation(
        task.num_topics, doc_topic_prior=task.prior.alpha, topic_word_prior=task.prior.beta, learning_method=method,
        max_iter=count, batch_size=BATCH, random_state=0,
    )  # fmt: skip
    components = model.fit(matrix).components_
    probabilities: npt.NDArray[np.float64] = (components / components.sum(axis=1, keepdims=True)).T
    return probabilities


def topics(path: Path, num_topics: int, numbers: list[int], one_by_one: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        task = Topics(num_topics, stop_words="english", **arguments(path, folder))
    stream, held_out = corpus(task, path)
    print(f"{len(stream)} texts, {(stream >= 0).sum()} tokens, {len(held_out)} held out; {num_topics} topics")
    frequencies = np.bincount(stream[stream >= 0], minlength=task.vocabulary.size) + task.prior.beta
    print(f"words by frequency: {perplexity((frequencies / frequencies.sum())[:, None], held_out, 1.0):8.1f}")
    for count in numbers:
        for age, together in ((0, None), (4, None), (16, None), *([(0, 1)] if one_by_one else [])):
            began_s = time.perf_counter()
            probabilities = lda.word_probabilities(plain(task, stream, count, age, together), task.prior)
            took_s = time.perf_counter() - began_s
            print(
                f"passes {count}, counts {age:2} steps old{', one by one' if together else '':12}: "
                f"{perplexity(probabilities, held_out, task.prior.alpha):8.1f}  {took_s:6.1f} s",
                flush=True,
            )
        for method in ("online", "batch"):
            began_s = time.perf_counter()
            probabilities = scikit_learn(task, stream, count, method)
            took_s = time.perf_counter() - began_s
            name = f"passes {count}, scikit-learn {method}"
            print(
                f"{name:42}: {perplexity(probabilities, held_out, task.prior.alpha):8.1f}  {took_s:6.1f} s", flush=True
            )


def words(path: Path) -> None:
    import torch

    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        given = arguments(path, folder)
        names = [line.split()[0] for line in Path(given["vocabulary_file"]).read_text().splitlines()]
        task = SkipGram(**{**given, "sparse": False})  # one process, torch's own Adam
    stream, held_out = corpus(task, path)
    model = task.build_model()
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 0.01)
    began_s = time.perf_counter()
    for number, batch in enumerate(passes(stream, 3)):
        optimizer.zero_grad()
        output = task.forward(model, torch.from_numpy(batch))
        task.loss(output, output).backward()
        optimizer.step()
        if number % 100 == 0:
            with torch.no_grad():
                output = task.forward(model, torch.from_numpy(held_out))
            print(f"{number:5} updates, {time.perf_counter() - began_s:6.1f} s: held-out loss "
                  f"{float(task.loss(output, output)):.4f}", flush=True)  # fmt: skip
    vectors = torch.nn.functional.normalize(model.get_parameter("words.weight").detach()).numpy()
    for name in ("oil", "wheat", "bank", "dollar", "april", "japan", "shares"):
        near = np.argsort(-(vectors @ vectors[names.index(name)]))[1:9]
        print(f"{name}: {', '.join(names[at] for at in near)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["topics", "words"])
    parser.add_argument("--path", type=Path, default=REUTERS)
    parser.add_argument("--topics", type=int, default=50)
    parser.add_argument("--passes", type=int, nargs="+", default=[1, 5])
    parser.add_argument("--one-by-one", action="store_true", help="also with exact sampling, in 20 times the time")
    asked = parser.parse_args()
    if not asked.path.is_file():
        sys.exit(f"{asked.path}: expected the JSON lines of Reuters-21578; name the file with --path")
    if asked.what == "topics":
        topics(asked.path, asked.topics, asked.passes, asked.one_by_one)
    else:
        words(asked.path)


if __name__ == "__main__":
    main()
