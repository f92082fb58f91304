"""`Run`: a program's access to a run, with its progress, metrics, model and audit; it can also end the run."""

from __future__ import annotations

import atexit
import csv
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from doll import errors
from doll.api.child import Event, decoder
from doll.api.feeder import Feeder
from doll.api.views import WIDTH, View, html, in_notebook, make_view
from doll.errors import ConfigError, DollError
from doll.local.processes import spawn, tail
from doll.process.files import read_json
from doll.run.folder import RunFolder, display_path

if TYPE_CHECKING:
    import torch

    from doll.run.target import Target


_LOG: Final = "run.log"
_POLL_S: Final = 0.2
_LAST_BYTES: Final = 1 << 20  # of updates.csv, in which the last valid update is searched
_LAST_S: Final = 120.0  # limit for the last checkpoint, evaluation and audit if the program ends before the run


class RunFailedError(DollError):
    """A run has ended with an error, or its audit has failed.

    Attributes:
        report: content of `report.json`; empty if there is none.
    """

    def __init__(self, message: str, report: dict[str, Any]) -> None:
        super().__init__(message)
        self.report = report


class Run:
    """A run in its folder. `doll.train` starts a run; `doll.open` opens an existing one.

    Attributes:
        folder: path of the run folder (its files: docs/guide/run.md).
    """

    def __init__(self, folder: Path) -> None:
        self.folder: Final = folder
        self._process: _Process | None = None

    @property
    def is_running(self) -> bool:
        """Whether this program has started the run and it has not ended."""
        return self._process is not None and self._process.is_running

    @property
    def samples(self) -> int:
        """The number of samples in the newest known version of the model."""
        return self._newest()[1]

    @property
    def version(self) -> int:
        """The number of the newest known version of the model."""
        return self._newest()[0]

    def _newest(self) -> tuple[int, int]:
        """Return version and samples from the process of a running run, the report of an ended run, or updates.csv."""
        if self.is_running and self._process is not None:
            return self._process.last.version, self._process.last.samples
        if self._has_report:
            return int(self.report["updates"]), int(self.report["samples"])
        return _last_update(self.folder / "updates.csv")

    @property
    def report(self) -> dict[str, Any]:
        """The content of `report.json`.

        Raises:
            ConfigError: the run has not ended, or has no report.
        """
        path = RunFolder(self.folder).report
        if not path.exists():
            raise ConfigError(
                f"{display_path(self.folder)}: expected a run that has ended, got one without a report.json"
            )
        return read_json(path)

    def wait(self, timeout_s: float | None = None, *, progress: bool = True) -> dict[str, Any]:
        """Wait until the run has ended, show its progress meanwhile, and return the report.

        An interrupt (Ctrl-C, or the notebook's button) stops the run in order; a second one stops it immediately.

        Raises:
            TimeoutError: the run has not ended after `timeout_s` seconds.
            RunFailedError: the run has ended with an error, or its audit has failed.
            DollError: the run could not start.
        """
        if self._process is None:
            return self.report
        with make_view(progress) as view:
            self._process.follow(view, timeout_s)
        return self._process.result()

    def stop(self, *, progress: bool = True) -> dict[str, Any]:
        """End the run in order, with a last checkpoint and evaluation, audit, model and report; return the report.

        Raises:
            RunFailedError, DollError: see `wait`.
        """
        if self._process is not None:
            self._process.signal(signal.SIGINT)
        return self.wait(progress=progress)

    def kill(self) -> None:
        """End the run immediately. Its newest checkpoint is kept. `doll resume RUN` continues from it; if the samples
        came from this program, add `--set source=null` to continue with the samples that Kafka has."""
        if self._process is not None:
            self._process.kill()

    def scale(self, workers: int) -> None:
        """Change the number of workers of the run (`doll scale`).

        Raises:
            ConfigError: the job does not allow this number of workers, or the run has ended.
            ServiceUnavailableError: the broker or the parameter server does not answer.
        """
        from doll.run import scale as scaling

        scaling.scale(self._target(), workers, timeout_s=scaling.TIMEOUT_S, say=lambda text: None)

    def metrics(self, kind: Literal["updates", "evaluations"] = "updates", *, frame: str = "pandas") -> Any:
        """Return a table with one row for each update, or for each evaluation, that has been written so far.

        Args:
            frame: type of the table: "pandas", "polars", or "dict" (a list for each column).

        Raises:
            ConfigError: `frame` is another name, or its package is not installed.
        """
        return _read_csv(self.folder / f"{kind}.csv", frame)

    def model(self, version: int | None = None, *, average: bool | None = None) -> torch.nn.Module:
        """Return the task's model with the weights of a checkpoint.

        The model is created by `build_model`, and contains all rows of its tables. A bounded table has only its
        existing rows, which its `state_dict()` contains.

        Args:
            version: number of a kept version. None: the newest checkpoint.
            average: whether to use the moving average of the weights. None: the average if `training.ema` is set,
                otherwise the weights.

        Raises:
            CheckpointError: there is no such checkpoint, or it has no average.
        """
        from doll.evaluation.stored_weights import newest_weights
        from doll.model.flat_model import build
        from doll.run.export import tensors_of
        from doll.run.portable import whole_module
        from doll.storage.stores import checkpoint_location
        from doll.task.base import load_task

        config = self._target().config
        task = load_task(config)
        model = build(config, task, with_rows=False)
        stored = newest_weights(config, self.folder, model, version=version, average=average)
        if stored is None:
            raise errors.CheckpointError(f"no checkpoint in {checkpoint_location(config, self.folder)} yet")
        stored.load_into(model)
        module = whole_module(config, task, tensors_of(model, stored))
        for name, buffer in model.module.named_buffers():  # also buffers that are not in a `state_dict()`
            module.get_buffer(name).copy_(buffer)
        return module

    def audit(self) -> dict[str, Any]:
        """Return the status of every sample of the stream, in the form of `audit.json`. While the run is running, the
        status is read from the topics. After the run has ended, the status is read from the audit at the end of the
        run.

        Raises:
            AuditError: a sample is missing or was counted twice.
            DollError: the run has no audit.
        """
        from doll.run.status import audit_target

        path = self.folder / "audit.json"
        if not self.is_running and path.exists():
            content = read_json(path)
            if not content["ok"]:
                raise errors.AuditError(f"{display_path(path)}: the audit has failed")
            return content
        ledger = audit_target(self._target())
        if not ledger.ok:
            raise errors.AuditError("\n".join([ledger.summary(), *ledger.violations()]))
        return ledger.to_dict()

    def plot(self) -> Any:
        """Return the page of a run that has ended: the page itself in a notebook, otherwise its path."""
        path = RunFolder(self.folder).page
        if not path.exists():
            raise ConfigError(
                f"{display_path(self.folder)}: expected a run that has ended, got one without {path.name}"
            )
        if not in_notebook():
            return path
        from IPython.display import HTML

        content = escape(path.read_text(encoding="utf-8"))
        return HTML(f'<iframe sandbox="allow-scripts" srcdoc="{content}" width="100%" height="720"></iframe>')

    def __repr__(self) -> str:
        state = "running" if self.is_running else ("ended" if self._has_report else "without a report")
        return f"<doll run {display_path(self.folder)}: {state}, version {self.version}, {self.samples} samples>"

    def _repr_html_(self) -> str:
        return html(self._process.last.panel if self.is_running and self._process is not None else repr(self))

    @property
    def _has_report(self) -> bool:
        return RunFolder(self.folder).report.exists()

    def _target(self) -> Target:
        from doll.run.target import open_target

        return open_target(self.folder, [])


def start(folder: Path, feeder: Feeder | None, changes: Sequence[str] = ()) -> Run:
    """Start the job of a folder in a child process, which ends with this process. `changes`: resume the run with these
    settings."""
    run = Run(folder)
    run._process = _Process(folder, feeder, changes)
    return run


class _Process:
    """The process of a run, and the events that it has sent."""

    def __init__(self, folder: Path, feeder: Feeder | None, changes: Sequence[str]) -> None:
        self._folder = folder
        self._changes = changes
        self._feeder = feeder
        self._log = RunFolder(folder).logs / _LOG
        self._events: queue.Queue[Event] = queue.Queue(maxsize=10_000)
        self._ended = threading.Event()
        self._started = threading.Event()
        self._interrupts = 0
        self.last = Event()
        self._outcome: Event | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._failure: BaseException | None = None
        # Linux ends a child with the thread that started it; therefore the reading thread starts it.
        threading.Thread(target=self._attend, name="doll-run", daemon=True).start()
        self._started.wait()
        if self._failure is not None:
            raise self._failure
        atexit.register(self._at_exit)

    @property
    def is_running(self) -> bool:
        return not self._ended.is_set()

    def _attend(self) -> None:
        command = [sys.executable, "-m", "doll.api.child", str(self._folder), str(WIDTH), *self._changes]
        path = {"PYTHONPATH": ":".join(filter(None, sys.path))}  # the task's module may be in any of these
        try:
            self._child = spawn(command, self._log, path, stdout=subprocess.PIPE)
        except OSError as error:
            self._failure = error
            return
        finally:
            self._started.set()
        assert self._child.stdout is not None
        with self._child.stdout as lines:
            for line in lines:
                self._take(line)
        self._child.wait()
        self._ended.set()

    def _take(self, line: bytes) -> None:
        try:
            event = decoder.decode(line)
        except ValueError:
            return None  # the end of the process has cut the line
        if event.report is not None or event.error:
            self._outcome = event
        elif event.panel:
            self.last = event
        while True:
            try:
                return self._events.put_nowait(event)
            except queue.Full:  # no reader: drop the oldest event
                self._events.get()

    def follow(self, view: View, timeout_s: float | None) -> None:
        """Show events until the run has ended."""
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            try:
                if self._show_next(view):
                    return
                if deadline_s is not None and time.monotonic() > deadline_s:
                    raise TimeoutError(f"{display_path(self._folder)} goes on after {timeout_s:g} s")
            except KeyboardInterrupt:
                if self._interrupts:
                    self.kill()
                    raise
                self.signal(signal.SIGINT)

    def _show_next(self, view: View) -> bool:
        """Show the next event; return whether there are no further events."""
        try:
            event = self._events.get(timeout=_POLL_S)
        except queue.Empty:
            return self._ended.is_set() and self._events.empty()
        if event.say:
            view.say(event.say)
        elif event.panel:
            view.show(event.panel, f"version {event.version}, {event.samples} samples, loss {event.loss}")
        return False

    def result(self) -> dict[str, Any]:
        """Return the report, or raise the errors of `Run.wait`."""
        self._close()
        outcome, place = self._outcome, display_path(self._folder)
        if self._feeder is not None and self._feeder.error is not None:
            raise self._feeder.error
        if outcome is None or outcome.error:
            text = tail(self._log) if outcome is None else outcome.error
            cls = getattr(errors, "" if outcome is None else outcome.error_class, DollError)
            raise cls(f"{text}\n(log: {display_path(self._log)})" if outcome is None else text)
        report: dict[str, Any] = dict(outcome.report or {})
        if report["exit_code"]:
            reason = report.get("error") or report.get("reason") or "its audit has failed"
            raise RunFailedError(f"{place}: {reason}", report)
        return report

    def signal(self, number: int) -> None:
        """Send a signal to the process if it runs."""
        self._interrupts += 1
        if self._child is not None and self.is_running:
            self._child.send_signal(number)

    def kill(self) -> None:
        """Kill the process. The processes that it has started end with it."""
        if self._child is not None:
            self._child.kill()
            self._ended.wait()
        self._close()

    def _close(self) -> None:
        atexit.unregister(self._at_exit)
        if self._feeder is not None:
            self._feeder.close()

    def _at_exit(self) -> None:
        """End the run in order if the program ends first."""
        if self.is_running:
            sys.stderr.write(f"doll: ending run {display_path(self._folder)} in order\n")
            self.signal(signal.SIGINT)
            if not self._ended.wait(_LAST_S):
                self.kill()
        self._close()


def _last_update(path: Path) -> tuple[int, int]:
    """Return version and samples of the last complete, valid line; (0, 0) if there is none yet."""
    if not path.exists():
        return 0, 0
    with path.open("rb") as file:
        names = file.readline().decode().strip().split(",")
        file.seek(max(file.tell(), path.stat().st_size - _LAST_BYTES))
        lines = file.read().decode(errors="replace").split("\n")[:-1]
    for line in reversed(lines):
        row = dict(zip(names, line.split(","), strict=False))
        if len(row) == len(names) and row["void"] == "0":
            return int(row["version"]), int(row["samples_total"])
    return 0, 0


def _read_csv(path: Path, frame: str) -> Any:
    if frame not in ("pandas", "polars", "dict"):
        raise ConfigError(f"frame: expected 'pandas', 'polars' or 'dict', got {frame!r}")
    if not path.exists():
        raise ConfigError(f"{display_path(path)}: expected a run that has made an update, which writes this file")
    if frame == "dict":
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.reader(file))
        return {name: [row[at] for row in rows[1:]] for at, name in enumerate(rows[0])}
    try:
        if frame == "pandas":
            import pandas

            return pandas.read_csv(path)
        import polars

        return polars.read_csv(path)
    except ImportError as exc:
        raise ConfigError(f"frame {frame!r}: pip install {frame}, or metrics(frame='dict')") from exc
