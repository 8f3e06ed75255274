"""Log lines are JSON, and an exception's text never reaches them."""

import json
import logging
import sys

from draftkeep.serve.logs import JsonFormatter


def line_of(message: str, *arguments: object, error: bool = False) -> dict[str, str]:
    info = sys.exc_info() if error else None
    record = logging.LogRecord("a.b", logging.ERROR, __file__, 1, message, arguments, info)
    text = JsonFormatter().format(record)
    assert "\n" not in text
    parsed: dict[str, str] = json.loads(text)
    return parsed


def test_a_line_is_one_json_object() -> None:
    line = line_of("drafting with %s\n", 'a "quoted"\nname')
    assert line["message"] == 'drafting with a "quoted"\nname'
    assert (line["level"], line["logger"]) == ("ERROR", "a.b")
    assert line["time"].endswith("+00:00")


def test_an_exception_is_its_type_and_its_place() -> None:
    try:
        raise ValueError("zebra-canary-77")
    except ValueError:
        line = line_of("unexpected", error=True)
    assert line["exception"] == "ValueError"
    assert "test_an_exception_is_its_type_and_its_place" in line["at"]
    assert "zebra" not in json.dumps(line)
