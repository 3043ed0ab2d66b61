"""One log format for every process: a JSON object per line on stderr, for structlog and for the libraries' own loggers.

A line carries `process`, so that the lines of a whole run can be put together; errors of ours give their code and detail.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, MutableMapping
from typing import Any

import orjson
import structlog

from schemas.errors import HoofprintError

_QUIET = {
    "aiokafka": logging.CRITICAL,  # 35 lines a second while a broker is away; whoever needs it notices by itself
    "faust": logging.WARNING,
    "mode": logging.WARNING,
    "pyiceberg": logging.WARNING,  # a line per table and look
    "httpx": logging.WARNING,  # one line per request, with the session token in its URL
    "httpx2": logging.WARNING,
    "asyncio": logging.WARNING,
    "uvicorn.access": logging.WARNING,
}


def configure_logging(process: str) -> None:
    """Call once, first thing in a process."""
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _process_name(process),
        _own_error,
        structlog.processors.format_exc_info,
    ]
    structlog.configure(
        processors=[*shared, structlog.processors.JSONRenderer(serializer=_dumps)],
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.JSONRenderer(serializer=_dumps),
            ],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    for name, level in _QUIET.items():
        logging.getLogger(name).setLevel(level)


def _dumps(event: Mapping[str, Any], **_: object) -> str:
    return orjson.dumps(event, default=str, option=orjson.OPT_NON_STR_KEYS).decode()


def _process_name(process: str) -> structlog.typing.Processor:
    def add(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        event.setdefault("process", process)
        return event

    return add


def _own_error(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """`error=<HoofprintError>` becomes its message, code and detail."""
    error = event.get("error")
    if isinstance(error, HoofprintError):
        event.update(error=error.message, code=error.code, detail=error.detail)
    return event
