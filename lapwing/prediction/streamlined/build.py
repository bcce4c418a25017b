"""Building a program: what is treated, which calls carry moments, and what is refused before any input is seen."""

from __future__ import annotations

import logging
from collections.abc import Container, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from ...covariance import Covariance
from ...errors import LapwingError
from ...tangent import Block, Tangent
from . import rules  # noqa: F401 (fills the table)
from .axes import read_axes, read_layouts
from .graph import Graph
from .operations import Kind, has_forward_mode, is_a, named, operation_of
from .program import Program
from .schedule import Schedule, schedule
from .sites import Site, Treated, refusal

if TYPE_CHECKING:
    from . import Streamlined

log = logging.getLogger("lapwing")


def build(
    tangent: Tangent, covariance: Covariance, graph: Graph, way: Streamlined, example: Any, uncertain: tuple[int, ...]
) -> Program:
    """Builds the program of a network.

    Args:
        tangent: the network and its treated blocks.
        covariance: Σ.
        graph: the network's calls.
        way: the options.
        example: inputs that the graph is for.
        uncertain: places of uncertain inputs among the leaves.

    Raises:
        LapwingError: a treated parameter that is used twice, or none that reaches the outputs; samples that cannot be
            told apart where that is needed.
    """
    dtype, network = covariance.record_dtype or tangent.dtype, type(tangent.model).__name__
    full, correlated = way.covariance == "full", way.positions == "correlated"
    treated = _treated(tangent, covariance, graph, dtype)
    inputs = frozenset(name for place in uncertain if (name := graph.leaves[place]) is not None)
    steps = schedule(graph, frozenset(treated), inputs, way.attention)
    _check_uses(network, steps, treated)
    _check_forward_mode(network, steps, treated, way)
    calls = [step.node for step in steps.steps if step.uncertain and step.fused is None]
    ruleless = any(operation_of(node).rule is None for node in calls)
    axes = read_axes(graph, example, network) if not full and (way.tracks_branches or ruleless) else None
    of_values = not full and way.attention in ("tokens", "features")
    if of_values and not any(is_a(node, Kind.ATTENTION) for node in graph.nodes):
        _note_hand_written(graph, network, way.attention)
    layouts = read_layouts(steps, graph, example, network) if of_values or (correlated and not full) else {}
    sites = {node.name: Site.of(node, treated, way.attention, network, layouts, correlated) for node in calls}
    return Program(graph, steps, sites, treated, dtype, network, way, axes, layouts if correlated else {})


def _check_forward_mode(network: str, steps: Schedule, treated: Container[str], way: Streamlined) -> None:
    """Refuses operators from outside torch where no entry of the table gives their derivative."""
    for step in steps.steps:
        if not step.uncertain:
            continue
        closed = operation_of(step.node).rule is not None if step.fused is None else step.fused.closed
        for node in (step.node,) if step.fused is None else step.fused.body:
            if not has_forward_mode(node) and (way.tracks_branches or not closed):
                problem = "it is an operator from outside torch, through which forward mode does not pass"
                entry = "a slope or a rule"
                arguments = named(node, node.args, node.kwargs).items()
                weights = [name for name, a in arguments if isinstance(a, fx.Node) and a.name in treated]
                if weights and not closed:
                    problem += f", and its argument {weights[0]} is uncertain"
                    entry = "a rule"
                raise refusal(
                    network,
                    node,
                    problem,
                    f"Register {entry} for it (lapwing.prediction.streamlined.register_operation), and pass "
                    "lw.Streamlined() without full mode or correlated branches.",
                )


def _note_hand_written(graph: Graph, network: str, attention: str) -> None:
    if "attention" not in graph.notices:
        graph.notices.add("attention")
        log.warning(
            "%s calls no scaled_dot_product_attention: Streamlined(attention=%r) is the same as 'values' there, also "
            "for attention written by hand, and for nn.MultiheadAttention that is asked for its weights.",
            network, attention,
        )  # fmt: skip


def _treated(
    tangent: Tangent, covariance: Covariance, graph: Graph, dtype: torch.dtype
) -> dict[str, tuple[Treated, str]]:
    """Returns the placeholders of treated parameters; a tied one is known by its tensor, not by its name."""
    diagonal = covariance.diagonal()
    owners: dict[int, tuple[Block, str]] = {
        id(tangent.parameters[name]): (block, name) for block in covariance.blocks for name in block.parameters
    }
    blocks: dict[str, Treated] = {}
    treated = {}
    for placeholder in graph.parameters:
        owner = owners.get(id(graph.tensors[placeholder]))
        if owner is not None:
            block, name = owner
            if block.name not in blocks:
                blocks[block.name] = Treated.of(block, covariance, diagonal, dtype)
            treated[placeholder] = blocks[block.name], name
    return treated


def _check_uses(network: str, steps: Schedule, treated: Mapping[str, tuple[Treated, str]]) -> None:
    """Refuses parameters that several calls share: their outputs are correlated, which variances cannot hold."""
    uses: dict[str, list[fx.Node]] = {}
    for placeholder, (_, name) in treated.items():
        uses.setdefault(name, []).extend(steps.users.get(placeholder, ()))
    for name, nodes in uses.items():
        carrying = [node for node in nodes if node.name in steps.uncertain]
        if len(carrying) > 1:
            raise LapwingError(
                f"{len(carrying)} calls of {network} share the treated parameter {name}, so that their outputs are not "
                "independent, as streamlined prediction takes them. Treat other parameters with "
                "params=lw.matching(...). Or predict with via=lw.Linearized()."
            )
    if steps.output not in steps.uncertain:
        raise LapwingError(
            f"No treated parameter of {network} reaches its outputs by what streamlined prediction carries. Treat "
            "values, or layers after an attention. Or predict with via=lw.Linearized()."
        )
