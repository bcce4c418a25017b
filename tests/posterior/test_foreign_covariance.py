"""A covariance that is defined outside the package is saved, and loads where its class is registered."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.covariance import COVARIANCES, Covariance, LayerBlock, register_covariance
from lapwing.covariance.terms import FactoredTerm, Term
from lapwing.tangent import Record, Tangent, TensorSpec, Vectors
from tests.refused import refused
from tests.trained import small_network

X, Y = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 3


class SameEverywhere(Covariance):
    """`Σ = v I`."""

    full_rank = True

    def __init__(self, tangent: Tangent, variance: Tensor) -> None:
        self.blocks, self.variance = tangent.blocks, variance

    def mv(self, vectors: Vectors) -> Vectors:
        return {name: self.variance * vector for name, vector in vectors.items()}

    def sample(self, count: int, generator: torch.Generator) -> Vectors:
        noise = {block.name: torch.randn(count, block.size, generator=generator) for block in self.blocks}
        return {name: self.variance.sqrt() * values for name, values in noise.items()}

    def diagonal(self) -> Vectors:
        return {block.name: self.variance.expand(block.size) for block in self.blocks}

    def output_covariance(self, record: Record) -> tuple[Term, ...]:
        return (FactoredTerm(record.rows() * self.variance.sqrt()),)

    def joint_output_covariance(self, record: Record, other: Record) -> Tensor:
        return self.variance * torch.einsum("brp,csp->brcs", record.rows(), other.rows())

    def layer_block(self, name: str) -> LayerBlock:
        raise NotImplementedError

    def tensors(self) -> dict[str, Tensor]:
        return {"variance": self.variance}

    @classmethod
    def entries(cls, tangent: Tangent, extra: Any) -> dict[str, TensorSpec]:
        return {"variance": TensorSpec((), (torch.float32,))}

    @classmethod
    def from_tensors(cls, tangent: Tangent, tensors: dict[str, Tensor], extra: dict[str, Any]) -> SameEverywhere:
        return cls(tangent, tensors["variance"])


@pytest.fixture
def posterior() -> lw.Posterior:
    fitted = lw.fit(small_network(), [(X, Y)], lw.Diagonal(), prior_precision=1.0)
    return replace(fitted, covariance=SameEverywhere(fitted.tangent, torch.tensor(0.3)))


@pytest.fixture
def names() -> Iterator[None]:
    """Leaves the registry as it was."""
    with mock.patch.dict(COVARIANCES):
        yield


@pytest.mark.usefixtures("names")
def test_a_registered_class_is_saved_and_loaded(posterior: lw.Posterior, reloaded: Any) -> None:
    assert register_covariance(SameEverywhere) is SameEverywhere
    again = reloaded(posterior)
    assert type(again.covariance) is SameEverywhere
    assert again.prior_precision is None
    torch.testing.assert_close(again.latent(X).covariance, posterior.latent(X).covariance)
    torch.testing.assert_close(again.predict(X).probs, posterior.predict(X).probs)


@pytest.mark.usefixtures("names")
def test_a_class_that_is_not_registered(posterior: lw.Posterior, tmp_path: Path) -> None:
    refused(lambda: posterior.save(tmp_path / "p"), "not registered … @lapwing.covariance.register_covariance")
    assert not list(tmp_path.iterdir())
    register_covariance(SameEverywhere)
    posterior.save(tmp_path / "p")
    del COVARIANCES["SameEverywhere"]
    with pytest.raises(lw.LapwingError, match="class 'SameEverywhere', which is not registered. Import the module"):
        lw.load(tmp_path / "p", posterior.model)


@pytest.mark.usefixtures("names")
def test_a_name_belongs_to_one_class() -> None:
    register_covariance(SameEverywhere)
    register_covariance(SameEverywhere)  # as when a notebook runs a cell again
    for kind in (3, int):
        with pytest.raises(lw.LapwingError, match="register_covariance takes a class that extends Covariance"):
            register_covariance(kind)
    taken = type("Blockwise", (SameEverywhere,), {})
    refused(lambda: register_covariance(taken), "Blockwise belongs to a covariance of lapwing.covariance.blockwise")
    assert COVARIANCES["Blockwise"] is not taken


def test_kronecker_files_keep_factors_and_count(reloaded: Any) -> None:
    """`A = U diag(α) Uᵀ` is the sum over inputs itself, so that data can be added to it."""
    model = nn.Sequential(nn.Linear(4, 3)).double().eval()
    fitted = lw.fit(model, [(X.double(), Y)], lw.EKFAC(), prior_precision=1.0)
    factors = reloaded(fitted, model).covariance.structures["0"]
    inputs = torch.cat([X.double(), torch.ones(8, 1)], 1)
    basis = factors.inputs[0]
    torch.testing.assert_close(basis * factors.input_eigenvalues[0] @ basis.T, inputs.T @ inputs)
    assert factors.count.tolist() == [8]
    root = fitted.likelihood.fisher_root(model(X.double()).detach())
    torch.testing.assert_close(
        factors.outputs[0] * factors.output_eigenvalues[0] @ factors.outputs[0].T, (root @ root.mT).sum(0)
    )
