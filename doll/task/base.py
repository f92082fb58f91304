"""The user's side of a job: a `Task` builds the model, decodes records, and defines loss and metrics.

A task is a plain Python class. The job file names it as `module:Class` or `file.py:Class`. A short class is enough:

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

`doll.JsonTask` decodes such records in batches, in a twentieth of the time.
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

    `x` and `y` are arrays (anything that `numpy.asarray` accepts, such as a number or a list of numbers), or dicts,
    tuples and lists of arrays. A tuple or list is one array, unless it contains an array or a dict. Arrays keep their
    types, with two exceptions: float64 in `x` becomes float32; and if `x` is a single array, all types but integers
    become float32.

    Attributes:
        x: the features.
        y: the target: a class, a number, or anything that `x` may be.
        weight: the weight, a finite number of 0 or more. In the gradient, the loss and the metrics, a sample of weight
            2 counts as two equal samples.
        group: the group of the sample, for losses over several samples, such as ranking losses (see `Task.loss`): a
            64-bit integer above -2**63, or a text, which is hashed to such an integer. None: no group.
    """

    x: Any
    y: Any
    weight: float = 1.0
    group: int | str | None = None


class _Features(msgspec.Struct, forbid_unknown_fields=True):
    x: Any


class Samples(NamedTuple):
    """The samples that `Task.decode_many` makes from n records, if it returns more than x and y.

    Skipped records are counted. They do not become dead letters.

    Attributes:
        x, y: arrays of shapes (k, *input_shape) and (k, ...) with all k samples, in the order of their records; or
            dicts, tuples and lists of such arrays.
        skipped: for each reason, a boolean array of shape (n,) that marks the records to skip for this reason. If a
            record is marked for two reasons, the first reason counts.
        counts: number of samples of each record, whole numbers, shape (n,): 0 if the record is skipped, otherwise 1 to
            `Task.max_samples_per_record`. None: one sample for each record that is not skipped.
        weight: weight of each sample, shape (k,). None: all weights are 1.
        group: group of each sample, integers or texts, shape (k,). -2**63: no group. None: no sample has a group.
    """

    x: Any
    y: Any
    skipped: Mapping[str, npt.NDArray[np.bool_]] = {}
    counts: npt.NDArray[np.integer[Any]] | None = None
    weight: npt.NDArray[Any] | None = None
    group: npt.NDArray[Any] | None = None


def x_of(decoded: Sample | list[Sample]) -> Any:
    """Return x of the single sample in `decoded`, the result of decoding a record.

    Raises:
        SampleError: the record was not decoded to exactly one sample.
    """
    if not isinstance(decoded, list):
        return decoded.x
    if len(decoded) != 1:
        raise SampleError(f"expected a record of one sample, got one of {len(decoded)}")
    return decoded[0].x


class Task:
    """The task to learn. Subclass it and write at least `build_model` and `decode`.

    A worker calls `decode`, `decode_block` and `decode_many` in one thread, and the other methods in another thread.
    The worker keeps the arrays that these three methods return until the batch is durable. A method that reuses an
    array in later calls must therefore return a copy.

    Attributes:
        input_shape: shape of one sample's `x`. A record of another shape is dead-lettered. None: the shape that most
            records of a batch have.
        num_classes: number of classes. A record with a target outside 0 .. num_classes - 1 is dead-lettered. None:
            regression, or classes that are not checked.
        max_samples_per_record: maximum number of samples of one record. A record with more samples is dead-lettered.
            The limit bounds the memory of a batch, because the size of a batch is counted in records, not in samples.
        whole_records: whether `decode_many` reads keys, headers or timestamps of its `Records`. Reading them takes time
            and memory. A task that overrides `decode_record` always gets them.
    """

    input_shape: tuple[int, ...] | None = None
    num_classes: int | None = None
    max_samples_per_record: int = 1
    whole_records: bool = False

    def build_model(self) -> torch.nn.Module:
        """Return a new model. It is called after the job's seed is set, so every process builds the same model."""
        raise NotImplementedError(f"{type(self).__name__} must define build_model()")

    def decode(self, record: bytes) -> Sample | list[Sample]:
        """Return the sample in the value of a Kafka record. Any exception dead-letters the record, with its message.

        If `max_samples_per_record` is above 1, the method may return a list of samples. An empty list counts the record
        as skipped. If one of the samples is not usable, the whole record is dead-lettered.

        Two exceptions do not dead-letter the record. `doll.SkipRecord` counts the record as skipped, with its message
        as the reason. After `doll.RetryLater`, the worker waits, shows the message in `doll status`, and decodes the
        batch again.
        """
        raise NotImplementedError(f"{type(self).__name__} must define decode(record)")

    def decode_record(self, record: Record) -> Sample | list[Sample]:
        """Optional: replace `decode` if the task needs the key, headers, timestamp or offset of a record."""
        return self.decode(record.value)

    def decode_block(self, block: memoryview, width: int) -> tuple[Any, Any] | None:
        """Optional fast path: decode records of equal length, which are stored one after another in one block.

        Args:
            block: the `count * width` bytes of the records.
            width: bytes per record.

        Returns:
            Arrays: x of shape (count, *input_shape) and y of shape (count, ...), equal to what `decode` returns for
            each record; or dicts, tuples and lists of such arrays. None: there is no fast path for this width, or a
            record is bad.
        """
        return None

    def decode_many(self, values: Records) -> Samples | tuple[Any, Any] | None:
        """Optional fast path: decode records of any lengths, such as JSON or CSV, in one call.

        If a call raises `BadRecordsError`, which names the bad records, the call is repeated without them. If it
        returns None or raises another exception, it is repeated for each half of the records; in the end, `decode`
        decodes or refuses single records. `doll.JsonTask` has this method for JSON objects.

        Args:
            values: list of the values of n records, n >= 1, with their offsets; also with keys, headers and timestamps
                if `whole_records` is set.

        Returns:
            Arrays: x of shape (n, *input_shape) and y of shape (n, ...), in the order of `values`, or dicts, tuples and
            lists of such arrays. Row i must equal the result of `decode(values[i])`, and its type must not depend on
            the other records. `Samples` if some records are skipped or have several samples, or if samples have weights
            or groups.

        Raises:
            BadRecordsError: some of the records are bad.
            RetryLater: the worker must wait, and then decode the batch again; see `decode`.
        """
        return None

    def decode_features(self, record: bytes) -> Any:
        """Return x of a record that may have no target, for predictions (`POST /predict` of `doll serve`).

        By default, if the record is a JSON object with the only key `x`, return the value of this key; otherwise decode
        the whole record, including its target, with `decode`, and return x.
        """
        try:
            x = msgspec.json.decode(record, type=_Features).x
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return x_of(self.decode_record(Record(record)))
        if not all(trees.are_numbers(leaf) for leaf in trees.parts_of(x)[0] if isinstance(leaf, list)):
            raise SampleError("x: expected numbers, got other values")
        return x

    def predict(self, output: Any) -> Mapping[str, Any]:
        """Optional: convert the model's output for the n samples of one request into the answer of `POST /predict`.

        By default, the answer has `class` and `probabilities` (softmax) if `num_classes` is set, and `value` if the
        model returns one number per sample. If a method of the task takes the groups of samples, such a model is a
        ranking. Then the answer instead has `score` (the number) and `rank` (0 for the best sample of the request). For
        all other models, the answer has the tensors of the output.

        Returns:
            Tensors or arrays of shape (n, ...), by the name that they have in the answer.
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

    def choose(self, output: Any) -> Any:
        """Optional, for a model whose answers are choices between A actions: return the probability of each action.

        `doll serve` draws an action for each sample of `POST /predict` with these probabilities. The answer, and its
        record in the log (`--log-answers`), has `action` and the `probability` with which it was drawn, so that
        `doll versions value` can estimate what another version would have gained.

        Args:
            output: the model's output for n samples.

        Returns:
            A tensor of shape (n, A) whose rows add up to 1; None: answers are no choices.
        """
        return None

    def action_values(self, output: Any) -> Any:
        """Optional, with `choose`: return the reward that the model predicts for each action, a tensor of shape (n, A);
        None: it predicts none. Used by `doll versions value`."""
        return None

    def use_format(self, section: FormatSection, *, load: Callable[[str], Any], path: Callable[[Path], Path]) -> None:
        """Decode values in the format that `data.format` sets. Only a `doll.FieldsTask` can. Called when a job is
        loaded.

        Args:
            section: the section `data.format` of the job file.
            load: function that returns the object for a name `module:Name` or `file.py:Name`.
            path: function that resolves a path of the job file.

        Raises:
            ConfigError: the task does not decode this format, or the format lacks fields that the task needs.
        """
        raise ConfigError(
            f"data.format: expected a task that subclasses doll.FieldsTask, got {type(self).__name__}, which decodes "
            "values itself"
        )

    def spec(self) -> tuple[Any, Any] | None:
        """Optional: declare the arrays of a sample. A sample that does not fit is dead-lettered with its field's name.

        Returns:
            One form for x and one for y: a `doll.Field`, or dicts, tuples and lists of fields. None in place of one
                form: x or y is not declared. None in place of both: neither is declared. If an undeclared x or y is
                more than one array, the first good samples of a process define its form.
        """
        return None

    def collate(self, samples: Sequence[Sample]) -> tuple[Any, Any]:
        """Optional: combine the samples of a batch into x and y for `forward` and `loss`. Default: arrays are stacked.

        A task that defines this method may return samples of different shapes from `decode`, such as texts; `doll.pad`
        pads them to one length and makes one array. The method is called for each separately computed part of a batch,
        which may be a single sample.

        Args:
            samples: at least one sample; x and y of each are arrays, or dicts, tuples and lists of arrays.

        Returns:
            x and y of all samples: numpy arrays, or dicts, tuples and lists of numpy arrays.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define collate(samples)")

    def forward(self, model: torch.nn.Module, x: Any) -> Any:
        """Return the model's output for a batch `x`, shape (n, *input_shape). Default: `model(x)`, with `x` as floats.

        `x` is an integer tensor if all samples of the batch hold only integers, otherwise a float32 tensor: pass
        `x.long()` to an embedding and `x.float()` to other layers. If the x of a sample is a dict, tuple or list, `x`
        is the same structure of tensors, whose types `Sample` describes, and the default passes it to the model
        unchanged.

        A method that also has a parameter `group` gets the group ids of the samples in it: int64, shape (n,). None: no
        sample has a group.
        """
        import torch

        if not isinstance(x, torch.Tensor):
            return model(x)
        output: torch.Tensor = model(x if x.is_floating_point() else x.to(torch.get_default_dtype()))
        return output

    def loss(self, output: Any, target: Any) -> torch.Tensor:
        """Return a batch's mean loss, a scalar. Default: cross-entropy with `num_classes`, else mean squared error.

        A method that also has a parameter `group` gets the group ids of the samples in it (see `forward`). A method
        that also has a parameter `weight` gets the weights of the samples in it (float32, shape (n,); None: all are 1)
        and must return the weighted mean. If a task defines `loss` without a parameter `weight`, and does not define
        `losses`, its samples cannot have weights.
        """
        import torch.nn.functional as F

        if self.defines("losses"):
            return self.losses(output, target).mean()
        if self.num_classes is not None:
            return F.cross_entropy(output, target.long())
        return F.mse_loss(output.reshape(target.shape), target.to(output.dtype))

    def losses(self, output: Any, target: Any) -> torch.Tensor:
        """Return the loss of each sample, shape (n,); `loss` is their mean. Default: as for `loss`.

        Define this method in place of `loss` if samples have weights and the default loss does not fit. It may have a
        parameter `group`, too.
        """
        import torch.nn.functional as F

        if self.num_classes is not None:
            return by_sample(F.cross_entropy(output, target.long(), reduction="none"))
        return by_sample(F.mse_loss(output.reshape(target.shape), target.to(output.dtype), reduction="none"))

    def metrics(self, output: Any, target: Any) -> Mapping[str, Any]:
        """Return means over the batch, by name. Default: `accuracy` with `num_classes`, else none. See `stop.accuracy`.

        A value may also be a tensor of shape (n,) with one number per sample. If samples have weights, either all
        values are such tensors, or the method has a parameter `weight` and returns weighted means. It may have a
        parameter `group`, as `loss`.
        """
        if self.num_classes is None:
            return {}
        return {"accuracy": float((output.argmax(dim=1) == target).cpu().double().mean())}

    def stages(self, model: torch.nn.Module) -> Sequence[tuple[str, torch.nn.Module]] | None:
        """Optional, for pipelines (`worker.pipeline`): return the layers between which the model may be cut, by name.

        This is only needed if the model is not a `torch.nn.Sequential` and `torch.fx` cannot trace its graph.

        Args:
            model: the model that `build_model` returned. The layers are parts of it; together they hold each of its
                parameters once.

        Returns:
            Modules in the order in which they compute the model's output. `forward` calls the first module. Each
                further module takes the output of the module before: a tensor, or dicts, tuples and lists of tensors.
                None: the model is cut without help of the task.
        """
        return None

    def step(
        self, weights: npt.NDArray[np.float32], x: Any, y: Any, rng: np.random.Generator
    ) -> npt.NDArray[np.float32]:
        """Optional, for models that do not learn by a gradient: return the change of the weights for one batch.

        The method replaces the gradient and the optimizer in the workers. It needs a policy whose workers send steps
        (`training.policy`). Loss and metrics are computed before the step, without gradients. If the method also has a
        parameter `weight` or `group`, it gets an array with the weights or group ids of the samples in it, as `loss`.

        Args:
            weights: the weights, float32, shape (numel,), in the layout of `doll.model.flat_model`. Do not change them.
            x: the features, shape (n, *input_shape), n >= 1; or a dict, tuple or list of arrays, as x of the samples.
            y: the targets, shape (n, ...); or a dict, tuple or list of arrays, as y of the samples.
            rng: random generator that gives the same numbers each time this batch is computed.

        Returns:
            The change of the weights, with their type and shape. The server adds it to its own weights, which may be
            newer.
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
        """Optional: do the same as `step` for a model with tables (embeddings with `sparse=True`).

        Args:
            weights: the weights that are not in a table, as for `step`.
            look_up: function that takes the name of a table's parameter, as in `named_parameters()`, and strictly
                increasing int64 ids, and returns a copy of these rows, float32, shape (n, width). The rows include all
                steps of this worker's earlier batches.
            x, y, rng: as for `step`.

        Returns:
            The change of the weights, as from `step`; and the changed rows, by table. The server adds both.
        """
        raise NotImplementedError(f"{type(self).__name__} must define step_rows(weights, look_up, x, y, rng)")

    def defines(self, method: str) -> bool:
        """Return whether the task itself defines the method of this name."""
        return getattr(type(self), method) is not getattr(Task, method) or method in vars(self)

    @property
    def is_ragged(self) -> bool:
        """Whether samples may differ in shape, because the task combines them itself."""
        return self.defines("collate")

    @property
    def reads_envelopes(self) -> bool:
        """Whether the task reads more than the value of a record."""
        return self.whole_records or self.decodes_records

    @property
    def decodes_records(self) -> bool:
        """Whether `decode_record` replaces `decode`."""
        return type(self).decode_record is not Task.decode_record

    @property
    def steps_rows(self) -> bool:
        """Whether `step_rows` replaces the gradient."""
        return type(self).step_rows is not Task.step_rows

    @property
    def defines_step(self) -> bool:
        """Whether `step` or `step_rows` replaces the gradient."""
        return type(self).step is not Task.step or self.steps_rows

    def check(self, version: Any, stable: Any) -> str:
        """Optional: return why a version must not get the alias of `versions.gates`; "": nothing is wrong. An exception
        is a reason too.

        Args:
            version, stable: what was measured of the version, and of the alias's version (None: there is none), as
                `doll.evaluation.gates.Measured`: `metrics()` and `outputs` on the held-out samples, and so on.
        """
        return ""

    def holdout(self) -> Iterable[Sample]:
        """Return held-out samples, which are never in the stream. Default: none, so only the prequential error is
        known."""
        return ()


def by_sample(values: torch.Tensor) -> torch.Tensor:
    """Return the mean of each sample's values, shape (n,), for values of shape (n, ...)."""
    return values if values.ndim <= 1 else values.flatten(1).mean(1)


def load_task(config: JobConfig) -> Task:
    """Return the task that the job file names.

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
    """Return a function of the user that is also passed the arguments from the job file.

    Args:
        section: name of the section of the job file that has the keys `of` and `args`.

    Raises:
        ConfigError: the function cannot be imported. The returned function raises it if the user's function does not
            accept the arguments, or fails.
    """
    function, given = _load_name(config, f"{section}.of", spec), _resolved(config, args)

    def call(*first: Any) -> Any:
        with user_code(f"{section}.args: {spec} does not take {dict(args)}"):
            return function(*first, **given)

    return call


@contextlib.contextmanager
def user_code(what: str) -> Iterator[None]:
    """Run code of the user: each exception becomes a ConfigError with the text `what` and the cause."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as exc:
        raise ConfigError(f"{what}: {described(exc)}") from exc


def described(error: Exception) -> str:
    """Describe an error of the user's code in one line: its type, its message, and where it was raised."""
    place = traceback.extract_tb(error.__traceback__)[-1:]
    where = "".join(f" ({Path(frame.filename).name}, line {frame.lineno})" for frame in place)
    return f"{type(error).__name__}: {error}{where}"


def moved(module: str) -> str:
    """Return advice if a module cannot be imported because its task was moved to the examples; otherwise ""."""
    if not module.startswith("doll.tasks."):
        return ""
    return "; the tasks that ship are examples now: doll example list; a run of an earlier release needs that release"


def source_checksum(task: Task) -> str:
    """Return the checksum of the files that define a task's classes, without DOLL's files: 16 hexadecimal digits.

    The checksum shows whether two versions were trained with the same code. It is "" if there is no file, for example
    because the class is defined in a notebook.
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
    """Return the arguments of the job file. Paths in them are relative to the job file, and are resolved."""
    return {
        key: str(config.path(Path(value))) if isinstance(value, str) and key.endswith(PATH_ENDINGS) else value
        for key, value in args.items()
    }


def _load_name(config: JobConfig, key: str, spec: str) -> Any:
    """Return the object that `module:name` or `file.py:name` refers to."""
    module_name, _, name = spec.rpartition(":")
    with user_code(f"{key}: cannot load {spec!r}"):
        return getattr(_load(module_name, config, key), name)


def _load(name: str, config: JobConfig, key: str) -> Any:
    """Import a module by its name or its file."""
    # The folder of the job file may contain modules of the user, as with `python script.py`, also for an optimizer.
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
