"""Cost and Usage Reports: both spellings of their columns, what belongs to a job, and files that are none."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from doll.config.provision import ServicesConfig
from doll.errors import ConfigError
from doll.provisioner.billing import BillLine
from doll.provisioner.cost_reports import category, read_report
from doll.provisioner.job_bill import BilledInstance, JobBill, aws_costs, billed_instances
from doll.provisioner.prices.shipped import service_costs

START = 1_764_576_000.0  # 2025-12-01 08:00 UTC
HEAD = (
    "line_item_usage_start_date,line_item_usage_end_date,line_item_unblended_cost,line_item_resource_id,"
    "line_item_usage_type,line_item_line_item_type,line_item_product_code,resource_tags_user_doll_job,"
    "resource_tags_user_doll_worker,resource_tags_user_doll_stack,resource_tags_user_name"
)
ROWS = """
2025-12-01T08:00:00Z,2025-12-01T09:00:00Z,0.04,i-1,SpotUsage:c7g.large,Usage,AmazonEC2,churn,0,,
2025-12-01T09:00:00Z,2025-12-01T10:00:00Z,0.03,i-1,SpotUsage:c7g.large,Usage,AmazonEC2,churn,0,,
2025-12-01T08:00:00Z,2025-12-01T09:00:00Z,0.10,i-9,BoxUsage:c7g.large,Usage,AmazonEC2,churn,1,,
2025-12-01T08:00:00Z,2025-12-01T09:00:00Z,0.20,i-c,BoxUsage:m6i.xlarge,Usage,AmazonEC2,,,prod,prod-control
2025-12-01T08:00:00Z,2025-12-01T09:00:00Z,0.05,nat-1,NatGateway-Hours,Usage,AmazonEC2,,,prod,
2025-12-01T08:00:00Z,2025-12-01T09:00:00Z,0.07,x,Quantum:Hours,Usage,AmazonBraket,churn,,,
2025-12-01T08:00:00Z,2025-12-01T09:00:00Z,-0.01,i-1,SpotUsage:c7g.large,Credit,AmazonEC2,churn,0,,
2025-12-01T01:00:00Z,2025-12-01T02:00:00Z,0.50,i-old,BoxUsage:c7g.large,Usage,AmazonEC2,churn,0,,
2025-12-01T08:00:00Z,2025-12-01T09:00:00Z,9.00,i-z,BoxUsage:p5.48xlarge,Usage,AmazonEC2,another,0,prod,
2025-12-01T08:00:00Z,2025-12-01T09:00:00Z,1.00,vol-1,EBS:VolumeUsage.gp3,Usage,AmazonEC2,,,,
""".strip()  # fmt: skip


def report(folder: Path, text: str = f"{HEAD}\n{ROWS}\n") -> Path:
    (folder / "cur.csv").write_text(text)
    return folder / "cur.csv"


def bill(path: Path) -> JobBill:
    ours = [BilledInstance("i-1", 0, "spot", 0.065), BilledInstance("i-2", 1, "spot", 0.01)]
    costs = aws_costs(
        read_report(path), ids={"i-1", "i-2"}, job="churn", stack="prod", start_s=START, end_s=START + 7200
    )
    services = service_costs("self_managed", ServicesConfig(), 7200.0)
    return JobBill("churn", START, START + 7200, ours, [], 0.0, services, costs)


def test_a_bill_is_compared_by_instance_and_by_category(tmp_path: Path) -> None:
    compared = bill(report(tmp_path))
    instances = {row.name: row[1:] for row in compared.by_instance()}
    assert instances["i-1"] == (0.065, pytest.approx(0.07))
    assert instances["i-2"] == (0.01, None), "AWS's line has not come yet"
    assert instances["i-9"] == (None, pytest.approx(0.10)), "DOLL has no bill of this one, and its tag is the job's"
    categories = {row.name: row[1:] for row in compared.by_category()}
    assert categories["workers"] == (pytest.approx(0.075), pytest.approx(0.17))
    assert categories["control_host"] == (pytest.approx(0.40), pytest.approx(0.20))
    assert categories["credits and taxes"] == (None, pytest.approx(-0.01))
    assert categories["sum"] == (pytest.approx(0.075 + 0.90), pytest.approx(0.17 + 0.2 + 0.05 + 0.07 - 0.01))
    assert compared.aws is not None
    assert dict(compared.aws.unknown) == {"AmazonBraket Quantum:Hours": pytest.approx(0.07)}
    assert compared.aws.others == 3, "an earlier run, another job of the stack, a volume without a tag"
    text = compared.text()
    assert "no category: AmazonBraket Quantum:Hours: 0.070 USD" in text
    assert "3 lines, 10.50 USD" in text
    assert json.loads(json.dumps(compared.to_dict()))["aws"]["others"] == 3


def test_legacy_columns_gzip_and_parquet_give_the_same(tmp_path: Path) -> None:
    expected = bill(report(tmp_path)).to_dict()
    names = {
        "line_item_usage_start_date": "lineItem/UsageStartDate", "line_item_usage_end_date": "lineItem/UsageEndDate",
        "line_item_unblended_cost": "lineItem/UnblendedCost", "line_item_resource_id": "lineItem/ResourceId",
        "line_item_usage_type": "lineItem/UsageType", "line_item_line_item_type": "lineItem/LineItemType",
        "line_item_product_code": "lineItem/ProductCode", "resource_tags_user_doll_job": "resourceTags/user:doll:job",
        "resource_tags_user_doll_worker": "resourceTags/user:doll:worker",
        "resource_tags_user_doll_stack": "resourceTags/user:doll:stack",
        "resource_tags_user_name": "resourceTags/user:Name",
    }  # fmt: skip
    legacy = ",".join(names[name] for name in HEAD.split(","))
    with gzip.open(tmp_path / "cur.csv.gz", "wt", encoding="utf-8-sig") as file:
        file.write(f"{legacy}\n{ROWS}\n")
    assert bill(tmp_path / "cur.csv.gz").to_dict() == expected
    csv, parquet = pytest.importorskip("pyarrow.csv"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(csv.read_csv(report(tmp_path)), tmp_path / "cur.parquet")
    assert bill(tmp_path / "cur.parquet").to_dict() == expected


def test_tags_may_be_one_column_of_cur_2(tmp_path: Path) -> None:
    head = (
        "line_item_usage_start_date,line_item_unblended_cost,line_item_resource_id,line_item_usage_type,resource_tags"
    )
    tags = '{""user_doll_job"": ""churn"", ""user_doll_worker"": ""0""}'
    path = report(tmp_path, f'{head}\n2025-12-01 08:00:00,0.04,i-7,BoxUsage,"{tags}"\n')
    (line,) = read_report(path)
    assert (line.tags["doll_job"], category(line), line.start_s, line.end_s) == (
        "churn",
        "workers",
        START,
        START + 3600,
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "row 0: no column line_item_unblended_cost"),
        ("a,b\n1,2\n", "no column"),
        (f"{HEAD}\n1,2\n", "expected 11 cells, got 2"),
        (f"{HEAD}\nyesterday,,0.1,,,,,,,,\n", "row 1: Invalid isoformat string"),
        (f"{HEAD}\n2025-12-01T08:00:00Z,,nan,,,,,,,,\n", "expected line_item_unblended_cost as a finite number"),
        (f"{HEAD}\n2025-12-01T08:00:00Z,,ten,,,,,,,,\n", "could not convert"),
        (f'{HEAD}\n"{"x" * 1_100_000}\n', "expected lines of at most 1000000 characters"),
        (f"{HEAD},line_item_currency_code\n2025-12-01T08:00:00Z,,1,,,,,,,,,CNY\n", "expected costs in USD, got CNY"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_report_is_refused_in_one_line(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        list(read_report(report(tmp_path, text)))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("name", ["cur.csv.gz", "cur.parquet", "gone.csv"])
def test_damaged_files_are_refused(tmp_path: Path, name: str) -> None:
    if name != "gone.csv":
        (tmp_path / name).write_bytes(gzip.compress(HEAD.encode())[:-9] if name.endswith("gz") else b"PAR1 no")
    with pytest.raises(ConfigError, match=name):
        list(read_report(tmp_path / name))


def test_instances_come_from_the_journal_and_the_state_once(tmp_path: Path) -> None:
    def line(id_: str, launched_s: float, ended_s: float | None, usd: float) -> dict[str, object]:
        made = BillLine(id_, 0, 1, "spot", "c7g", launched_s, ended_s, "", 60.0, usd, usd)
        return {name: getattr(made, name) for name in BillLine.__dataclass_fields__}

    entries = [line("i-0", 1.0, 50.0, 9.0), line("i-1", 120.0, 150.0, 0.1), line("i-1", 160.0, 180.0, 0.2)]
    journal = tmp_path / "provision-churn.jsonl"
    journal.write_text("".join(json.dumps({"kind": "ended", "turn": 1, **entry}) + "\n" for entry in entries) + '{"k')
    kept = {"billing": {"lines": [entries[2], line("i-2", 130.0, 170.0, 0.3)]}}
    billed = billed_instances(journal, kept, 100.0)
    assert [(instance.id, instance.usd) for instance in billed] == [("i-1", 0.1), ("i-1", 0.2), ("i-2", 0.3)]
    assert billed_instances(tmp_path / "none", None, 0.0) == []
    with pytest.raises(ConfigError, match="expected lines of this release"):
        billed_instances(journal, {"billing": {"lines": [{"id": 3}]}}, 0.0)
