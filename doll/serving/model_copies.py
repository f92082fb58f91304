"""Copies of a job's model in memory: what is served, and one more, which the next version is loaded into.

A version is loaded beside those that are served, and takes the place of one of them at once. Whoever computes holds
one copy meanwhile, so that no number of another version is among its weights. The copy that was replaced is loaded
again when nobody computes with it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final

from doll.errors import TaskError
from doll.evaluation.stored_weights import Place, StoredWeights, place_of
from doll.model.flat_model import FlatModel

UNKNOWN: Final = -1


class ServedVersion:
    """A version that is in memory.

    Attributes:
        made_s: Unix time of its update; of a version whose update is not known, when it was read.
        samples: usable samples that it has learned from; `UNKNOWN`.
    """

    def __init__(self, stored: StoredWeights) -> None:
        self.place: Final = place_of(stored)
        self.is_average: Final = stored.is_average
        self.made_s = time.time()
        self.samples = stored.samples


class Lane:
    """A version that requests are answered with, by its number or by a name.

    Attributes:
        wanted: a number, an alias, or `latest`.
        share: of the requests that name no version, in percent.
        copy: that answers now; None: none has been read yet.
        problem: why what is wanted is not there; "": it is.
        stale: why a newer version may not have been seen; "": none has been missed.
        left: which rollback has left the version that answers behind; "": none has.
    """

    def __init__(self, wanted: str, share: float = 100.0) -> None:
        self.wanted: Final = wanted
        self.share: Final = share
        self.copy: ModelCopy | None = None
        self.problem = "no version has been read yet"
        self.stale = ""
        self.left = ""

    @property
    def place(self) -> Place | None:
        """The place of the version that answers now."""
        copy = self.copy
        return None if copy is None else copy.version.place


class ModelCopy:
    """A model in memory.

    Attributes:
        version: that was loaded last.
        users: how many compute with it now.
    """

    version: ServedVersion

    def __init__(self, model: FlatModel) -> None:
        self.model: Final = model
        self.users = 0


class ModelCopies:
    """The copies of all lanes: as many as lanes, and one more. Safe to share between threads; one thread loads.

    Args:
        build: makes a model of the job.
    """

    def __init__(self, build: Callable[[], FlatModel], lanes: Sequence[Lane]) -> None:
        self.lanes: Final = lanes
        self._build = build
        self._changed = threading.Condition()
        self._copies: list[ModelCopy] = []
        self._copies.append(ModelCopy(self._built()))

    @property
    def model(self) -> FlatModel:
        """One of the models: it says what weights must be like."""
        return self._copies[0].model

    def load(
        self, lane: Lane, stored: StoredWeights, check: Callable[[ModelCopy], None] = lambda copy: None
    ) -> ModelCopy:
        """Have `lane` answer with this version from now on.

        Args:
            check: is called with the copy before it answers; what it raises keeps the version from being served.

        Raises:
            ValueError: the weights are of another model.
        """
        copy = next((copy for copy in self._served() if copy.version.place == place_of(stored)), None)
        if copy is None:
            copy = self._loaded(stored)
            check(copy)
        with self._changed:
            lane.copy = copy
        return copy

    @contextmanager
    def used(self, lane: Lane) -> Iterator[ModelCopy]:
        """The copy that answers for `lane`, which stays as it is meanwhile.

        Raises:
            LookupError: there is none yet.
        """
        copy = self.take(lane)
        try:
            yield copy
        finally:
            self.give_back(copy)

    def take(self, lane: Lane) -> ModelCopy:
        """`used`, until `give_back`: for each request a context manager takes too long."""
        with self._changed:
            copy = lane.copy
            if copy is None:
                raise LookupError(lane.problem)
            copy.users += 1
        return copy

    def give_back(self, copy: ModelCopy) -> None:
        """It may be loaded again, as far as the caller is concerned."""
        with self._changed:
            copy.users -= 1
            if copy not in self._served():  # whoever loads waits for it
                self._changed.notify_all()

    def _served(self) -> list[ModelCopy]:
        return [lane.copy for lane in self.lanes if lane.copy is not None]

    def _loaded(self, stored: StoredWeights) -> ModelCopy:
        """A copy with this version that answers for no lane."""
        with self._changed:
            served = self._served()
            spare = next((copy for copy in self._copies if copy not in served), None)
            if spare is not None:
                while spare.users:
                    self._changed.wait()
        if spare is None:
            spare = ModelCopy(self._built())
            self._copies.append(spare)
        with suppress(TaskError):  # of a request that has made a buffer grow: it grows again
            spare.model.restore_buffers()  # else the version would not reach one that was replaced
        stored.load_into(spare.model)
        spare.version = ServedVersion(stored)
        return spare

    def _built(self) -> FlatModel:
        model = self._build()
        model.drop_gradients()
        model.module.eval()
        if self._copies:  # frozen parameters may be far larger than the others: all copies use those of the first
            first = dict(self._copies[0].model.module.named_parameters())
            for name, parameter in model.module.named_parameters():
                if not parameter.requires_grad and name in first and not first[name].requires_grad:
                    parameter.data = first[name].data
        return model
