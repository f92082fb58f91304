"""The actor of a worker: it runs on a node of the Ray cluster and has the worker as its child process.

The worker ends with the actor, also if the actor is killed. The actor ends with the worker, with an error unless the
end was requested. The actor also ends if no provisioner has signalled for an hour, because its node costs money.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import yaml

from doll.local import processes

KV_NAMESPACE: Final = b"doll"
ORPHAN_S: Final = 3600.0
_LOOK_S: Final = 60.0
_GRACE_S: Final = 60.0  # from SIGTERM to SIGKILL of an orphan's worker


def wait_until_orphaned(
    read: Callable[[], bytes | None], *, sleep: Callable[[float], None], clock: Callable[[], float]
) -> None:
    """Wait until no provisioner has renewed its signal for `ORPHAN_S` seconds.

    Only changes of the signal count, so the clocks of the machines need not agree. While `read` raises an error, no
    provisioner can renew the signal, so this time does not count. `clock` returns monotonic seconds.
    """
    seen, unchanged_s, looked_s = None, 0.0, clock()
    while unchanged_s < ORPHAN_S:
        sleep(_LOOK_S)
        passed_s, looked_s = clock() - looked_s, clock()
        try:
            sign = read()
        except Exception:  # an error of Ray, whose head is unavailable
            continue
        seen, unchanged_s = sign, 0.0 if sign != seen else unchanged_s + passed_s


class WorkerHost:
    """The host of one worker process.

    Args:
        command: arguments of the process; `{job}` stands for the job file, `{python}` for this interpreter.
        job: text of the job file, without `base_folder`.
        base_folder: base of the job's relative paths. None: the folder that Ray has copied to this node.
        env, identity: additional environment variables of the worker.
        lease: key with which the provisioner signals that it runs.
    """

    def __init__(
        self,
        command: Sequence[str],
        job: str,
        base_folder: str | None,
        env: Mapping[str, str],
        lease: str,
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
        threading.Thread(target=self._end_as_orphan, args=(lease,), daemon=True).start()

    def end(self, grace_s: float) -> None:
        """Send SIGTERM to the worker, and SIGKILL after `grace_s`; then the actor exits in an orderly way."""
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

    def _end_as_orphan(self, lease: str) -> None:
        from ray.experimental.internal_kv import _internal_kv_get

        wait_until_orphaned(
            lambda: _internal_kv_get(lease, namespace=KV_NAMESPACE), sleep=time.sleep, clock=time.monotonic
        )
        sys.stderr.write(f"the worker is ended: no provisioner has shown itself for {ORPHAN_S:g} s\n")
        sys.stderr.flush()
        self._worker.terminate()
        time.sleep(_GRACE_S)
        self._worker.kill()

    def _end_with_worker(self) -> None:
        code = self._worker.wait()
        if not self._asked.is_set():
            sys.stderr.write(f"the worker has ended by itself: {code}\n")
            sys.stderr.flush()
            self._folder.cleanup()
            os._exit(1)
