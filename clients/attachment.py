"""Publishing by itself, after an optimizer's steps."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from deltabus.bus.errors import UsageError

from .publication import Publication

__all__ = ["Attachment"]


class Attachment:
    """Publishes a model after every so many steps of an optimizer, until it is removed.

    `Publisher.attach` makes it.

    Attributes:
        step: Steps done, those before the attachment included.
        publication: The newest publication; None before the first.

    Raises:
        UsageError: If `every` is not positive, or a number is not whole.
    """

    def __init__(
        self,
        publish: Callable[[int, nn.Module | Mapping[str, Tensor]], Publication],
        optimizer: Optimizer,
        model: nn.Module | Mapping[str, Tensor],
        *,
        every: int,
        start: int,
    ) -> None:
        try:
            every, self.step = operator.index(every), operator.index(start)
        except TypeError as error:
            raise UsageError(f"every={every!r} and start={start!r} must be whole numbers") from error
        if every < 1:
            raise UsageError(f"every={every} is not positive; every=1 publishes each step")
        self.publication: Publication | None = None
        self._publish, self._model, self._every = publish, model, every
        self._handle = optimizer.register_step_post_hook(self._stepped)

    def __repr__(self) -> str:
        return f"<Attachment, every {self._every} steps, {self.step} done>"

    def remove(self) -> None:
        """Publish no more; may be called again."""
        self._handle.remove()

    def _stepped(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.step += 1
        if self.step % self._every == 0:
            self.publication = self._publish(self.step, self._model)
