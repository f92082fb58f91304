"""The actor of a worker: it runs on a node of the Ray cluster and has the worker as its child process.

The worker's output goes where Ray collects the actor's. The worker ends with the actor, also where the actor is killed;
the actor ends with the worker, with an error unless somebody asked for it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from doll.local import processes


class WorkerHost:
    """One worker process.

    Args:
        command: its arguments; `{job}` stands for the job file, `{python}` for the interpreter of this actor.
        job: the job file's text, without `base_folder`.
        base_folder: to which the job's relative paths refer; None: the folder that Ray has copied to this node.
        env: additions to the worker's environment.
        identity: the variables that say which worker it is.
    """

    def __init__(
        self,
        command: Sequence[str],
        job: str,
        base_folder: str | None,
        env: Mapping[str, str],
        identity: Mapping[str, str],
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="doll-worker-", ignore_cleanup_errors=True)
        path = Path(self._folder.name) / "job.yaml"
        path.write_text(job + yaml.safe_dump({"base_folder": base_folder or str(Path.cwd())}), encoding="utf-8")
        # Linux kills it with the thread that started it: the constructor and the methods of an actor share one.
        program = [word.format(job=path, python=sys.executable) for word in command]
        self._worker = subprocess.Popen(
            processes.tied(program), stdin=subprocess.DEVNULL, env={**os.environ, **env, **identity}
        )
        self._asked = threading.Event()
        threading.Thread(target=self._end_with_worker, daemon=True).start()

    def end(self, grace_s: float) -> None:
        """Send the worker SIGTERM, and SIGKILL after `grace_s`; then the actor exits in order."""
        import ray

        self._asked.set()
        self._worker.terminate()
        try:
            self._worker.wait(grace_s)
        except subprocess.TimeoutExpired:
            self._worker.kill()
            self._worker.wait()
        self._folder.cleanup()
        ray.actor.exit_actor()

    def _end_with_worker(self) -> None:
        code = self._worker.wait()
        if not self._asked.is_set():
            sys.stderr.write(f"the worker has ended by itself: {code}\n")
            sys.stderr.flush()
            self._folder.cleanup()
            os._exit(1)
