"""One fit over several processes: each passes its own share of the data, and all get the same posterior.

Run it: torchrun --nproc-per-node 2 examples/distributed_fit.py

In one process, python examples/distributed_fit.py, it is the same program, on all of the data. Nothing in it is there
for lapwing: the process group and the DistributedSampler are those of any training on several devices.
"""

from __future__ import annotations

import os

import torch
from sklearn.datasets import load_digits
from torch import distributed, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import lapwing as lw


def trained(data: TensorDataset) -> nn.Module:
    """Returns a trained network: the same weights in every process, as after training with DistributedDataParallel."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    x, y = data.tensors
    for _ in range(100):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimiser.step()
    return model.eval()


def main() -> None:
    several = "RANK" in os.environ  # torchrun sets it
    if several:
        distributed.init_process_group()  # gloo for the CPU, NCCL for GPUs
    rank, size = (distributed.get_rank(), distributed.get_world_size()) if several else (0, 1)

    digits = load_digits()
    x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    training = TensorDataset(x[:1001], y[:1001])
    model = trained(training)

    # the sampler shows one of 1001 samples twice, so that both processes have 501: the fit counts it once
    sampler = DistributedSampler(training, size, rank, shuffle=False)
    posterior = lw.fit(model, DataLoader(training, 100, sampler=sampler), lw.KFAC())

    test = x[1001:][rank::size]  # predictions are of what each process asks for
    probs = posterior.predict(test).probs
    right = (probs.argmax(1) == y[1001:][rank::size]).double().mean()
    print(
        f"Process {rank} of {size}: {posterior.samples} samples, prior precision {posterior.prior_precision:.6g}, "
        f"{len(test)} predictions, accuracy {right:.3f}\n",
        end="",
        flush=True,
    )
    if several:
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
