"""`training.init_from`: what of a run or a file a new job begins with, and what is refused."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import doll
import numpy as np
import pytest
import torch
from doll.config import JobConfig, dump, load, parse
from doll.errors import CheckpointError, ConfigError, VersionUnknownError
from doll.evaluation.stored_weights import newest_weights
from doll.model.flat_model import FlatModel, build, fingerprint
from doll.ps.checkpointing import decode_snapshot, encode_snapshot
from doll.ps.engine.assignment import first_snapshot
from doll.ps.model.updater import ModelParts, make_parts
from doll.ps.start import Start, begun_with, engine_settings, matched
from doll.ps.tables.bounded_table import BoundedTable, stored_bounded_rows
from doll.run.export import export_model
from doll.storage.checkpoints import Checkpoint, decode_checkpoint
from doll.storage.file_checkpoints import FileCheckpointStore
from doll.storage.s3_checkpoints import S3CheckpointStore
from doll.tables.embedding_tables import EmbeddingTables
from doll.tables.rows import Rows
from doll.task.base import load_task
from paths import SUPPORT
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.slow  # loads torch

JOB = f"""
job: parts
task: {{class: "{SUPPORT / "parts_task.py"}:Parts"}}
data: {{workers: 2, batch_size: 4}}
training: {{optimizer: {{name: adam}}}}
"""
NAMES = {"bag.weight", "body.0.weight", "body.0.bias", "body.1.weight", "body.1.bias", "trunk.bias"} | {
    f"body.1.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")
}


def model_of(config: JobConfig) -> FlatModel:
    return build(config, load_task(config))


def begun(config: JobConfig) -> tuple[dict[str, torch.Tensor], Any]:
    """What the job begins with, by name: its parameters and buffers, and the rows of its table; and the report."""
    model = model_of(config)
    given = matched(config, model)
    assert given is not None
    given.load_into(model)
    tensors = {name: tensor.detach().clone() for name, tensor in model.module.state_dict().items()}
    assert model.tables is not None
    tensors["bag.weight"] = torch.from_numpy(model.tables.take_initial()["bag.weight"])
    return tensors, given.report


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run, with versions 3 and 7, whose every number is its version and more."""
    config = parse(JOB, ["job=old", "seed=9"])
    folder = tmp_path / "runs" / "old"
    store = FileCheckpointStore(folder / "checkpoints", "old")
    term = store.claim_term()
    for version in (3, 7):
        model = model_of(config)
        assert model.tables is not None
        with torch.no_grad():
            for name, tensor in (*model.module.named_parameters(), *model.module.named_buffers()):
                if tensor.requires_grad or name.startswith("body.1"):
                    tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) + version)
        model.tables.initial_rows("bag.weight")[:] = np.arange(30).reshape(10, 3) + version
        mark = fingerprint(config, model)
        state = first_snapshot(
            engine_settings(config), (0, 0), policy="doll", generation=0, samples_id="", run_id=""
        )  # fmt: skip
        layout, parts = model.layout, make_parts(config.training, model)
        store.save(
            Checkpoint(
                job="old", fingerprint=mark, term=term, version=version, state=encode_snapshot(state),
                tensors=parts.tensors(), layout=layout,
            )
        )  # fmt: skip
    (folder / "job.yaml").write_text(dump(config))
    return folder


def job(tmp_path: Path, source: object, *overrides: str) -> JobConfig:
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    return load(path, [f"training.init_from={source}", *overrides])


@pytest.mark.parametrize(
    ("named", "version"),
    [
        ("runs/old", 7), ("runs/old@3", 3), ("runs/old@good", 3), ("runs/old@latest", 7), ("runs/old/checkpoints@7", 7),
    ],
)  # fmt: skip
def test_a_job_begins_with_a_version_of_a_run(tmp_path: Path, run: Path, named: str, version: int) -> None:
    FileCheckpointStore(run / "checkpoints", "old").change_marks(lambda marks: marks.with_alias("good", 3))
    tensors, report = begun(job(tmp_path, named))
    assert set(report.taken) == NAMES
    assert (report.missing, report.unknown, report.other_shape, report.rows, report.frozen) == ((), (), (), (), ())
    for name in NAMES:
        tensor = tensors[name]
        assert torch.equal(tensor, (torch.arange(tensor.numel()).view(tensor.shape) + version).to(tensor.dtype)), name
    assert report.num_values == sum(tensors[name].numel() for name in NAMES)
    assert report.source.startswith(f"version {version} of old (sha256 ")
    assert f"{len(NAMES)} tensors taken" in report.text()


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_what_does_not_match_is_reported_and_stays_as_the_task_draws_it(tmp_path: Path, suffix: str) -> None:
    state = {
        "encoder.0.weight": torch.ones(4, 3, dtype=torch.bfloat16), "encoder.0.bias": torch.ones(5),
        "bag.weight": torch.ones(6, 3), "trunk.weight": torch.zeros(2, 4), "head": torch.ones(1),
    }  # fmt: skip
    path = tmp_path / f"given{suffix}"
    if suffix == ".pt":
        torch.save({"state_dict": state, "epoch": 3}, path)
    else:
        save_file(state, path)
    config = job(tmp_path, f"{{from: {path.name}, rename: {{'^encoder\\.': body.}}}}")
    own = model_of(config).module.state_dict()
    tensors, report = begun(config)
    assert set(report.taken) == {"body.0.weight", "bag.weight"}
    assert tensors["body.0.weight"].eq(1).all()
    assert tensors["body.0.weight"].dtype == torch.float32
    assert torch.equal(tensors["body.0.bias"], own["body.0.bias"])
    assert report.unknown == ("head",)
    assert report.other_shape == ("body.0.bias: (5,) in the source, (4,) in the model",)
    assert "trunk.bias" in report.missing
    assert report.rows == ("bag.weight: 6 rows of 6, 10 in the model, the others as the task draws them",)
    assert tensors["bag.weight"][:6].eq(1).all()
    assert not tensors["bag.weight"][6:].eq(1).any()
    assert report.frozen == ("trunk.weight",), "each process makes its own, and it is another one"
    assert tensors["trunk.weight"].eq(1).all()
    for words in ("not in the model: head", "6 rows of 6, 10 in the model", "build_model() makes them"):
        assert words in report.text()
    with pytest.raises(ConfigError, match=r"init_from\.strict.*not in the model: head"):
        begun(job(tmp_path, f"{{from: {path.name}, strict: true, rename: {{'^encoder\\.': body.}}}}"))


@pytest.mark.parametrize(
    ("wrap", "said"),
    [
        (lambda state: {"epoch": 3, "model": state, "optimizer": {}}, "given.ckpt, its model (sha256"),
        (lambda state: {"model_state_dict": state}, "given.ckpt, its model_state_dict (sha256"),
        (lambda state: {"model": {"state_dict": state}}, "given.ckpt, its model, its state_dict (sha256"),
        (lambda state: {f"module.{name}": value for name, value in state.items()}, "source without module.\n"),
        (lambda state: {f"_orig_mod.{name}": value for name, value in state.items()}, "source without _orig_mod.\n"),
        (
            lambda state: {
                "module._orig_mod." + name.replace("body.", "body._orig_mod."): value for name, value in state.items()
            },
            "source without _orig_mod. and module._orig_mod.\n",
        ),
    ],
)
def test_the_forms_that_programs_save_are_found_and_said(tmp_path: Path, run: Path, wrap: Any, said: str) -> None:
    state = {name: tensor for name, tensor in begun(job(tmp_path, run))[0].items() if name in NAMES}
    torch.save(wrap(state), tmp_path / "given.ckpt")
    tensors, report = begun(job(tmp_path, "given.ckpt"))
    assert (set(report.taken), report.unknown, report.missing) == (NAMES, (), ())
    assert said in f"{report.text()}\n"
    for name in NAMES:
        assert torch.equal(tensors[name], state[name]), name
    # A name that the model has is never changed, nor is one that two tensors would have.
    torch.save({"module.trunk.bias": torch.ones(2), "trunk.bias": torch.zeros(2)}, tmp_path / "both.ckpt")
    tensors, report = begun(job(tmp_path, "both.ckpt"))
    assert (report.taken, report.unknown, report.wrappers) == (("trunk.bias",), ("module.trunk.bias",), ())
    assert not tensors["trunk.bias"].any()


def test_a_table_of_fewer_rows_takes_the_first_ones(tmp_path: Path, run: Path) -> None:
    tensors, report = begun(job(tmp_path, run, "task.args.rows=4"))
    assert report.rows == ("bag.weight: 4 rows of 10, 4 in the model, the source's others left out",)
    assert torch.equal(tensors["bag.weight"], torch.arange(12.0).view(4, 3) + 7)


class Evil:
    """What a pickle may hold: a call."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_bad_sources_are_refused_with_the_reason(tmp_path: Path, run: Path) -> None:
    save_file({"other": torch.ones(3)}, tmp_path / "other.safetensors")
    save_file({"trunk.weight": torch.ones(2, 4)}, tmp_path / "frozen.safetensors")
    save_file({"trunk.bias": torch.ones(9)}, tmp_path / "wide.safetensors")
    save_file({"trunk.bias": torch.tensor([1.0, float("nan")])}, tmp_path / "nan.safetensors")
    save_file({"a": torch.ones(1), "b": torch.ones(1)}, tmp_path / "two.safetensors")
    (tmp_path / "torn.safetensors").write_bytes(b"\xff" * 40)
    (tmp_path / "torn.pt").write_bytes(b"PK\x03\x04 torn")
    (tmp_path / "text.md").write_text("weights")
    (tmp_path / "empty").mkdir()
    (tmp_path / "evil.pt").write_bytes(pickle.dumps({"trunk.bias": Evil(tmp_path / "made")}))
    torch.save(Evil(tmp_path / "made"), tmp_path / "object.pt")
    torch.save({"state_dict": {"trunk.bias": torch.ones(2)}, "hyper_parameters": Evil}, tmp_path / "model.ckpt")
    with warnings.catch_warnings(action="ignore"):
        torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), tmp_path / "script.pt")
    torch.save([torch.ones(2)], tmp_path / "list.pt")
    torch.save({"epoch": 3, "net": {"trunk.bias": torch.ones(2)}}, tmp_path / "wrapped.pt")
    torch.save({"trunk.bias": torch.ones(2).to_sparse()}, tmp_path / "sparse.pt")
    for source, error, words in (
        ("other.safetensors", ConfigError, r"names and shapes of the model's trainable parameters .*got other"),
        ("wide.safetensors", ConfigError, r"of another shape: trunk.bias: \(9,\) in the source, \(2,\) in the model"),
        ("frozen.safetensors", ConfigError, r"frozen parameters are loaded by build_model"),
        ("nan.safetensors", ConfigError, "expected finite numbers, got others in trunk.bias"),
        ("{from: two.safetensors, rename: {'a|b': c}}", ConfigError, "got c for several tensors"),
        ("{from: two.safetensors, rename: {'a': '\\9'}}", ConfigError, "invalid group reference"),
        ("{from: two.safetensors, rename: {'^x': b}}", ConfigError, r"names of the source \(a, b\), got '\^x'"),
        ("torn.safetensors", ConfigError, "cannot read .* as safetensors"),
        ("torn.pt", ConfigError, r"torn.pt: is damaged, or no file of torch \(RuntimeError\)"),
        (
            "evil.pt",
            ConfigError,
            "evil.pt: expected tensors, got a pickle of other objects, which is not read, since that runs",
        ),
        ("object.pt", ConfigError, "object.pt: expected tensors, got a pickle of other objects, which is not read"),
        ("model.ckpt", ConfigError, r"^training.init_from: [^\n]* a pickle of [a-z._]*test_warm_start.Evil, [^\n]*\)$"),
        ("script.pt", ConfigError, r"got a TorchScript archive: torch.jit.load reads it: save the model"),
        ("list.pt", ConfigError, "expected a state_dict, .* got list"),
        ("wrapped.pt", ConfigError, "by itself or as 'state_dict', .* got a dict of epoch, net: save it with"),
        ("sparse.pt", ConfigError, "expected dense tensors"),
        ("text.md", ConfigError, "expected a file that ends in .safetensors, .pt"),
        ("empty", ConfigError, "expected the folder of a run .* or of checkpoints"),
        ("runs/young", ConfigError, "got runs/young, and it does not exist"),
        ("other.safetensors@3", ConfigError, "expected a version of a run folder"),
        ("runs/old@best", VersionUnknownError, r"training\.init_from: .* an alias \(none\) or latest, got 'best'"),
        ("runs/old@4", VersionUnknownError, r"version that is kept \(3, 7\), an alias \(none\) or latest, got '4'"),
    ):
        with pytest.raises(error, match=words):
            begun(job(tmp_path, source))
    assert not (tmp_path / "made").exists(), "no code of a file was run"
    for wrong, words in (
        ("''", "expected a run folder or a file"),
        ("{from: a, rename: {'(': b}}", "regular expression"),
    ):
        with pytest.raises(ConfigError, match=words):
            parse(JOB, [f"training.init_from={wrong}"])


def test_a_checkpoint_of_an_earlier_release_is_to_be_exported(tmp_path: Path, run: Path) -> None:
    store = FileCheckpointStore(run / "checkpoints", "old")
    held = store.load_newest(None)
    assert held is not None
    for file in (run / "checkpoints").glob("*.doll"):
        file.unlink()
    store.save(Checkpoint(job="old", fingerprint="", term=held.term, version=8, state=b"", tensors=held.tensors))
    with pytest.raises(CheckpointError, match=r"earlier release .*doll export RUN"):
        begun(job(tmp_path, run))


def test_the_first_version_has_the_weights_and_says_whose_they_are(tmp_path: Path, run: Path) -> None:
    config = job(tmp_path, run)
    model = model_of(config)
    given = matched(config, model)
    assert given is not None
    given.load_into(model)
    weights = model.flat.numpy().copy()
    mark = fingerprint(config, model)
    start = begun_with(
        config, Start(1, 2.0, (5, 6), generation=0, samples_id="s", run_id="r"),
        make_parts(config.training, model).tensors(), mark, given.report.source,
    )  # fmt: skip
    checkpoint = decode_checkpoint(start.checkpoint)
    snapshot = decode_snapshot(checkpoint)
    assert (snapshot.version, snapshot.origins, snapshot.run_id) == (0, (5, 6), "r")
    assert snapshot.init_from == given.report.source
    np.testing.assert_array_equal(checkpoint.tensors["weights"], weights)
    # A job goes on from its own checkpoints, so its file may change.
    assert "init_from" not in mark
    assert fingerprint(parse(JOB), model_of(parse(JOB))) == mark


BAGS = f"""
job: bags
task: {{class: "{SUPPORT / "bag_task.py"}:Bags", args: {{bounded: true, ids: 1000000, width: 3}}}}
data: {{workers: 2, batch_size: 2}}
training:
  policy: {{name: doll, group_size: 1}}
  optimizer: {{name: adagrad}}
  tables: {{"0": {{max_rows: 8, min_count: 2, ttl_updates: 3}}}}
"""
IDS = np.array([3, 500, 70_000, 999_999])
TABLE = "0.weight"


def bags(tmp_path: Path, source: object = None, *overrides: str) -> JobConfig:
    path = tmp_path / "bags.yaml"
    path.write_text(BAGS)
    return load(path, ([] if source is None else [f"training.init_from={source}"]) + list(overrides))


def named(table: BoundedTable, ids: Any, version: int) -> None:
    ids = np.sort(np.asarray(ids, np.int64))
    table.add(Rows(ids, np.ones((len(ids), 3), np.float32)))
    table.apply(1.0, version)


def bounded_of(config: JobConfig, model: FlatModel) -> BoundedTable:
    parts = make_parts(config.training, model)
    assert parts.tables is not None
    return parts.tables.bounded[TABLE]


def saved(folder: Path, config: JobConfig, change: Callable[[ModelParts], None]) -> Path:
    """A run whose only checkpoint has what `change` has made of its model."""
    model = model_of(config)
    parts = make_parts(config.training, model)
    change(parts)
    store = FileCheckpointStore(folder / "checkpoints", config.job)
    state = first_snapshot(engine_settings(config), (0, 0), policy="doll", generation=0, samples_id="", run_id="")
    store.save(
        Checkpoint(
            job=config.job, fingerprint=fingerprint(config, model), term=store.claim_term(), version=9,
            state=encode_snapshot(state), tensors=parts.tensors(), layout=model.layout,
        )
    )  # fmt: skip
    (folder / "job.yaml").write_text(dump(config))
    return folder


@pytest.fixture
def bounded(tmp_path: Path) -> Path:
    """A run in whose bounded table the ids IDS have rows, and were named 9, 3, 4 and 5 times; 77 was named once."""

    def learn(parts: ModelParts) -> None:
        assert parts.tables is not None
        table = parts.tables.bounded[TABLE]
        for version in range(1, 10):
            named(table, IDS[[True, version <= 3, version <= 4, version <= 5]], version)
            if version == 2:
                named(table, [77], version)

    return saved(
        tmp_path / "old", bags(tmp_path, None, "job=old", "seed=4", "training.tables.0.ttl_updates=100"), learn
    )


def test_a_bounded_table_begins_with_the_ids_rows_and_counts_of_another(tmp_path: Path, bounded: Path) -> None:
    config = bags(tmp_path, bounded, "seed=5")
    model = model_of(config)
    given = matched(config, model)
    assert given is not None
    assert given.report.differences == []
    assert TABLE in given.report.taken
    given.load_into(model)
    table = bounded_of(config, model)
    stored = FileCheckpointStore(bounded / "checkpoints", "old").load_newest(None)
    assert stored is not None
    before, after = (stored_bounded_rows(tensors, TABLE, 3) for tensors in (stored.tensors, table.tensors()))
    assert after.ids.tolist() == before.ids.tolist()
    np.testing.assert_array_equal(after.values, before.values)
    tensors = table.tensors()
    assert not tensors[f"table.{TABLE}.state.sum"].any(), "the optimizer begins again"
    at = np.argsort(tensors[f"table.{TABLE}.ids"])
    assert tensors[f"table.{TABLE}.counts"][at].tolist() == [9, 3, 4, 5]
    # Whatever reads the first checkpoint goes on with the same table.
    again = bounded_of(config, model_of(config))
    again.load(tensors)
    for version in range(1, 6):
        for each in (table, again):
            named(each, [3, 77] if version < 3 else [3], version)
    assert table.totals == again.totals
    rows = stored_bounded_rows(table.tensors(), TABLE, 3)
    assert rows.ids.tolist() == [3, 77], "ids that no update has named for ttl_updates have lost their rows"
    assert table.totals.expired == 3
    for name, values in again.tensors().items():
        np.testing.assert_array_equal(values, table.tensors()[name])


def test_of_more_ids_than_there_is_room_for_the_most_frequent_ones_are_taken(tmp_path: Path, bounded: Path) -> None:
    fewer = ['training.tables={"0": {max_rows: 2}}', "data.batch_size=1"]
    config = bags(tmp_path, bounded, *fewer)
    model = model_of(config)
    given = matched(config, model)
    assert given is not None
    assert given.report.rows == (f"{TABLE}: 2 rows of 4, those of the ids that were named most often",)
    given.load_into(model)
    assert stored_bounded_rows(bounded_of(config, model).tensors(), TABLE, 3).ids.tolist() == [3, 999_999]
    with pytest.raises(ConfigError, match=r"tables: 0\.weight: 2 rows of 4"):
        matched(bags(tmp_path, f"{{from: {bounded}, strict: true}}", *fewer), model_of(config))


def test_bounded_tables_take_exported_rows_and_refuse_what_is_none(tmp_path: Path, bounded: Path) -> None:
    export_model(load(bounded / "job.yaml"), bounded, tmp_path / "out")
    exported = tmp_path / "out" / "model.safetensors"
    config = bags(tmp_path, exported)
    model = model_of(config)
    given = matched(config, model)
    assert given is not None
    assert given.report.differences == []
    given.load_into(model)
    tensors = bounded_of(config, model).tensors()
    assert tensors[f"table.{TABLE}.ids"].tolist() == IDS.tolist()
    assert tensors[f"table.{TABLE}.counts"].tolist() == [2, 2, 2, 2], "admitted, as min_count says"
    weights = load_file(exported)
    for change, words in (
        ({"0.ids": torch.tensor([1, 2, 2, 4])}, "expected strictly increasing ids of 0 to 999999"),
        ({"0.ids": torch.tensor([1, 2, 3, 10**6])}, "expected strictly increasing ids of 0 to 999999"),
        ({"0.ids": torch.tensor([1, 2, 3])}, "a row and a count for each of 3 ids, got 4 rows"),
        ({"0.ids": torch.ones(4)}, "expected ids as an int64 array"),
        ({"0.rows": torch.full((4, 3), torch.inf)}, "expected finite numbers, got others in 0.weight"),
    ):
        save_file({**weights, **change}, tmp_path / "wrong.safetensors")
        with pytest.raises(ConfigError, match=words):
            matched(bags(tmp_path, "wrong.safetensors"), model_of(config))
    # A row of another table has another meaning: one that is bounded here and not there begins as the task draws it.
    dense = bags(tmp_path, exported, "task.args.bounded=false", "task.args.ids=10", "training.tables={}")
    given = matched(dense, model_of(dense))
    assert given is not None
    assert (given.report.missing, set(given.report.unknown)) == ((TABLE,), {"0.ids", "0.rows", "0.key"})
    save_file({"1.bias": torch.ones(2), "0.weight": torch.ones(10, 3)}, tmp_path / "rows.safetensors")
    given = matched(bags(tmp_path, "rows.safetensors"), model_of(config))
    assert given is not None
    assert given.report.other_shape == ("0.weight: (10, 3) in the source, a bounded table in the model",)


@pytest.mark.parametrize("kind", ["ordinary", "bounded"])
def test_what_a_program_loads_has_all_rows_of_its_tables(tmp_path: Path, bounded: Path, kind: str) -> None:
    folder = bounded
    if kind == "ordinary":
        dense = ("task.args.bounded=false", "task.args.ids=10", "training.tables={}", "job=old")
        folder = saved(tmp_path / "ordinary", bags(tmp_path, None, *dense), lambda parts: None)
    config = load(folder / "job.yaml")
    task = load_task(config)
    learned = model_of(config)
    stored = newest_weights(config, folder, learned)
    assert stored is not None
    stored.load_into(learned)
    ids = torch.tensor([[3, 5, 3, 0, 9]] if kind == "ordinary" else [[3, 999_999, 77, 3, 0], [500, 1, 2, 4, 5]])
    with torch.no_grad():
        expected = learned.module(ids)
    assert expected.std() > 0

    module = doll.open(folder).model()
    torch.save(module.state_dict(), tmp_path / "saved.pt")
    again = task.build_model()
    again.load_state_dict(torch.load(tmp_path / "saved.pt", weights_only=True))
    how = export_model(config, folder, tmp_path / "out")["how_to_load"]
    names: dict[str, Any] = {}
    with contextlib.chdir(tmp_path / "out"):
        Path("job.yaml").write_text(dump(config))
        exec("\n".join(how), names)
    with torch.no_grad():
        for whole in (module, again, names["model"]):
            assert torch.equal(whole(ids), expected)
    assert [layer.sparse for layer in module.modules() if isinstance(layer, torch.nn.EmbeddingBag)] == [True]
    assert (tmp_path / "saved.pt").stat().st_size > 0


def test_a_bounded_table_without_rows_says_what_it_expects(bounded: Path) -> None:
    config = load(bounded / "job.yaml")
    fresh = load_task(config).build_model()
    with pytest.raises(RuntimeError, match=r"doll\.BoundedEmbeddingBag: expected a DOLL job, .*, or run\.model\(\)"):
        fresh(torch.tensor([[1, 2]]))
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "0.ids", "0.rows", "0.key"'):
        fresh.load_state_dict({"1.weight": torch.zeros(2, 3), "1.bias": torch.zeros(2)})
    whole = doll.open(bounded).model()
    for wrong, error in (([[10**6]], IndexError), ([[0.5]], TypeError)):
        with pytest.raises(error, match=r"doll\.BoundedEmbeddingBag: expected ids"):
            whole(torch.tensor(wrong))
    with pytest.raises(ConfigError, match=r"it has rows already; training\.init_from begins with those"):
        EmbeddingTables(whole)


def test_a_job_begins_with_checkpoints_in_s3(tmp_path: Path, run: Path, s3: Any) -> None:
    source = FileCheckpointStore(run / "checkpoints", "old")
    places = ("s3://models/team/old", "s3://models")
    for place in places:
        store = S3CheckpointStore(place, "old")
        term = store.claim_term()
        for version in (3, 7):
            held = source.load_newest(None, version)
            assert held is not None
            store.save(dataclasses.replace(held, term=term))
    for named, version in (*((place, 7) for place in places), (f"{places[0]}/@3", 3), (f"{places[0]}@3", 3)):
        tensors, report = begun(job(tmp_path, named))
        assert set(report.taken) == NAMES
        assert report.source.startswith(f"version {version} of old (sha256 ")
        assert tensors["body.0.bias"].tolist() == [version + at for at in range(4)]
    # A run whose checkpoints are there is named by its folder.
    (run / "job.yaml").write_text(dump(parse(JOB, ["job=old", "seed=9", f"checkpoint.folder={places[0]}"])))
    assert begun(job(tmp_path, f"{run}@3"))[1].source.startswith("version 3 of old (sha256 ")
    for wrong, error, words in (
        (f"{places[0]}@4", CheckpointError, r"expected a version that is kept \(3, 7\), .*got '4'"),
        ("s3://models/none", ConfigError, "no checkpoint in s3://models/none: expected a run that has learned"),
        ("s3://nowhere/x", CheckpointError, "training.init_from: cannot look into s3://nowhere/x: .*NoSuchBucket"),
        ("s3://Upper/x", ConfigError, r"training.init_from: expected s3://bucket/prefix of a URL, got s3://Upper/x"),
        ("gs://models/x", ConfigError, r"training.init_from: expected s3://bucket/prefix of a URL, got gs://models/x"),
    ):
        with pytest.raises(error, match=words):
            begun(job(tmp_path, wrong))
