"""Calls whose types `tools/check_types.py` checks: right ones, and wrong ones on lines that end in `# wrong`."""

import torch

import lapwing as lw

model = torch.nn.Linear(4, 3)
x, y = torch.randn(20, 4), torch.randn(20, 3)
loader = [(x, y)]

posterior = lw.fit(model, loader)
posterior.predict(x).probs, posterior.predict(x).interval(0.9)  # the likelihood is inferred, so both may be right
posterior.model.eval()

regression = lw.fit(model, loader, lw.KFAC(), likelihood=lw.Gaussian(noise_variance=0.1))
low, high = regression.predict(x).scaled(2.0, 3.0).interval(0.9)
regression.with_prior(1.0).update(loader).predict(x).std.mean()
regression.predict(x).probs.sum()  # wrong
regression.predict(x).interval("wide")  # wrong
regression.predict(x, via=lw.KFAC())  # wrong
regression.predict(x, link=lw.KFAC())  # wrong
regression.noise_variance = 0.1  # wrong

classifier = lw.load("posterior.safetensors", model, likelihood=lw.Categorical())
classifier.predict(x, lw.MonteCarlo(20)).mutual_information().argsort()
classifier.predict(x, link=lw.LaplaceBridge()).confidence.amin()
classifier.predict(x).interval(0.9)  # wrong
classifier.latent(x).covariances.sum()  # wrong

counts = lw.fit(model, loader, likelihood=lw.Poisson(), params=lw.last_layer, tune=lw.Evidence())
counts.predict(x).quantiles(0.5)  # wrong
lw.fit(model, loader, likelihood=lw.Probit())  # wrong
lw.fit(model, loader, validatoin=loader)  # wrong
lw.fit(model, loader, lw.Linearized())  # wrong
lw.Gaussian(noise_variance="small")  # wrong
lw.Gausian()  # wrong


def interval(fitted: lw.Posterior, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns an interval; a posterior without brackets has any predictions."""
    return fitted.predict(inputs).interval(0.9)


interval(regression, x)
lw.compare({"one": regression, "two": (regression, lw.MonteCarlo(20)), "network": model}, loader)
