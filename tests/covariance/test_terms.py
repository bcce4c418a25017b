"""Terms of a covariance and latents: each method against the dense matrix."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import lapwing as lw
from lapwing.covariance import AnyLatent, JointLatent, Latent, LatentDraws, LinearDraws, SelectedLatent
from lapwing.covariance.latent_at_positions import LatentAtPositions
from lapwing.covariance.terms import (
    DenseTerm,
    EigenTerm,
    FactoredTerm,
    MarginalTerm,
    ReflectedSum,
    ScaleTerm,
    Summand,
    Term,
    add_term,
    multiplied_out,
    turned_back,
)
from lapwing.covariance.terms import concatenate as join_terms
from lapwing.jacobian.jacobian import reflect_
from lapwing.network.positions import Places
from tests.refused import refused

F64 = torch.float64


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)), dtype=F64)


def close(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


TERMS = {
    "factored": FactoredTerm(normal(4, 3, 2)),
    "factored and scaled": FactoredTerm(normal(4, 3, 5), normal(4, 5).abs()),
    "eigen": EigenTerm(torch.linalg.qr(normal(3, 3))[0], normal(4, 3).abs()),
    "diagonal": EigenTerm(None, normal(4, 3).abs()),
    "stretched": EigenTerm(torch.linalg.qr(normal(3, 3))[0], normal(4, 3).abs()).stretched(normal(4, 3)),
    "dense": DenseTerm(normal(4, 3, 3) @ normal(4, 3, 3).mT),
    "multiplied out": FactoredTerm(normal(4, 3, 5), normal(4, 5).abs()).multiplied_out(),
    "one output": FactoredTerm(normal(1, 1, 2)),
}


@pytest.mark.parametrize("term", TERMS.values(), ids=TERMS)
class TestTerms:
    def test_variances(self, term: Term) -> None:
        classes = term.dense().shape[-1]
        centring = torch.eye(classes, dtype=F64) - 1 / classes
        variance, centred = (m.diagonal(dim1=1, dim2=2) for m in (term.dense(), centring @ term.dense() @ centring))
        close(term.variance(), variance)
        close(term.centred_variance(), centred)
        close(term.marginals().variance(), variance)
        close(term.marginals().centred_variance(), centred)

    def test_scaled(self, term: Term) -> None:
        close(term.scaled(0.3).dense(), 0.3 * term.dense())
        close(term.marginals().scaled(0.3).variance(), 0.3 * term.variance())
        close(term.scaled(0.0).dense(), torch.zeros_like(term.dense()))

    def test_stretched(self, term: Term) -> None:
        factors = normal(*term.dense().shape[:2])
        close(term.stretched(factors).dense(), factors[:, :, None] * term.dense() * factors[:, None])
        close(term.stretched(factors[0]).variance(), factors[0].square() * term.variance())

    def test_products_and_parts(self, term: Term) -> None:
        vectors, chosen = normal(len(term.dense()), 2, term.dense().shape[-1]), torch.zeros(len(term.dense()), 1).long()
        close(term.times(vectors), vectors @ term.dense())
        close(term.selected(chosen).dense(), term.dense()[:, :1, :1])

    def test_rows(self, term: Term) -> None:
        close(term.with_rows(*(rows[:1] for rows in term.rows)).dense(), term.dense()[:1])
        assert term.with_rows(*term.rows).layout == term.layout
        assert term.to(torch.zeros(0, dtype=torch.float32)).dense().dtype == torch.float32
        assert term.to(torch.zeros(0, dtype=F64)) is term


def test_matrices_are_added_up_at_the_end() -> None:
    dense, factored = TERMS["dense"], TERMS["factored"]
    terms: tuple[Term, ...] = ()
    for term in (dense, factored, dense, factored):
        terms = add_term(terms, term)
    assert [type(term) for term in terms] == [FactoredTerm, FactoredTerm, DenseTerm]
    close(terms[-1].dense(), 2 * dense.dense())


def test_reflected_matrices_are_added_up_and_turned_back_once() -> None:
    """Rows of J with a common part of 1e4 would leave no digit of the centred variances of a plain float32 matrix."""
    rows = [(normal(4, 3, 5) + 1e4).float(), normal(4, 3, 5).float()]
    turned = [reflect_(one.clone(), 1) for one in rows]
    terms: tuple[Summand, ...] = ()
    for one in (ReflectedSum(turned[0] @ turned[0].mT), TERMS["eigen"], ReflectedSum(turned[1] @ turned[1].mT)):
        terms = add_term(terms, one)
    eigen, dense = turned_back(terms)
    wide = [one.double() for one in rows]
    wanted = sum(one @ one.mT for one in wide)
    centred = [one - one.mean(1, keepdim=True) for one in wide]
    torch.testing.assert_close(dense.dense().double(), wanted, rtol=1e-5, atol=0)
    variances = sum(one.square().sum(-1) for one in centred)
    torch.testing.assert_close(dense.centred_variance().double(), variances, rtol=0.01, atol=0.01)
    assert eigen is TERMS["eigen"]


def test_factors_are_multiplied_out_if_they_are_wider_than_the_matrix() -> None:
    wide, narrow, eigen = TERMS["factored and scaled"], TERMS["factored"], TERMS["eigen"]
    assert multiplied_out((narrow, eigen)) == (narrow, eigen)
    for terms in ((narrow, narrow), (wide,), (wide, eigen, TERMS["dense"])):
        found = multiplied_out(terms)
        assert not any(isinstance(term, FactoredTerm) for term in found)
        assert sum(rows[0].numel() for term in found for rows in term.rows) <= 3 * 3 + 3 + 3
        whole, latent = Latent(normal(4, 3), terms), Latent(normal(4, 3), found)
        close(latent.covariance, whole.covariance)
        close(latent.centred_variance, whole.centred_variance)


@pytest.mark.parametrize("term", ["multiplied out", "selected", "stretched", "joined"])
def test_centred_variances_keep_their_digits_if_all_outputs_move_together(term: str) -> None:
    """In float32 a matrix with entries of 1e6 has an error of .1 in each, and centred variances here are about 1."""
    factor = torch.cat([1e3 * torch.ones(4, 3, 1, dtype=F64), normal(4, 3, 4)], -1)
    expected = FactoredTerm(factor).centred_variance()
    single = factor.float()
    if term in ("selected", "stretched"):
        basis, scale = torch.linalg.qr(torch.cat([torch.ones(3, 1, dtype=F64), normal(3, 2)], 1))[0], torch.rand(4, 3)
        scale[:, 0] = 1e6
        factor = 0.7 if term == "stretched" else 1.0
        expected = EigenTerm(basis, scale.double()).centred_variance() * factor**2
        every = EigenTerm(basis.float(), scale)
        every = every.stretched(torch.full((4, 1), factor)) if term == "stretched" else every
        found = every.selected(torch.arange(3).expand(4, -1))
        torch.testing.assert_close(every.centred_variance().double(), expected, rtol=1e-3, atol=1e-6)
    elif term == "joined":
        (found,) = join_terms([(FactoredTerm(single[:2]),), (FactoredTerm(single[2:]).multiplied_out(),)])
    else:
        found = multiplied_out((FactoredTerm(single),))[0].scaled(1.0)
    assert isinstance(found, DenseTerm)
    torch.testing.assert_close(found.centred_variance().double(), expected, rtol=1e-3, atol=1e-6)
    latent = Latent(normal(4, 3), (found,)).compact(True)
    torch.testing.assert_close(latent.centred_variance, expected, rtol=1e-3, atol=1e-6)


def test_marginals_have_no_covariance() -> None:
    latent = Latent(normal(4, 3), (MarginalTerm(normal(4, 3), normal(4, 3)),))
    assert (latent.variance >= 0).all()  # rounding below zero is cut off
    for read in (lambda: latent.covariance, lambda: latent.sample(2)):
        refused(read, "has only variances. Use a link in closed form")


def test_scales_are_all_that_the_default_probit_link_reads() -> None:
    mean, term = normal(4, 3), TERMS["factored"]
    scale = ScaleTerm(term.centred_variance().mean(-1, keepdim=True).expand(4, 3))
    latent, own = Latent(mean, (scale,)), Latent(mean, (term,))
    for factor in (1.0, 0.3):
        close(lw.Probit().log_probs(latent.scaled(factor)), lw.Probit().log_probs(own.scaled(factor)))
    for read in (lambda: latent.variance, lambda: latent.covariance):
        refused(read, "one mean variance for each input. Use")


def test_latents_are_scaled_and_widened_alike() -> None:
    terms, added = (TERMS["factored"], TERMS["eigen"]), TERMS["dense"].dense()
    latent = Latent(normal(4, 3), terms)
    blocks = torch.einsum("bcd,be->bced", latent.covariance, torch.eye(4, dtype=F64))
    joint = JointLatent(latent.mean, blocks)
    for one in (latent, joint):
        moved = one.plus(added).scaled(0.5)
        close(moved.variance, 0.5 * (latent.covariance + added).diagonal(dim1=1, dim2=2))
    draws = LatentDraws(normal(6, 4, 3), joint=True)
    close(draws.scaled(4.0).covariance, 4 * draws.covariance)
    close(draws.scaled(4.0).mean, draws.mean)
    for one in (latent, joint, draws):
        close(one.compact(True).covariance, one.covariance)
    close(latent.compact(False).centred_variance, latent.centred_variance)


LATENTS = {
    "factors": Latent(normal(4, 3), (TERMS["factored"], TERMS["eigen"])),
    "joint": JointLatent(normal(4, 3), (normal(12, 12) @ normal(12, 12).T).view(4, 3, 4, 3)),
    "draws": LatentDraws(normal(6, 4, 3)),
    "linear draws": LinearDraws(normal(4, 3), normal(6, 4, 3)),
}


@pytest.mark.parametrize("latent", LATENTS.values(), ids=LATENTS)
def test_every_latent_is_its_mean_and_covariance(latent: AnyLatent) -> None:
    vectors, matrix, shift = normal(4, 5, 3), normal(3, 3), normal(3)
    own, centre = latent.own_covariance, torch.eye(3, dtype=F64) - 1 / 3
    close(latent.variance, own.diagonal(dim1=1, dim2=2))
    close(latent.centred_variance, (centre @ own @ centre).diagonal(dim1=1, dim2=2))
    close(latent.covariance_times(vectors), vectors @ own)
    cooler, mapped = latent.tempered(4.0), latent.mapped(matrix, shift)
    close(cooler.mean, latent.mean / 4)
    close(cooler.covariance, latent.covariance)
    close(mapped.mean, latent.mean @ matrix.T + shift)
    close(mapped.own_covariance, matrix @ own @ matrix.T)


def test_draws_of_a_wide_factor_cost_one_column_for_each_output(monkeypatch):
    """KFAC over all weights of a wide network has thousands of columns for an output."""
    generator = torch.Generator().manual_seed(0)
    factor = torch.randn(2, 3, 1000, generator=generator).double()
    drawn, plain = [], FactoredTerm.sample

    def sample(term, count, generator):
        drawn.append(term.factor.shape[-1])
        return plain(term, count, generator)

    monkeypatch.setattr(FactoredTerm, "sample", sample)
    draws = Latent(torch.zeros(2, 3).double(), (FactoredTerm(factor),)).sample(50_000, generator)
    assert drawn == [3]
    wanted = factor @ factor.mT
    found = torch.einsum("sbi,sbj->bij", draws, draws) / len(draws)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0.03 * float(wanted.amax()))


def test_samples_of_linear_draws_have_their_mean_and_covariance() -> None:
    mean, deviations = 5 + normal(4, 3), normal(6, 4, 3)
    latent = LinearDraws(mean, deviations, False)
    draws = latent.sample(40_000)
    torch.testing.assert_close(draws.mean(0), mean, rtol=0, atol=0.05)
    spread = draws - mean
    found = torch.einsum("sbi,sbj->bij", spread, spread) / len(draws)
    torch.testing.assert_close(found, latent.covariance, rtol=0, atol=0.1)


@pytest.mark.parametrize("kind", ["alike", "with gradients", "wider from the third on"])
def test_chunks_of_a_latent_are_gathered(kind: str) -> None:
    mean, factor, wide = normal(6, 3), normal(6, 3, 2), normal(6, 3, 4, 1).squeeze(-1)
    terms = [FactoredTerm(wide[i : i + 2] if i == 4 and "wider" in kind else factor[i : i + 2]) for i in (0, 2, 4)]
    if kind == "with gradients":
        terms = [FactoredTerm(term.factor.clone().requires_grad_()) for term in terms]
    latents = [Latent(mean[2 * i : 2 * i + 2], (term,)) for i, term in enumerate(terms)]
    gathered = Latent.gather(iter(latents), 6)
    assert gathered.mean.equal(mean)
    close(gathered.covariance, torch.cat([term.factor @ term.factor.mT for term in terms]))
    assert gathered.covariance.requires_grad == (kind == "with gradients")
    assert Latent.gather(iter(latents[:1]), 2) is latents[0]


def test_classes_that_are_not_selected_have_the_average_variance_of_those_that_are() -> None:
    """Of 5 classes the third and the last are impossible; the last one is selected, and has no variance."""
    outputs, every_mean = torch.tensor([[3, 1, 4]]), torch.tensor([[1.0, 2.0, -1e9, 3.0, -1e9]]).double()
    covariance = torch.zeros(1, 3, 3, dtype=F64)
    covariance[:, :2, :2] = normal(1, 2, 2) @ normal(1, 2, 2).mT
    latent = SelectedLatent(
        every_mean.gather(1, outputs), (DenseTerm(covariance),), outputs=outputs, every_mean=every_mean
    )
    second, first = covariance[0].diagonal()[:2].flip(0)
    whole = latent.of_classes()
    assert whole.mean is every_mean
    close(whole.variance, torch.stack([(first + second) / 2, second, 0 * first, first, 0 * first])[None])
    one = SelectedLatent(
        every_mean[:, :1], (DenseTerm(covariance[:, :1, :1]),), outputs=outputs[:, :1], every_mean=every_mean
    )
    refused(lambda: one.of_classes(), "one output is selected")


def test_latents_at_positions_have_the_draws_of_their_rows() -> None:
    places = Places(2, (2,), -1)
    assert LatentAtPositions(LATENTS["factors"], places).draws is None
    found = LatentAtPositions(LATENTS["draws"], places).draws
    assert found is not None
    assert found.equal(normal(6, 4, 3).view(6, 2, 2, 3))
