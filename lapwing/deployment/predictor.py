"""The deployed network: a module from inputs to predictions, and its export to ONNX."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import Dim

from ..data import batches
from ..errors import LapwingError, extra
from ..files import check_writable, replacing
from ..prediction import Way
from ..prediction.streamlined.graph import quiet
from .export import Traced

aten = torch.ops.aten


class Predictor(nn.Module):
    """A network with its error bars: inputs to predictions, in plain calls on tensors. `lw.deploy` makes it.

    Its buffers are copies of all weights, so it does not need the posterior or the network. It can be compiled,
    exported, moved and saved like any module, but its dtypes are fixed. It does not check for NaN.
    """

    via: Way | None = None  # the way of its numbers; None in a file of an older version
    df: float | None = None  # degrees of freedom of Student t noise; None for normal noise and without y

    def __init__(
        self, traced: Traced, names: tuple[str, ...], keys: bool, returns: tuple[str, ...], via: Way, df: float | None
    ) -> None:
        super().__init__()
        self.via, self.df = via, df
        self.calls, example, self._free = traced
        self.names, self.keys, self.returns = names, keys, returns  # () and False if the input is a tensor
        leaves = example.tensors
        self._dtypes = tuple(leaf.dtype for leaf in leaves)
        self._fixed = tuple(
            tuple(None if dim in lengths else length for dim, length in enumerate(leaf.shape))
            for leaf, lengths in zip(leaves, self._free, strict=True)
        )
        self.eval()

    def forward(self, x: Any) -> Any:
        """Returns the tensors that `returns` names, at inputs like the example of `lw.deploy`.

        These are probabilities (B, C), or means and variances (B, C) and for Student t noise its `df` ().

        Raises:
            LapwingError: for inputs of another structure, dtype or shape (not in compiled or exported code).
        """
        if not torch.compiler.is_compiling():
            self._check(x)
        return self.calls(*self._leaves(x))

    def _leaves(self, x: Any) -> tuple[Tensor, ...]:
        """Returns the tensors of inputs, in the order of the calls."""
        if self.keys:
            return tuple(x[name] for name in self.names)
        return tuple(x) if self.names else (x,)

    def _check(self, x: Any) -> None:
        if self.keys:
            fits = hasattr(x, "keys") and all(name in x for name in self.names)
        else:
            fits = isinstance(x, (tuple, list)) if self.names else isinstance(x, Tensor)
        leaves = batches.tensors(self._leaves(x)) if fits else []
        wrong = len(leaves) != len(self._fixed)
        for leaf, dtype, shape in zip(leaves, self._dtypes, self._fixed, strict=False):
            wrong = wrong or leaf.dtype != dtype or leaf.ndim != len(shape) or not leaf.shape[0]
            wrong = wrong or any(n is not None and n != m for n, m in zip(shape, leaf.shape, strict=False))
        if wrong:
            raise LapwingError(
                f"{batches.describe(x)} has another form than the inputs {self._accepted()} that the network was "
                "deployed with. Pass such inputs, or write lw.deploy(posterior, x) with inputs like these."
            )

    def _accepted(self) -> str:
        parts = []
        for dtype, shape, free in zip(self._dtypes, self._fixed, self._free, strict=True):
            lengths = ", ".join(free[dim] if n is None else str(n) for dim, n in enumerate(shape))
            parts.append(f"Tensor ({lengths}) {str(dtype).removeprefix('torch.')}")
        if not self.names:
            return parts[0]
        if self.keys:
            return "dict(" + ", ".join(f"{name}={part}" for name, part in zip(self.names, parts, strict=True)) + ")"
        return "tuple(" + ", ".join(parts) + ")"

    @property
    def dynamic_shapes(self) -> Any:
        """The `dynamic_shapes` for `torch.export.export(predictor, (x,), ...)`, with free batches and lengths."""
        shapes = [{dim: Dim.AUTO for dim in free} for free in self._free]
        if not self.names:
            return (shapes[0],)
        return (dict(zip(self.names, shapes, strict=True)) if self.keys else tuple(shapes),)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Predictor:
        """Moves the buffers, and the calls that create tensors on a device. Refuses other dtypes."""
        for dtype in {buffer.dtype for buffer in self.buffers()}:
            wanted = fn(torch.empty(0, dtype=dtype)).dtype
            if wanted != dtype:
                raise LapwingError(
                    f"A deployed network stays in {dtype}, and cannot be turned into {wanted}. Write lw.deploy(...) "
                    f"for a posterior of the network in {wanted}."
                )
        super()._apply(fn, recurse)
        device = next((buffer.device for buffer in self.buffers()), None)
        if device is not None:
            for node in self.calls.graph.nodes:
                node.args, node.kwargs = fx.node.map_aggregate(
                    (node.args, node.kwargs), lambda leaf: device if isinstance(leaf, torch.device) else leaf
                )
            self.calls.recompile()
        return self

    def to_onnx(self, path: str | os.PathLike[str], x: Any) -> Path:
        """Writes the network as an ONNX file that onnxruntime runs, with free batches and lengths.

        Inputs are named "x", or as the entries of a dict; outputs are named as in `predictor.returns`: "probabilities",
        or "mean", "variance" and for Student t noise "df". It takes a few seconds for a few hundred calls.

        Args:
            path: path of the file, which is returned; weights above 2 GB go into a second file next to it.
            x: example inputs.

        Raises:
            LapwingError: if onnx or onnxscript is not installed, if the file cannot be written, if ONNX lacks a call,
                or for inputs of another form.
        """
        check_writable(path)
        extra("onnx")
        extra("onnxscript")
        self._check(x)
        leaves = tuple(  # the exporter fixes a length of one
            leaf.expand(2, *leaf.shape[1:]).clone() if 0 in free and len(leaf) == 1 else leaf
            for leaf, free in zip(self._leaves(x), self._free, strict=True)
        )
        shapes: Any = tuple(free or None for free in self._free)
        calls: Any = _Plain(self.calls).transform()
        try:
            with quiet():
                if torch.__version__ < "2.7":  # its ONNX exporter treats named lengths as fixed
                    free = tuple({dim: Dim.AUTO for dim in names} for names in self._free)
                    calls = torch.export.export(calls, leaves, dynamic_shapes=free, strict=False)
                    shapes = None
                program = torch.onnx.export(
                    calls, leaves, dynamic_shapes=shapes,
                    input_names=list(self.names) or ["x"], dynamo=True, verbose=False,
                )  # fmt: skip
        except torch.onnx.OnnxExporterError as error:
            reason = str(error.__cause__ or error).strip().splitlines()[0]
            raise LapwingError(
                f"torch.onnx cannot write this network: {reason}. Write "
                "torch.export.export(predictor, (x,), dynamic_shapes=predictor.dynamic_shapes) instead."
            ) from error
        assert program is not None
        graph: Any = program.model.graph
        for node in graph:
            for value in node.outputs:
                if value.name in self.returns:  # the names belong to the outputs
                    value.name = f"{value.name}_of_{node.name}"
        for value, name in zip(graph.outputs, self.returns, strict=True):
            value.name = name
        with replacing(path) as new:
            program.save(new)
        return Path(path)


class _Plain(fx.Transformer):
    """Replaces functions that ONNX lacks, or onnxruntime lacks in double precision."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target in (aten.sinh.default, aten.cosh.default):
            grown, sign = args[0].exp(), 1 if target is aten.cosh.default else -1
            return 0.5 * (grown + sign / grown)
        if target is aten.asinh.default:
            size = args[0].abs()
            return args[0].sign() * (size + (size * size + 1).sqrt()).log()
        if target is aten.addcmul.default:  # torch 2.6 cannot decompose it for a free batch
            return args[0] + kwargs.get("value", 1) * args[1] * args[2]
        if target is aten.searchsorted.Tensor:  # of NaN the number of all entries
            return (args[0] >= args[1][:, None]).logical_not().sum(1)
        if target is aten.silu_backward.default:
            gate = args[1].sigmoid()
            return args[0] * gate * (1 + args[1] * (1 - gate))
        if target is aten.mish_backward.default:
            bend = torch.nn.functional.softplus(args[1]).tanh()
            return args[0] * (bend + args[1] * args[1].sigmoid() * (1 - bend * bend))
        return super().call_function(target, args, kwargs)
