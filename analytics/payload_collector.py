"""Deletes payload files that nothing needs any more: the rule of `analytics.retention`, carried out by the archiver alone.

A pass takes stock of the store, then brings the archive up to the end of the log as it stands at that moment, and only
then deletes what was free before and still is: so the events of every file that goes are archived, its attempt's segments
too. A group's file can be made again from them (`analytics.archived_payloads`) and just goes. All else that an event
refers to (token columns, requests, prompts, routed experts) is in no other place: its bytes go into the archive's own
store first, checked by their digest.

Which event names which file is looked up in the archive once, at the first pass that has something to delete, and noted from
then on as events are archived; a file that seems to be named by nobody is looked up again. Nothing is remembered but what the
archive says: a pass that is killed anywhere is done again by the next one. A store that is away, or a file with other bytes than
recorded, is reported and tried again; archiving goes on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import PurePosixPath
from typing import Literal

import pyarrow as pa
import structlog

from analytics.archived_payloads import archive_store
from analytics.catalog import connect_log
from analytics.columns import RawRow
from analytics.payload_fates import READ, PayloadFates
from analytics.retention import Ages, orphaned, spent
from analytics.tables import TABLE_OF, TABLES, Archive
from journal.clock import Clock, system_clock
from journal.metrics_http import Number
from journal.payloads import PayloadStore, StoredPayload
from schemas.codec import decode
from schemas.errors import CorruptPayload, StoreError, TransportError
from schemas.events import Event, PayloadRef
from schemas.settings import Settings
from schemas.topics import TOPIC_OF

Kind = Literal["group", "source"]
"""A file that can be made again from segments, or one that cannot."""
_NAMED_BY: tuple[tuple[str, str, Kind], ...] = (
    ("control", "payload", "group"),
    ("segments", "tokens_ref", "source"),
    ("segments", "request_ref", "source"),
    ("segments", "experts", "source"),
    ("prompts", "prompt_ref", "source"),
)
_REFERENCES: dict[type[Event], list[tuple[str, Kind]]] = {
    event_type: [
        (column, kind)
        for table, column, kind in _NAMED_BY
        if event_type in TABLES[table].events and column in event_type.__struct_fields__
    ]
    for event_type in TOPIC_OF
}
_US = 1_000_000
log = structlog.get_logger()


class PayloadCollector:
    """`catch_up`: archive everything up to the present end of the log. Told every event that is archived."""

    def __init__(
        self,
        settings: Settings,
        archive: Archive,
        store: PayloadStore,
        catch_up: Callable[[], object],
        clock: Clock = system_clock,
    ) -> None:
        self._run_id = settings.run.run_id
        self._archive, self._store, self._catch_up, self._clock = archive, store, catch_up, clock
        self._kept = archive_store(settings.run_directory)
        self._ages = Ages(
            int(settings.archive.collect_after_s * _US), int(settings.proxy.session_max_age_s * _US)
        )
        self._fates = PayloadFates(self._run_id, settings.trainer.keep_checkpoints)
        self.files: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.failures = 0
        self._kinds: dict[str, Kind] = {}  # of files that are known to be referred to
        self._looked_up = False
        self._stock: tuple[int, int] = (0, 0)
        for event in _archived(archive):
            self._fates.told(event)

    def told(self, row: RawRow) -> None:
        """One record of the log, archived or about to be."""
        if row.event is not None:
            self._fates.told(row.event)
            for column, kind in _REFERENCES.get(type(row.event), ()):
                ref: PayloadRef | None = getattr(row.event, column)
                if ref is not None:
                    self._kinds[ref.uri] = kind

    def collect(self, stopping: Callable[[], bool] = lambda: False) -> int:
        """One pass; how many files went. ArchiveError: the archive cannot be written."""
        try:
            stored = list(self._store.list(self._run_id))
            self._stock = len(stored), sum(payload.size for payload in stored)
            now = self._clock()
            free = list(self._spent(stored, now))
            there = {payload.uri for payload in stored}
            self._kinds = {uri: kind for uri, kind in self._kinds.items() if uri in there}
            old = list(orphaned(stored, self._kinds, now))
            if not free and not old:
                self._fates.forget_all_but(stored)
                return 0
            self._catch_up()
            return self._delete(stored, free, old, now, stopping)
        except (StoreError, TransportError) as problem:
            self.failures += 1
            log.warning("payloads_not_collected", error=problem)
            return 0

    def numbers(self) -> Iterator[Number]:
        """What a scrape shows."""
        yield Number("hoofprint_payload_files", self._stock[0])
        yield Number("hoofprint_payload_bytes", self._stock[1])
        yield Number("hoofprint_payload_failures_total", self.failures)
        for why in ("dropped", "trained", "no_group", "unreferenced"):
            yield Number("hoofprint_payload_files_deleted_total", self.files[why], {"why": why})
            yield Number("hoofprint_payload_bytes_deleted_total", self.bytes[why], {"why": why})

    def _spent(self, stored: Iterable[StoredPayload], now: int) -> Iterator[StoredPayload]:
        return spent(stored, self._fates.fate, self._fates.covered_step, self._ages, now)

    def _delete(
        self,
        stored: list[StoredPayload],
        free: list[StoredPayload],
        old: list[StoredPayload],
        now: int,
        stopping: Callable[[], bool],
    ) -> int:
        """What was free before the archive caught up, and is free by what it says now."""
        asked = {payload.uri: payload for payload in (*free, *old)}
        self._kinds |= references(self._archive, old if self._looked_up else stored)
        self._looked_up = True
        kinds = self._kinds
        gone: set[str] = set()
        for payload in self._spent(free, now):
            if stopping():
                break
            kind = kinds.get(payload.uri)
            if kind is not None and self._remove(payload, kind, self._why(payload)):
                gone.add(payload.uri)
        for payload in orphaned(old, kinds, now):
            if not stopping() and self._remove(payload, "group", "unreferenced"):
                gone.add(payload.uri)
        for uri in gone:
            kinds.pop(uri, None)
        self._fates.forget_all_but([payload for payload in stored if payload.uri not in gone])
        if gone:
            log.info("payloads_deleted", files=len(gone), bytes=sum(asked[uri].size for uri in gone))
        return len(gone)

    def _remove(self, payload: StoredPayload, kind: Kind, why: str) -> bool:
        """First into the archive, then away: killed in between, the next pass finds it there."""
        try:
            if kind == "source":
                self._kept.keep(payload.uri, self._store.get(_ref(payload)))
            self._store.delete(payload.uri)
        except (CorruptPayload, StoreError) as problem:
            self.failures += 1
            log.warning("payload_not_collected", error=problem, uri=payload.uri)
            return False
        self.files[why] += 1
        self.bytes[why] += payload.size
        return True

    def _why(self, payload: StoredPayload) -> str:
        fate = self._fates.fate(payload)
        return "no_group" if fate is None else "trained" if isinstance(fate, int) else "dropped"


def references(archive: Archive, payloads: Iterable[StoredPayload]) -> Mapping[str, Kind]:
    """Which of these files an archived event names, and what they are."""
    listed = list(payloads)
    if not listed:
        return {}
    archive.refresh()
    connection = connect_log(archive, ("segments", "prompts", "control"))
    try:
        connection.register("asked", pa.table({"uri": [payload.uri for payload in listed]}))
        found: dict[str, Kind] = {}
        for table, column, kind in _NAMED_BY:
            rows = connection.execute(
                f"SELECT DISTINCT {column}.uri FROM log_{table} WHERE {column}.uri IN (SELECT uri FROM asked)"  # noqa: S608 — names of ours
            ).fetchall()
            found |= dict.fromkeys((uri for (uri,) in rows), kind)
        return found
    finally:
        connection.close()


def _ref(payload: StoredPayload) -> PayloadRef:
    return PayloadRef(payload.uri, PurePosixPath(payload.uri).name, payload.size, "")


def _archived(archive: Archive) -> Iterator[Event]:
    """What a restart has to know again, table by table in log order."""
    names = {TABLE_OF[TOPIC_OF[event_type].name] for event_type in READ}
    types = ", ".join(f"'{event_type.__name__}'" for event_type in READ)
    connection = connect_log(archive, names)
    try:
        for name in sorted(names):
            cursor = connection.execute(
                f"""SELECT raw FROM log_{name} WHERE event_type IN ({types}) ORDER BY "partition", kafka_offset"""  # noqa: S608
            )
            while rows := cursor.fetchmany(2000):
                yield from (decode(raw) for (raw,) in rows)
    finally:
        connection.close()
