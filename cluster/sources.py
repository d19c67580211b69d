"""Sources from outside, opened: as a trace in memory for the commands, or chunk by chunk for `moetis import`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from cluster.terminal import LOG
from cluster.torch_files import forget_pages, read_pt
from placement.counts import Counts
from placement.errors import ConfigError, TraceError
from placement.interchange.assemble import assemble, gather, without_homes
from placement.interchange.counts_files import file_counts
from placement.interchange.detect import Form, Source, find_source
from placement.interchange.megatron import router_pieces
from placement.interchange.own import npz_pieces, segment_pieces
from placement.interchange.pieces import Hints, Notes, Piece
from placement.interchange.sglang import Dump, dump_counts, dump_kind, token_pieces
from placement.interchange.tensorrt import statistics_counts
from placement.interchange.vllm import array_pieces, response_pieces
from placement.planfile import Plan
from placement.trace import RoutingTrace

MOST_BYTES = 1 << 29
OWN = (Form.SEGMENTS, Form.NPZ)
Item = TypeVar("Item")


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A source that was looked at: counts, or pieces to assemble. notes fill while it is read."""

    source: Source
    hints: Hints
    notes: Notes
    counts: Counts | None

    def chunks(self) -> Iterator[RoutingTrace]:
        """The tokens, checked. Raises TraceError as `assemble`; shows how far it is on stderr."""
        with readable(str(self.source.path)):
            num_bytes = self.source.num_bytes
        pieces = with_progress(_pieces(self.source, self.hints, self.notes), self.notes, num_bytes)
        return assemble(pieces, self.hints, self.notes, model=self.source.path.stem)


def open_source(text: str, hints: Hints) -> Opened:
    """Find out what a source is; counts are read at once. Raises TraceError and ConfigError."""
    if hints.form is not None and hints.form not in list(Form):
        raise ConfigError(f"--format '{hints.form}': is one of {', '.join(Form)}")
    with readable(text):
        source = find_source(text, hints)
        notes = Notes(form=str(source.form), num_files=len(source.files))
        return Opened(source=source, hints=hints, notes=notes, counts=_counts(source, hints, notes))


def hints_of(plan: Plan, counts_key: str | None = None) -> Hints:
    """What a plan says of a source that it is to be judged on, where the source does not say so itself."""
    made = plan.placement
    return Hints(num_experts=made.num_experts, num_ranks=made.num_ranks, counts_key=counts_key)


@contextmanager
def readable(text: str) -> Iterator[None]:
    """Raises TraceError, naming the file, where the system refuses to read."""
    try:
        yield
    except OSError as error:
        raise TraceError(f"{error.filename or text}: cannot be read: {error.strerror or error}") from error


def read_source(text: str, hints: Hints | None = None) -> RoutingTrace | Counts:
    """A source for a command that plans or judges: a trace of 0.5 GB at most (requests sampled above that), or counts.

    What was dropped or assumed goes to stderr. Raises TraceError and ConfigError.
    """
    opened = open_source(text, hints or Hints())
    if opened.counts is not None:
        trace: RoutingTrace | Counts = opened.counts
    else:
        trace = _with_known_homes(gather(opened.chunks(), opened.notes, MOST_BYTES), opened)
    tell(opened)
    return trace


def _with_known_homes(trace: RoutingTrace, opened: Opened) -> RoutingTrace:
    """Foreign homes are dropped where one rank alone has tokens, or where the plan is for fewer ranks."""
    notes, ranks = opened.notes, opened.hints.num_ranks
    if opened.source.form in OWN or notes.highest_rank < 0:
        return trace
    if ranks is not None and notes.highest_rank >= ranks:
        notes.assume(
            f"homes are unknown: recorded on {notes.highest_rank + 1} ranks or more, and {ranks} are planned for"
        )
        return without_homes(trace)
    return without_homes(trace) if notes.lone_rank else trace


def read_trace(text: str, hints: Hints | None = None) -> RoutingTrace:
    """As `read_source`, for a command that needs tokens. Raises TraceError where the source has counts alone."""
    trace = read_source(text, hints)
    if isinstance(trace, Counts):
        raise TraceError(
            f"trace '{text}': has counts alone, no tokens; `moetis plan` and `moetis evaluate` take counts, "
            f"this command needs to know which experts are used together"
        )
    return trace


def tell(opened: Opened) -> None:
    """Say on stderr what a person should know of a foreign source; of our own, only what was dropped or assumed."""
    lines = opened.notes.sentences()
    if opened.source.form in OWN:
        lines = [line for line in lines if not line.startswith("not in this source")]
    for line in lines:
        LOG.print(line, markup=False, soft_wrap=True)


def _counts(source: Source, hints: Hints, notes: Notes) -> Counts | None:
    if source.form is Form.COUNTS:
        return file_counts(source.files[0], hints.counts_key, notes)
    if source.form is Form.TENSORRT:
        counts = statistics_counts(source.path, notes)
    elif source.form is Form.SGLANG and _first_dump(source) is not Dump.PER_TOKEN:
        counts = dump_counts(source.files, read_pt, notes)
    else:
        return None
    notes.lack("tokens: which experts are used together, and by which requests")
    return counts


def _first_dump(source: Source) -> Dump:
    """What the first dump with records holds."""
    for path in source.files:
        dump = read_pt(path)
        kind = dump_kind(dump, path)
        if kind is Dump.STAT or dump["records"]:
            return kind
    raise TraceError(f"{source.files[0]}: has no records, and no other file of '{source.path}' has any")


def _pieces(source: Source, hints: Hints, notes: Notes) -> Iterator[Piece]:
    if source.form is Form.NPZ:
        return npz_pieces(source.files[0], notes)
    if source.form is Form.SEGMENTS:
        return segment_pieces(source.files, notes)
    if source.form is Form.ARRAYS:
        return array_pieces(source.files, notes)
    if source.form is Form.RESPONSES:
        return response_pieces(source.files, hints, notes)
    if source.form is Form.MEGATRON:
        return router_pieces(source.files, notes)
    assert source.form is Form.SGLANG
    return token_pieces(source.files, read_pt, notes, forget_pages)


def with_progress(items: Iterator[Item], notes: Notes, num_bytes: int) -> Iterator[Item]:
    """The same items; a bar of the bytes read beside them, where stderr is a terminal."""
    columns = (TextColumn("reading"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=LOG, transient=True, disable=not LOG.is_terminal) as progress:
        task = progress.add_task("reading", total=num_bytes)
        while True:
            with readable("the source"):
                item = next(items, None)
            if item is None:
                return
            progress.update(task, completed=notes.bytes_read)
            yield item
