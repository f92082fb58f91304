"""The user's side of a job: a `Task` builds the model, decodes records, and defines loss and metrics.

A task is a plain Python class, named in the job file as `module:Class` or `file.py:Class`. Thirty lines are enough:

    import json
    import torch
    from doll import Sample, Task

    class Churn(Task):
        input_shape = (3,)
        num_classes = 2

        def build_model(self):
            return torch.nn.Linear(3, 2)

        def decode(self, record):
            event = json.loads(record)
            return Sample([event["age"], event["visits"], event["spend"]], event["left"])

`doll.JsonTask` decodes such records a batch at a time, in a twentieth of the time.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from doll.config.fingerprint import PATH_ENDINGS
from doll.errors import ConfigError, SampleError
from doll.tables.rows import LookUp, Rows
from doll.task import trees
from doll.task.records import Record, Records

if TYPE_CHECKING:
    import torch

    from doll.config import JobConfig
    from doll.config.format import FormatSection

_NOT_THE_USERS: Final = frozenset({"doll", "builtins", "abc", "typing"})  # packages of a task's base classes


class Sample(NamedTuple):
    """One sample.

    `x` and `y` are arrays (anything `numpy.asarray` takes, such as a number or a list of numbers), or dicts, tuples and
    lists of these: a tuple or list is one array, unless an array or a dict is in it. Every array keeps its type, with
    two exceptions: float64 in `x` becomes float32, and so do all types but integers if `x` is one array.

    Attributes:
        x: features.
        y: target: a class, a number, or anything that x may be.
        weight: a finite number of 0 or more. 2 counts as the same sample twice, in the gradient, the loss and the
            metrics.
        group: an integer of 64 bits above -2**63, or a text, which a hash makes one; for losses over several samples,
            such as those of ranking. See `Task.loss`.
    """

    x: Any
    y: Any
    weight: float = 1.0
    group: int | str | None = None


class _Features(msgspec.Struct, forbid_unknown_fields=True):
    x: Any


class Samples(NamedTuple):
    """The samples that `Task.decode_many` makes of n records, if it has more to return than x and y.

    Skipped records are counted, and are no dead letters.

    Attributes:
        x, y: shapes (k, *input_shape) and (k, ...), of all samples, in the order of their records; or dicts, tuples and
            lists of such arrays.
        skipped: for each reason, which records are skipped for it: booleans, shape (n,). If two reasons name a
            record, the first counts.
        counts: how many samples each record gives, whole numbers, shape (n,): 0 if it is skipped, else 1 to
            `Task.max_samples_per_record`. None: 1 if it is not skipped.
        weight: of each sample, shape (k,); None: 1.
        group: of each sample, integers or texts, shape (k,); None: they have none; -2**63: this one has none.
    """

    x: Any
    y: Any
    skipped: Mapping[str, npt.NDArray[np.bool_]] = {}
    counts: npt.NDArray[np.integer[Any]] | None = None
    weight: npt.NDArray[Any] | None = None
    group: npt.NDArray[Any] | None = None


def x_of(decoded: Sample | list[Sample]) -> Any:
    """x of what a record was decoded to.

    Raises:
        SampleError: it is not one sample.
    """
    if not isinstance(decoded, list):
        return decoded.x
    if len(decoded) != 1:
        raise SampleError(f"expected a record of one sample, got one of {len(decoded)}")
    return decoded[0].x


class Task:
    """The task to learn. Subclass it; only `build_model` and `decode` must be written.

    A worker calls `decode`, `decode_block` and `decode_many` in one thread, and the other methods in another one.
    What the three return is kept until the batch is durable: an array that a later call writes to again must be copied.

    Attributes:
        input_shape: shape of one sample's `x`. A record of another shape is dead-lettered. None: the shape that most
            records of a batch have.
        num_classes: number of classes. A target outside 0 .. num_classes - 1 is dead-lettered. None: regression, or
        unchecked.
        max_samples_per_record: how many samples a record may give; a record that gives more is dead-lettered. It bounds
            the memory of a batch, whose records are counted, and not its samples.
        whole_records: whether `decode_many` reads keys, headers or timestamps of its `Records`. They cost time and
            memory only if this is set. A task that overrides `decode_record` has them.
    """

    input_shape: tuple[int, ...] | None = None
    num_classes: int | None = None
    max_samples_per_record: int = 1
    whole_records: bool = False

    def build_model(self) -> torch.nn.Module:
        """A fresh model. It is called after the job's seed is set, so every process builds the same one."""
        raise NotImplementedError(f"{type(self).__name__} must define build_model()")

    def decode(self, record: bytes) -> Sample | list[Sample]:
        """The sample in one Kafka record's value. Any exception dead-letters it, with its message as the reason.

        A list of samples if `max_samples_per_record` is above 1; one that is empty counts the record as skipped. If
        one of them cannot be used, the whole record is dead-lettered.

        Two exceptions do not: `doll.SkipRecord` counts the record as skipped, with its message as the reason; on
        `doll.RetryLater` the worker waits, shows its message in `doll status`, and decodes the batch again.
        """
        raise NotImplementedError(f"{type(self).__name__} must define decode(record)")

    def decode_record(self, record: Record) -> Sample | list[Sample]:
        """Optional, in place of `decode`, for a task that needs a record's key, headers, timestamp or offset."""
        return self.decode(record.value)

    def decode_block(self, block: memoryview, width: int) -> tuple[Any, Any] | None:
        """Optional fast path: decode records of equal length, laid end to end, in one go.

        Args:
            block: `count * width` bytes.
            width: bytes per record.

        Returns:
            Arrays: x of shape (count, *input_shape) and y of shape (count, ...), as `decode` gives them one by one; or
            dicts, tuples and lists of such arrays. None if there is no fast path for this width, or a record is bad.
        """
        return None

    def decode_many(self, values: Records) -> Samples | tuple[Any, Any] | None:
        """Optional fast path: decode records of any lengths, such as JSON or CSV, in one go.

        A call that raises or returns None is repeated for each half, down to single records, which `decode` then takes
        or refuses; `BadRecordsError` names the bad ones, and the call is repeated without them. `doll.JsonTask` has
        this method for JSON objects.

        Args:
            values: the list of the values of n records, n >= 1, with their offsets, and with keys, headers and
                timestamps if `whole_records` is set.

        Returns:
            Arrays: x of shape (n, *input_shape) and y of shape (n, ...), in the order of `values`, or dicts, tuples and
            lists of such arrays. Row i must be what `decode(values[i])` gives, of a type that does not depend on the
            other records. `Samples` if some records are skipped, or give several samples, or if samples have
            weights or groups.

        Raises:
            BadRecordsError: some of the records are bad.
            RetryLater: the worker is to wait, and to decode the batch again; see `decode`.
        """
        return None

    def decode_features(self, record: bytes) -> Any:
        """x of a record that need not have a target, for predictions (`POST /predict` of `doll serve`).

        Default: of a JSON object with the one key `x`, what it has there; else x of what `decode` makes of the whole
        record, target included.
        """
        try:
            x = msgspec.json.decode(record, type=_Features).x
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return x_of(self.decode_record(Record(record)))
        if not all(trees.are_numbers(leaf) for leaf in trees.parts_of(x)[0] if isinstance(leaf, list)):
            raise SampleError("x: expected numbers, got other values")
        return x

    def predict(self, output: Any) -> Mapping[str, Any]:
        """Optional: what `POST /predict` answers, from the model's output for n samples of one request.

        Default: with `num_classes`, `class` and `probabilities` (softmax); one number for each sample is its `value`;
        if a method of the task takes the groups of samples (a ranking), it is its `score`, and `rank` counts from 0,
        the best one of the request; of all other models the tensors of the output.

        Returns:
            Tensors or arrays of shape (n, ...), by name.
        """
        import torch

        if not isinstance(output, torch.Tensor):
            leaves, structure = trees.flat(output)
            return dict(zip(trees.dotted_names("output", structure), leaves, strict=True))
        if self.num_classes is not None and output.shape[1:] == (self.num_classes,):
            return {"class": output.argmax(dim=1), "probabilities": output.float().softmax(dim=1)}
        if output.shape[1:] not in ((), (1,)):
            return {"output": output}
        values = output.reshape(-1)
        if any(
            "group" in inspect.signature(getattr(type(self), name)).parameters for name in ("forward", "loss", "losses")
        ):
            return {"score": values, "rank": values.argsort(descending=True).argsort()}
        return {"value": values}

    def use_format(self, section: FormatSection, *, load: Callable[[str], Any], path: Callable[[Path], Path]) -> None:
        """Decode values as `data.format` says; called when a job loads the task. Only a `doll.FieldsTask` can.

        Args:
            load: the object that `module:Name` or `file.py:Name` names.
            path: resolves a path of the job file.

        Raises:
            ConfigError: the task does not decode this format, or the format has not the fields that it needs.
        """
        raise ConfigError(
            f"data.format: expected a task that subclasses doll.FieldsTask, got {type(self).__name__}, which decodes "
            "values itself"
        )

    def spec(self) -> tuple[Any, Any] | None:
        """Optional: what the arrays of a sample are. A sample that does not fit is dead-lettered, by its field's name.

        Returns:
            For x and for y a `doll.Field`, or dicts, tuples and lists of fields; None for one of them leaves it open.
            Without, and if x or y is more than one array, the first good samples of a process say it.
        """
        return None

    def collate(self, samples: Sequence[Sample]) -> tuple[Any, Any]:
        """Optional: how the samples of a batch become what `forward` and `loss` get. Default: each array is stacked.

        A task that defines it may give samples of different shapes, such as texts; `doll.pad` makes arrays of one shape
        of them. It is called for each part of a batch that is computed by itself, also for single samples.

        Args:
            samples: at least one; x and y of each are arrays, or dicts, tuples and lists of arrays.

        Returns:
            x and y of all samples: arrays of numpy, or dicts, tuples and lists of these.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define collate(samples)")

    def forward(self, model: torch.nn.Module, x: Any) -> Any:
        """Model output for a batch `x` of shape (n, *input_shape). Default: `model(x)` on floats.

        `x` is of float32, or of integers if all samples of the batch hold only integers: an embedding takes
        `x.long()`, a layer of numbers `x.float()`. If the x of samples is a dict, tuple or list, it is one of
        tensors, each as `Sample` says, and the default passes it on as it is.

        A method that also has a parameter `group` gets the ids of the samples' groups there: int64, shape (n,), None
        if no sample has one.
        """
        import torch

        if not isinstance(x, torch.Tensor):
            return model(x)
        output: torch.Tensor = model(x if x.is_floating_point() else x.to(torch.get_default_dtype()))
        return output

    def loss(self, output: Any, target: Any) -> torch.Tensor:
        """Mean loss over the batch, a scalar. Default: cross-entropy with `num_classes`, else mean squared error.

        A method that also has the parameters `group` or `weight` gets the ids of the samples' groups (as `forward`),
        and their weights: float32, shape (n,), None if all are 1. With weights it returns the weighted mean. A task
        with a `loss` of its own that has neither that parameter nor `losses` cannot have weights.
        """
        import torch.nn.functional as F

        if self.defines("losses"):
            return self.losses(output, target).mean()
        if self.num_classes is not None:
            return F.cross_entropy(output, target.long())
        return F.mse_loss(output.reshape(target.shape), target.to(output.dtype))

    def losses(self, output: Any, target: Any) -> torch.Tensor:
        """Loss of each sample, shape (n,), whose mean `loss` is; for samples with weights. Default: as that of `loss`.

        Define it in place of `loss` if samples have weights and the loss is another one. It may have `group` too.
        """
        import torch.nn.functional as F

        if self.num_classes is not None:
            return by_sample(F.cross_entropy(output, target.long(), reduction="none"))
        return by_sample(F.mse_loss(output.reshape(target.shape), target.to(output.dtype), reduction="none"))

    def metrics(self, output: Any, target: Any) -> Mapping[str, Any]:
        """Means over the batch, by name. Default: `accuracy` with `num_classes`, else nothing. See `stop.accuracy`.

        A value may be a tensor of shape (n,) instead: of each sample. If samples have weights, each value must be
        one, or the method has the parameter `weight`, and returns weighted means. It may have `group`, as `loss`.
        """
        if self.num_classes is None:
            return {}
        return {"accuracy": float((output.argmax(dim=1) == target).cpu().double().mean())}

    def stages(self, model: torch.nn.Module) -> Sequence[tuple[str, torch.nn.Module]] | None:
        """Optional, for pipelines (`worker.pipeline`): the layers between which the model may be cut, by name.

        Needed only if the model is no `torch.nn.Sequential` and its graph cannot be traced (`torch.fx`).

        Args:
            model: what `build_model` returned; the layers are parts of it, and hold each of its parameters once.

        Returns:
            Modules that give the model's output one after the other, each a tensor, or dicts, tuples and lists of
            tensors, which the next one takes. Called in this order, the
            first by `forward`. None: the model is cut without help.
        """
        return None

    def step(
        self, weights: npt.NDArray[np.float32], x: Any, y: Any, rng: np.random.Generator
    ) -> npt.NDArray[np.float32]:
        """Optional, for models that do not learn by a gradient: what a batch changes in the weights.

        It takes the place of gradient and optimizer at the workers, and needs a policy whose workers send steps
        (`training.policy`). Loss and metrics are computed before it, without gradients.

        Args:
            weights: float32, shape (numel,), laid out as `doll.model.flat_model` says; it must not be changed.
            x: shape (n, *input_shape), n >= 1; or a dict, tuple or list of arrays, as those of the samples.
            y: shape (n, ...), or the same.
            rng: the same numbers whenever this batch is computed.

        Returns:
            The change of the weights, of their type and shape. The server adds it to its own weights, which may be
            newer.

        A method that also has the parameters `weight` or `group` gets those of the samples, as `loss`, in arrays.
        """
        raise NotImplementedError(f"{type(self).__name__} must define step(weights, x, y, rng)")

    def step_rows(
        self,
        weights: npt.NDArray[np.float32],
        look_up: LookUp,
        x: Any,
        y: Any,
        rng: np.random.Generator,
    ) -> tuple[npt.NDArray[np.float32], Mapping[str, Rows]]:
        """Optional, as `step`, for a model with tables (embeddings with `sparse=True`).

        Args:
            weights: of what is not in a table, as for `step`.
            look_up: name of a table's parameter, as in `named_parameters()`, and ids, int64, strictly increasing -> a
                copy of these rows, float32, shape (n, width). They have all steps of this worker's earlier batches.
            x, y, rng: as for `step`.

        Returns:
            The change of the weights, as of `step`; and the change of rows, by table. The server adds both.
        """
        raise NotImplementedError(f"{type(self).__name__} must define step_rows(weights, look_up, x, y, rng)")

    def defines(self, method: str) -> bool:
        """Whether the task has a method of this name of its own."""
        return getattr(type(self), method) is not getattr(Task, method) or method in vars(self)

    @property
    def is_ragged(self) -> bool:
        """Whether samples may differ in shape: the task puts them together itself."""
        return self.defines("collate")

    @property
    def reads_envelopes(self) -> bool:
        """Whether the task reads more of a record than its value."""
        return self.whole_records or self.decodes_records

    @property
    def decodes_records(self) -> bool:
        """Whether `decode_record` takes the place of `decode`."""
        return type(self).decode_record is not Task.decode_record

    @property
    def steps_rows(self) -> bool:
        """Whether `step_rows` takes the place of the gradient."""
        return type(self).step_rows is not Task.step_rows

    @property
    def defines_step(self) -> bool:
        """Whether `step` or `step_rows` takes the place of the gradient."""
        return type(self).step is not Task.step or self.steps_rows

    def holdout(self) -> Iterable[Sample]:
        """Held-out samples, never in the stream. Default: none; then only prequential error is shown."""
        return ()


def by_sample(values: torch.Tensor) -> torch.Tensor:
    """The mean of each sample's values, shape (n,), of values of shape (n, ...)."""
    return values if values.ndim <= 1 else values.flatten(1).mean(1)


def load_task(config: JobConfig) -> Task:
    """The task that the job file names.

    Raises:
        ConfigError: the module or class cannot be imported, is not a `Task`, or does not take the given arguments.
    """
    spec = config.task.cls
    module_name, _, class_name = spec.rpartition(":")
    with user_code(f"task.class: cannot import {module_name!r}{moved(module_name)}"):
        module = _load(module_name, config, "task.class")
    cls = getattr(module, class_name, None)
    if cls is None:
        raise ConfigError(f"task.class: {module_name!r} has no class {class_name!r}")
    if not (isinstance(cls, type) and issubclass(cls, Task)):
        raise ConfigError(f"task.class: expected a subclass of doll.Task, got {spec!r} which is {cls!r}")
    with user_code(f"task.args: {spec} does not take {config.task.args}"):
        task = cls(**_resolved(config, config.task.args))
    if not (isinstance(most := task.max_samples_per_record, int) and most >= 1):
        raise ConfigError(f"task.class: {spec}: expected max_samples_per_record of 1 or more, got {most!r}")
    if config.data.format is not None:
        task.use_format(
            config.data.format,
            load=lambda message: _load_name(config, "data.format.message", message),
            path=config.path,
        )
    return task


def load_function(config: JobConfig, section: str, spec: str, args: Mapping[str, Any]) -> Callable[..., Any]:
    """A function of the user, to be called without the arguments of the job file, which it gets too.

    Args:
        section: of the job file, with the keys `of` and `args`.

    Raises:
        ConfigError: it cannot be imported; when it is called: it does not take the arguments, or fails.
    """
    function, given = _load_name(config, f"{section}.of", spec), _resolved(config, args)

    def call(*first: Any) -> Any:
        with user_code(f"{section}.args: {spec} does not take {dict(args)}"):
            return function(*first, **given)

    return call


@contextlib.contextmanager
def user_code(what: str) -> Iterator[None]:
    """Run code of the user, which may raise anything: each exception becomes a ConfigError that says `what` and why."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as exc:
        raise ConfigError(f"{what}: {described(exc)}") from exc


def described(error: Exception) -> str:
    """An error of the user's code in one line: its type, what it says, and where it was raised."""
    place = traceback.extract_tb(error.__traceback__)[-1:]
    where = "".join(f" ({Path(frame.filename).name}, line {frame.lineno})" for frame in place)
    return f"{type(error).__name__}: {error}{where}"


def moved(module: str) -> str:
    """Advice for a module that cannot be imported because its task became an example; empty for any other."""
    if not module.startswith("doll.tasks."):
        return ""
    return "; the tasks that ship are examples now: doll example list; a run of an earlier release needs that release"


def source_checksum(task: Task) -> str:
    """The checksum of the files in which a task's classes are written, without DOLL's own: 16 hexadecimal digits.

    It says whether two versions were learned with the same code. "" if no such file is there, as for a class of a
    notebook.
    """
    checksum, files = hashlib.sha256(), []
    for cls in type(task).__mro__:
        if cls.__module__.partition(".")[0] not in _NOT_THE_USERS:
            with contextlib.suppress(OSError, TypeError):
                files.append(Path(inspect.getfile(cls)).read_bytes())
    for content in dict.fromkeys(files):  # several classes may be in one file
        checksum.update(len(content).to_bytes(8, "little") + content)
    return checksum.hexdigest()[:16] if files else ""


def _resolved(config: JobConfig, args: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of the job file; those named like paths are relative to it, as every other path in it."""
    return {
        key: str(config.path(Path(value))) if isinstance(value, str) and key.endswith(PATH_ENDINGS) else value
        for key, value in args.items()
    }


def _load_name(config: JobConfig, key: str, spec: str) -> Any:
    """The object that `module:name` or `file.py:name` stands for."""
    module_name, _, name = spec.rpartition(":")
    with user_code(f"{key}: cannot load {spec!r}"):
        return getattr(_load(module_name, config, key), name)


def _load(name: str, config: JobConfig, key: str) -> Any:
    """A module by its name, or by its file."""
    # A job file's own folder may hold the user's modules, as with `python script.py`: also those of an optimizer.
    folder = str(config.base_folder)
    if folder not in sys.path:
        sys.path.append(folder)
    return _load_file(config.path(Path(name)), key) if name.endswith(".py") else importlib.import_module(name)


def _load_file(path: Path, key: str) -> Any:
    if not path.is_file():
        raise ConfigError(f"{key}: expected a Python file at {path}, which does not exist")
    name = f"doll_task_{path.resolve().parent.name}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{key}: {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
