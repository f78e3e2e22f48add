"""Requests survive the death of an engine that had not begun with them: they go to the one after it."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import ExitStack, aclosing
from typing import Protocol

from quantd.daemon.loaded_model import LoadedModel
from quantd.engine.errors import NotBegunError
from quantd.engine.request import Request, TokenEvent

_log = logging.getLogger(__name__)


class Loader(Protocol):
    """Has models in memory, as `quantd.daemon.models.Models`."""

    async def acquire(self, name: str | None) -> LoadedModel: ...


class Relay:
    """The source of tokens of one model, whichever engine it has.

    model: held by the caller. stay: what the requests ask for of the model (see KeepAlive).
    """

    def __init__(self, loader: Loader, model: LoadedModel, stay: float | None) -> None:
        self._loader = loader
        self._model = model
        self._stay = stay

    async def generate(self, request: Request) -> AsyncGenerator[TokenEvent, None]:
        """As Engine.generate. Raises also what keeps the model from being loaded again."""
        model = self._model
        while True:
            with ExitStack() as held:
                if model is not self._model:
                    held.callback(model.release, self._stay)
                try:
                    async with aclosing(model.engine.generate(request)) as events:
                        async for event in events:
                            yield event
                    return
                except NotBegunError as error:
                    _log.info("request %s waits for another engine: %s", request.id, error)
            model = await self._loader.acquire(self._model.name)
