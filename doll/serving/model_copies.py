"""Copies of a job's model in memory: one for each served version, and one more into which the next version is loaded.

A version is loaded into the spare copy, which then replaces a served one in a single step. A computation keeps one copy
until its end, so that it never mixes weights of two versions. The replaced copy is loaded again only when no
computation uses it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from doll.errors import TaskError
from doll.evaluation.stored_weights import Place, StoredWeights, place_of
from doll.model.flat_model import FlatModel


class ServedVersion:
    """A version that is in memory.

    Attributes:
        made_s: Unix time of its update; if that is not known, the time when the version was read.
        samples: number of usable samples that it has learned from; -1 if not known.
        events: their event times; `NO_EVENTS` if not known.
    """

    def __init__(self, stored: StoredWeights) -> None:
        self.place: Final = place_of(stored)
        self.is_average: Final = stored.is_average
        self.made_s = time.time()
        self.samples = stored.samples
        self.events = stored.events


class Lane:
    """A version that answers requests, selected by its number or by a name.

    Attributes:
        wanted: a number, an alias, or `latest`.
        share: percentage that this lane answers of the requests that name no version.
        copy: the copy that answers now. None: no version has been read yet.
        problem: reason why the wanted version is missing; "": it is not missing.
        stale: reason why a newer version may have been missed; "": none has been missed.
        left: the rollback that has undone the served version; "": there is none.
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
        """The place of the version that answers now; None: no version has been read yet."""
        copy = self.copy
        return None if copy is None else copy.version.place


class ModelCopy:
    """A copy of the model in memory.

    Attributes:
        version: the version that was loaded last.
        users: number of computations that use the copy now.
    """

    version: ServedVersion

    def __init__(self, model: FlatModel) -> None:
        self.model: Final = model
        self.users = 0


class ModelCopies:
    """The copies of all lanes: one for each lane, and one spare copy. Thread-safe, but only one thread may load.

    Args:
        build: creates a model of the job.
    """

    def __init__(self, build: Callable[[], FlatModel], lanes: Sequence[Lane]) -> None:
        self.lanes: Final = lanes
        self._build = build
        self._changed = threading.Condition()
        self._copies: list[ModelCopy] = []
        self._copies.append(ModelCopy(self._built()))

    @property
    def model(self) -> FlatModel:
        """One of the models, from which the shapes of the weights are known."""
        return self._copies[0].model

    def load(
        self, lane: Lane, stored: StoredWeights, check: Callable[[ModelCopy], None] = lambda copy: None
    ) -> ModelCopy:
        """Swap the copy of `lane`: the lane answers with this version from now on.

        Args:
            check: called with the copy before it answers; if it raises an exception, the version is not served.

        Raises:
            ValueError: the weights belong to another model.
        """
        copy = next((copy for copy in self._served() if copy.version.place == place_of(stored)), None)
        if copy is None:
            copy = self._loaded(stored)
            check(copy)
        with self._changed:
            lane.copy = copy
        return copy

    def take(self, lane: Lane) -> ModelCopy:
        """Return the copy that answers for `lane`; it does not change until `give_back`.

        Raises:
            LookupError: no version has been read yet.
        """
        with self._changed:
            copy = lane.copy
            if copy is None:
                raise LookupError(lane.problem)
            copy.users += 1
        return copy

    def give_back(self, copy: ModelCopy) -> None:
        """End the use of a copy, so that it may be loaded again."""
        with self._changed:
            copy.users -= 1
            if copy not in self._served():  # the loading thread waits for it
                self._changed.notify_all()

    def _served(self) -> list[ModelCopy]:
        return [lane.copy for lane in self.lanes if lane.copy is not None]

    def _loaded(self, stored: StoredWeights) -> ModelCopy:
        """Load this version into the copy that answers for no lane, and return this copy."""
        with self._changed:
            served = self._served()
            spare = next((copy for copy in self._copies if copy not in served), None)
            if spare is not None:
                while spare.users:
                    self._changed.wait()
        if spare is None:
            spare = ModelCopy(self._built())
            self._copies.append(spare)
        with suppress(TaskError):  # a request has made a buffer grow; it will grow again
            spare.model.restore_buffers()  # otherwise the version would not reach a replaced buffer
        stored.load_into(spare.model)
        spare.version = ServedVersion(stored)
        return spare

    def _built(self) -> FlatModel:
        model = self._build()
        model.drop_gradients()
        model.module.eval()
        if self._copies:  # frozen parameters may be large: all copies share those of the first
            first = dict(self._copies[0].model.module.named_parameters())
            for name, parameter in model.module.named_parameters():
                if not parameter.requires_grad and name in first and not first[name].requires_grad:
                    parameter.data = first[name].data
        return model
