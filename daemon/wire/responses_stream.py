"""The stream of OpenAI's Responses: an event for everything that becomes of a response and its items."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from quantd.daemon.deltas import Delta, Head, Usage
from quantd.daemon.sections import Section, Sections
from quantd.daemon.wire.responses import Reply, final_status
from quantd.daemon.wire.responses_output import Event, Status
from quantd.daemon.wire.stream import sse_comment, sse_frame


class ResponseStream:
    """The events of one response. keep: takes it in its last state, before the client does.

    Clients that wait for events count no comments, so signs of life are events too.
    """

    content_type: ClassVar[str] = "text/event-stream"

    def __init__(self, reply: Reply, keep: Callable[[dict[str, Any]], None]) -> None:
        self._reply = reply
        self._keep = keep
        self._sections = Sections()
        self._open: Section | None = None
        self._index = -1
        self._num_events = 0

    @property
    def id(self) -> str:
        """Of the response."""
        return self._reply.id

    def ping(self, why: str) -> bytes:
        comment = sse_comment(why) if why else b""
        return comment + (b"".join(self.begin()) or self._in_progress())

    def start(self, head: Head) -> Sequence[bytes]:
        self._reply.started(head)
        return self.begin()

    def delta(self, delta: Delta) -> Sequence[bytes]:
        frames: list[bytes] = []
        for section, part, begins, tokens in self._sections.feed(delta):
            if begins:
                frames += [*self._close("completed"), *self._begin_item(section)]
            if part:
                frames += self._tell([self._reply.forms[section.kind].delta(part, tokens)])
        return frames

    def finish(self, usage: Usage) -> Sequence[bytes]:
        closing = self._close(final_status(self._sections))
        return [*closing, self._end(self._reply.finished(self._sections, usage))]

    def error(self, error: Exception) -> Sequence[bytes]:
        return [*self.begin(), self._end(self._reply.failed(error, self._sections))]

    def begin(self) -> Sequence[bytes]:
        """The events before all others, once."""
        if self._num_events:
            return ()
        created = self._event("response.created", response=self._reply.in_progress())
        return [created, self._in_progress()]

    def _in_progress(self) -> bytes:
        return self._event("response.in_progress", response=self._reply.in_progress())

    def _end(self, response: dict[str, Any]) -> bytes:
        self._keep(response)
        return self._event(f"response.{response['status']}", response=response)

    def _begin_item(self, section: Section) -> Sequence[bytes]:
        self._open = section
        self._index += 1
        item = self._reply.item(self._index, section, None, "in_progress")
        added = self._event("response.output_item.added", output_index=self._index, item=item)
        return [added, *self._tell(self._reply.forms[section.kind].opening())]

    def _close(self, status: Status) -> Sequence[bytes]:
        """The events that end the item that is open, if one is."""
        section = self._open
        if section is None:
            return ()
        closing = self._tell(self._reply.forms[section.kind].closing(section))
        item = self._reply.item(self._index, section, section.text, status)
        self._open = None
        return [*closing, self._event("response.output_item.done", output_index=self._index, item=item)]

    def _tell(self, events: Sequence[Event]) -> Sequence[bytes]:
        """Events about the item that is open."""
        assert self._open is not None
        place = {"item_id": self._reply.item_id(self._index, self._open), "output_index": self._index}
        return [self._event(kind, **place, **fields) for kind, fields in events]

    def _event(self, kind: str, **fields: object) -> bytes:
        frame = sse_frame({"type": kind, "sequence_number": self._num_events} | fields, kind)
        self._num_events += 1
        return frame
