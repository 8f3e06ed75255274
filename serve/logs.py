"""Structured logs: one JSON object a line, with nothing in it that a request brought along."""

import json
import logging
import sys
import traceback
from datetime import UTC, datetime

from draftkeep.ingest.kafka_client import keep_library_quiet


class JsonFormatter(logging.Formatter):
    """Time, level, logger and message, and a record's own `fields` beside them; of an exception
    the type and the places, never the text.

    An unexpected exception's text may hold whatever was being worked on when it was raised.
    """

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line of JSON."""
        entry = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage().strip(),
        }
        entry |= getattr(record, "fields", {})
        if record.exc_info and record.exc_info[0] is not None:
            entry["exception"] = record.exc_info[0].__name__
            frames = traceback.extract_tb(record.exc_info[2])
            entry["at"] = "; ".join(f"{f.filename}:{f.lineno} {f.name}" for f in frames[-8:])
        return json.dumps(entry)


def log_to_stderr(level: int = logging.INFO) -> None:
    """Send everything from a level on to stderr in this form; nothing of the Kafka library's."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(level=level, handlers=[handler], force=True)
    keep_library_quiet()
    # One line a request, with its URL; three for every new catalog, of no use to an operator.
    for library in ("httpx", "alembic"):
        logging.getLogger(library).setLevel(logging.WARNING)
