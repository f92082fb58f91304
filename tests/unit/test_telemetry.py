"""What a log line looks like, and that a library that repeats itself while a service is away fills no log."""

from __future__ import annotations

import io
import json
import logging
import re
import warnings
from collections.abc import Iterator

import pytest
import structlog
from doll import telemetry
from doll.telemetry import LogFormat, RateLimitFilter

UTC = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+Z"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    structlog.reset_defaults()
    logging.captureWarnings(False)
    root.handlers[:] = handlers
    root.setLevel(level)


def lines(log_format: LogFormat, out: io.StringIO | None = None) -> list[str]:
    """What DOLL and a library log."""
    stream = out if out is not None else io.StringIO()
    telemetry.configure(log_format, process="worker-3", stream=stream)
    telemetry.get_logger("doll").warning("sample_refused", reason="\x1b[2J bad\nlevel=error", loss=float("nan"))
    logging.getLogger("faust.topics").warning("not \x1b[31m%s", "acknowledged")
    logging.getLogger("faust.topics").info("too much")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(False)
        logging.captureWarnings(True)
        warnings.warn("of old age", DeprecationWarning, stacklevel=1)
    try:
        raise KeyError("x")
    except KeyError:
        telemetry.get_logger("doll").exception("failed")
    return stream.getvalue().splitlines()


def test_libraries_log_in_the_same_json_as_doll() -> None:
    logged = [json.loads(line) for line in lines("json")]
    assert [list(entry)[:4] for entry in logged] == [["time", "level", "process", "event"]] * 4
    assert all(re.fullmatch(UTC, entry["time"]) for entry in logged)
    assert [entry["level"] for entry in logged] == ["warning", "warning", "warning", "error"]
    assert {entry["process"] for entry in logged} == {"worker-3"}
    assert (logged[0]["event"], logged[0]["loss"]) == ("sample_refused", None)
    assert (logged[1]["logger"], logged[1]["event"]) == ("faust.topics", r"not \x1b[31macknowledged")
    assert logged[2]["logger"] == "py.warnings"
    assert "of old age" in logged[2]["event"]
    assert logged[3]["exception"].splitlines()[-1] == "KeyError: 'x'"


def test_libraries_log_in_the_same_console_form_as_doll_without_control_sequences() -> None:
    logged = lines("console")
    own, library, warned, failed = logged[:4]
    for line, level in ((own, "warning"), (library, "warning"), (warned, "warning"), (failed, "error")):
        assert re.match(rf"{UTC} \[{level} *\] ", line), line
        assert "process=worker-3" in line
    assert library.split("] ", 1)[1].startswith(r"not \x1b[31macknowledged")
    assert logged[-1] == "KeyError: 'x'"
    assert all(line.isprintable() for line in logged)


@pytest.mark.parametrize(
    ("variables", "has_colors"),
    [({}, True), ({"NO_COLOR": "1"}, False), ({"NO_COLOR": ""}, True), ({"TERM": "dumb"}, False)],
)
def test_only_a_terminal_gets_colours(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], has_colors: bool
) -> None:
    for name, value in ({"TERM": "xterm", "NO_COLOR": ""} | variables).items():
        monkeypatch.setenv(name, value)
    text = "\n".join(lines("console", Terminal()))
    assert ("\x1b[" in text) == has_colors
    assert "\x1b[2J" not in text, "what a value says to the terminal is escaped"
    assert "\x1b" not in "\n".join(lines("json", Terminal()))


def test_what_json_cannot_say_is_logged_all_the_same() -> None:
    out = io.StringIO()
    telemetry.configure("json", stream=out)
    telemetry.get_logger("doll").info("odd", half=["\ud800"], thing=object, **{"a key": {1: 2}})
    assert json.loads(out.getvalue())["event"] in ("odd", "'odd'")


def test_a_log_follows_standard_error(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Standard output has a command's result only; and the standard error of the configuration may be closed by now."""
    telemetry.configure("json")
    closed = io.StringIO()
    monkeypatch.setattr("sys.stderr", closed)
    telemetry.configure("json")
    monkeypatch.undo()
    closed.close()
    telemetry.get_logger("doll").info("own")
    logging.getLogger("boto3").error("library")
    out, err = capsys.readouterr()
    assert out == ""
    assert [json.loads(line)["event"] for line in err.splitlines()] == ["own", "library"]


def test_a_second_configuration_replaces_the_first() -> None:
    first, second = io.StringIO(), io.StringIO()
    telemetry.configure("console", stream=first)
    telemetry.configure("json", process="up", stream=second)
    logging.getLogger("aiokafka").error("once")
    telemetry.get_logger("doll").info("twice")
    assert first.getvalue() == ""
    assert [json.loads(line)["event"] for line in second.getvalue().splitlines()] == ["once", "twice"]


def record(message: str, *values: object, name: str = "aiokafka") -> logging.LogRecord:
    return logging.LogRecord(name, logging.ERROR, "a.py", 1, message, values, None)


def test_a_message_is_let_through_once_in_30_seconds() -> None:
    now = 100.0
    once = RateLimitFilter(clock=lambda: now)
    passed: list[bool | logging.LogRecord] = []
    for _ in range(61):
        passed.append(once.filter(record("cannot connect to node %s", passed)))
        now += 0.5
    assert [i for i, let in enumerate(passed) if let] == [0, 60]


def test_other_messages_and_other_libraries_are_not_held_back() -> None:
    once = RateLimitFilter(clock=lambda: 0.0)
    assert once.filter(record("a %s", 1))
    assert not once.filter(record("a %s", 2))
    assert once.filter(record("b"))
    assert once.filter(record("a %s", 1, name="redis"))


def test_it_remembers_so_many_messages_and_no_more() -> None:
    once = RateLimitFilter(clock=lambda: 0.0)
    assert all(once.filter(record(f"request {i} failed")) for i in range(5000))
    assert len(once._logged_at_s) <= 1000
