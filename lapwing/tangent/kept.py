"""What modules keep as attributes beside parameters and buffers: activations, weights made by hooks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

STANDARD = frozenset(vars(nn.Module()))
"""What every module has."""


class Kept:
    """Cuts what a network keeps of the forward passes within a block from their graphs.

    Left as it is, it would hold the memory of a whole pass, and `copy.deepcopy` of the network would fail. What had a
    graph before the first pass keeps it.

    Args:
        model: the network.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before: list[Tensor] = []
        self._places: list[tuple[nn.Module, str]] | None = None

    def __enter__(self) -> None:
        if self._places is None:
            self._before = [leaf for _, _, leaves in self._with_graphs() for leaf in leaves]

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        places = self._places
        if places is None:
            known = {id(leaf) for leaf in self._before}
            found = self._with_graphs()
            places = [(module, name) for module, name, leaves in found if not known.issuperset(map(id, leaves))]
            self._before, self._places = [], None if kind else places  # all are seen in a whole pass
        for module, name in places:
            vars(module)[name] = tree_map_only(Tensor, Tensor.detach, vars(module)[name])

    def _with_graphs(self) -> Iterator[tuple[nn.Module, str, list[Tensor]]]:
        """Yields modules, their attributes and the tensors in these that have a graph."""
        for module in self._model.modules():
            for name, value in vars(module).items():
                leaves = [] if name in STANDARD else tree_leaves(value)
                found = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.grad_fn is not None]
                if found:
                    yield module, name, found


@contextlib.contextmanager
def attributes_kept(model: nn.Module) -> Iterator[None]:
    """Puts back what modules hold as attributes, activations and lists of recurrent weights among them."""
    kept = [
        (vars(module), {name: value for name, value in vars(module).items() if name not in STANDARD})
        for module in model.modules()
    ]
    try:
        yield
    finally:
        for own, found in kept:
            own.update(found)
