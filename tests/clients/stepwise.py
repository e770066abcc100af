"""Small tensors whose changes are counted, and a follower in step with a test."""

import torch

from deltabus import Subscriber

from .support import LIMIT


def patterns(tensor):
    """A tensor's bits as integers."""
    return tensor.detach().view(torch.int16).numpy().copy()


class Follower:
    """Follows a topic version by version, in step with a test."""

    def __init__(self, url, model, **options):
        self._updates = Subscriber(url, latest=False, idle_timeout=LIMIT, **options).sync()
        self.model = model

    def __enter__(self):
        return self

    def __exit__(self, *raised):
        self._updates.close()

    def follow_to(self, step):
        for update in self._updates:
            update.apply(self.model)
            if update.step == step:
                return update
        raise AssertionError("the topic ended")


def nudge(tensor, *, places, ulp=1):
    """Move the first elements of a bfloat16 tensor away from zero by so many representable values."""
    with torch.no_grad():
        flat = tensor.view(torch.int16).view(-1)
        flat[:places] += ulp


def one_tensor(size=1000):
    return {"w": torch.full((size,), 0.5, dtype=torch.bfloat16)}


def bits_of(tensors):
    return {name: patterns(tensor).tobytes() for name, tensor in tensors.items()}
