"""Collectives as torch dispatches them, whoever asked for them."""

from torch.utils._python_dispatch import TorchDispatchMode


class Collectives(TorchDispatchMode):
    """Records (name, elements) of every collective while `watching`."""

    def __init__(self):
        super().__init__()
        self.seen, self.watching = [], True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        if self.watching and name.startswith(("c10d.", "_c10d_functional.")):
            self.seen.append((name.split(".")[1], _elements(args)))
        return func(*args, **(kwargs or {}))


def _elements(args):
    first = args[0]
    while isinstance(first, (list, tuple)):
        first = first[0]
    return first.numel()
