"""A worker on a GPU beside a bare torch loop: `python -m benchmarks.gpu --device cuda`.

The DOLL paper's convolutional network (1.2 million parameters) and a small character-level transformer (3.2 million),
float32 and bf16. Both sides learn batches of the same records with the same model on the same device, an SGD step for
every K batches; the bare loop has them decoded in memory, DOLL reads them from a real Kafka. Runs alternate, and the
medians are compared. `--device cpu` shows that the code works where there is no GPU. `--short` measures what a worker
waits for in less than 4 minutes: the stages of an update, and one run of each of `--policies`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from doll.config import JobConfig
from doll.errors import ConfigError
from doll.model.devices import resolve
from doll.task.base import Sample, Task
from examples.emnist.task import Emnist
from torch import nn
from torch.nn import functional

from benchmarks.data import records as image_records
from benchmarks.harness import Bench, job
from benchmarks.results import keep

CONTEXT: Final = 128  # tokens of a sample
TOKENS: Final = 96
GROUP_SIZE: Final = 8
_POOL: Final = 16  # batches of the bare loop, used in turn
_LR: Final = 0.01
_WARM_S: Final = 4.0  # the first passes on a GPU choose their kernels


class Characters(Task):
    """The next character of each of 128, by four layers of a transformer."""

    input_shape = (CONTEXT,)

    def build_model(self) -> nn.Module:
        return Transformer()

    def decode(self, record: bytes) -> Sample:
        tokens = np.frombuffer(record, np.uint8)
        return Sample(tokens[:-1], tokens[1:])

    def decode_block(self, block: memoryview, width: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]] | None:
        tokens = np.frombuffer(block, np.uint8).reshape(-1, width)
        return (tokens[:, :-1], tokens[:, 1:]) if width == CONTEXT + 1 else None

    def forward(self, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = model(x.long())
        return output

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(output.flatten(0, 1), target.flatten().long())


class Transformer(nn.Module):
    """Causal, 256 wide."""

    def __init__(self, width: int = 256, layers: int = 4) -> None:
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, width)
        self.places = nn.Parameter(0.02 * torch.randn(CONTEXT, width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, TOKENS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        hidden = self.layers(self.tokens(x) + self.places[: x.shape[1]], mask=mask, is_causal=True)
        output: torch.Tensor = self.head(hidden)
        return output


def character_records(count: int) -> list[bytes]:
    """Walks over an alphabet, each step of which is one of three."""
    rng = np.random.default_rng(1)
    steps = rng.choice([1, 5, 17], size=(count, CONTEXT + 1))
    return [row.tobytes() for row in (np.cumsum(steps, axis=1) % TOKENS).astype(np.uint8)]


MODELS: Final = {
    "cnn": (Emnist, "examples.emnist.task:Emnist", image_records, 256),
    "transformer": (Characters, "benchmarks.gpu:Characters", character_records, 64),
}


def image_pool(count: int) -> list[bytes]:
    return image_records(count, seed=1)


def decoded_pool(task: Task, model: str, size: int) -> list[tuple[npt.NDArray[Any], ...]]:
    """Batches of `size` samples, decoded."""
    values = image_pool(_POOL * size) if model == "cnn" else character_records(_POOL * size)
    decoded = task.decode_block(memoryview(b"".join(values)), len(values[0]))
    assert decoded is not None
    return [tuple(part[at : at + size] for part in decoded) for at in range(0, len(values), size)]


def bare_loop(out: str, model: str, device: str, precision: str, seconds: float, size: int) -> None:
    """Forward, backward, the sum of K batches, and a step: what the job learns, without everything around it."""
    task = MODELS[model][0]()
    torch.manual_seed(0)
    module = task.build_model().to(device).train()
    optimizer = torch.optim.SGD(module.parameters(), lr=_LR)
    pool = decoded_pool(task, model, size)

    def group() -> float:
        optimizer.zero_grad()
        loss = torch.zeros(())
        for x, y in (pool[number % _POOL] for number in range(GROUP_SIZE)):
            inputs, target = (torch.from_numpy(np.ascontiguousarray(part)).to(device) for part in (x, y))
            with torch.autocast(device.partition(":")[0], torch.bfloat16, enabled=precision == "bf16"):
                loss = task.loss(task.forward(module, inputs), target)
            (loss / GROUP_SIZE).backward()
        optimizer.step()
        return float(loss.detach())

    warm_s = time.monotonic()
    while time.monotonic() - warm_s < min(_WARM_S, seconds):
        group()
    first_s, groups = time.monotonic(), 0
    while time.monotonic() - first_s < seconds:
        group()
        groups += 1
    result = {"first_s": first_s, "last_s": time.monotonic(), "samples": groups * GROUP_SIZE * size, "gradients": []}
    Path(out).write_text(json.dumps(result), encoding="utf-8")


def config_of(
    model: str, device: str, precision: str, workers: int, seconds: float, size: int, policy: str = "doll"
) -> JobConfig:  # fmt: skip
    _, name, _, _ = MODELS[model]
    return job(
        f"gpu-{model}-{workers}", task=name,
        data={"workers": workers, "batch_size": size, "samples_per_record": min(size, 16)},
        training={
            "policy": {"name": policy} | ({"group_size": GROUP_SIZE} if policy == "doll" else {}),
            "optimizer": {"name": "sgd", "lr": _LR},
            "precision": precision,
        },
        worker={"device": device, "max_pending_batches": 64}, stop={"seconds": seconds + _WARM_S},
        checkpoint={"every_s": 5.0, "every_updates": 100_000}, evaluation={"enabled": False},
    )  # fmt: skip


def measure(
    bench: Bench, model: str, device: str, precision: str, workers: int, seconds: float, size: int, most: int,
    policy: str = "doll",
) -> tuple[float, dict[str, float]]:  # fmt: skip
    """Samples per second that a job learns, and the cores that its workers and its server use."""
    config = config_of(model, device, precision, workers, seconds, size, policy)
    make = image_pool if model == "cnn" else character_records
    bench.fill(config, make, most)
    result = bench.learn(config, warm_s=_WARM_S)
    cores = {name: round(result.usage.cpu_s.get(name, 0.0) / result.usage.seconds, 2) for name in ("worker", "ps")}
    return result.samples_per_s, cores


def stages(out: str, model: str, device: str, precision: str, seconds: float, size: int, threads: int) -> None:
    """The stages of an update, of a worker and a server in this process (`benchmarks.gpu_stages`)."""
    from benchmarks.gpu_stages import profile

    torch.set_num_threads(threads)
    config = config_of(model, device, precision, 1, seconds, size)
    result = profile(config, device, decoded_pool(MODELS[model][0](), model, size), seconds)
    Path(out).write_text(json.dumps(result), encoding="utf-8")


def bare(bench: Bench, model: str, device: str, precision: str, seconds: float, size: int) -> float:
    out = bench.out("bare")
    bench.run_roles([("bare", "benchmarks.gpu:bare_loop", [out, model, device, precision, seconds, size])])
    result = json.loads(Path(out).read_text(encoding="utf-8"))
    return float(result["samples"] / (result["last_s"] - result["first_s"]))


def stages_of(
    bench: Bench, model: str, device: str, precision: str, seconds: float, size: int
) -> dict[str, Any]:  # fmt: skip
    out, threads = bench.out("stages"), config_of(model, device, precision, 1, seconds, size).worker.torch_threads
    bench.run_roles([("stages", "benchmarks.gpu:stages", [out, model, device, precision, seconds, size, threads])])
    result: dict[str, Any] = json.loads(Path(out).read_text(encoding="utf-8"))
    return result


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", help="cpu, cuda, cuda:N or mps; default cuda")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--precisions", nargs="+", default=["float32", "bf16"], choices=["float32", "bf16"])
    parser.add_argument("--policies", nargs="+", default=["doll"], choices=["doll", "essp", "diloco"])
    parser.add_argument("--short", action="store_true", help="one run in float32 with 1 worker, and the stages")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--runs", type=int, default=3, help="of each side; default 3")
    parser.add_argument("--seconds", type=float, default=6.0, help="that a run is measured; default 6")
    parser.add_argument("--batch-size", type=int, help="of each model [256 images, 64 texts]")
    parser.add_argument("--budget-s", type=float, default=3600.0, help="no further run is begun after this time")
    parser.add_argument("--fill-rate", type=float, default=150_000.0, help="samples per second to have ready")
    args = parser.parse_args(argv)
    if args.short:
        args.runs, args.precisions, args.workers = 1, ["float32"], [1]
        args.policies, args.budget_s = ["doll", "essp", "diloco"], 120.0
    begun_s = time.monotonic()
    try:
        device = resolve(args.device, 0)
    except ConfigError as exc:
        print(f"nothing was measured: {exc}", file=sys.stderr)
        return 2
    name = platform.processor() or platform.machine()
    rows: list[dict[str, Any]] = []
    with Bench(lambda line: print(line, file=sys.stderr)) as bench:
        for run in range(args.runs):
            for model in args.models:
                for precision in args.precisions:
                    if time.monotonic() - begun_s > args.budget_s:
                        continue
                    size = args.batch_size or MODELS[model][3]
                    rate = args.fill_rate * (1.0 if model == "cnn" else 0.1)
                    most = round(rate * (args.seconds + _WARM_S)) // size * size
                    row: dict[str, Any] = {"run": run, "model": model, "precision": precision}
                    row["bare"] = bare(bench, model, device, precision, args.seconds, size)
                    if args.short:
                        row["stages"] = stages_of(bench, model, device, precision, args.seconds, size)
                        print(json.dumps(row["stages"]), flush=True)
                    for policy, workers in itertools.product(args.policies, args.workers):
                        key = f"{policy}-{workers}"
                        row[key], row[f"{key} cores"] = measure(
                            bench, model, device, precision, workers, args.seconds, size, most // workers, policy
                        )
                    rows.append(row)
                    print(json.dumps(row), flush=True)
    table = []
    for model in args.models:
        for precision in args.precisions:
            mine = [row for row in rows if (row["model"], row["precision"]) == (model, precision)]
            if not mine:
                continue
            line = {"model": model, "precision": precision, "runs": len(mine)}
            jobs = [f"{policy}-{workers}" for policy, workers in itertools.product(args.policies, args.workers)]
            line |= {key: median(row[key] for row in mine) for key in ("bare", *jobs)}
            line |= {f"{key} / bare": median(row[key] / row["bare"] for row in mine) for key in jobs}
            table.append(line)
            print(json.dumps(line), flush=True)
    if device != "cpu":
        name = torch.cuda.get_device_name(device) if device.startswith("cuda") else device
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    path = keep(f"gpu-{stamp}", {"device": name, "torch": torch.__version__, "table": table, "rows": rows})
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
