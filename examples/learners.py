"""Train ranks that step on their own and are corrected towards their average, beside plain data-parallel training.

    torchrun --nproc-per-node 2 learners.py                     # the digits of scikit-learn
    torchrun --nproc-per-node 2 learners.py --data synthetic    # images of ten patterns, shifted and noisy

Both trainings begin with the same network, and each rank sees the same batches in both. Data-parallel training averages
the gradients of all ranks in each step. Learners take steps of their own gradients, and SynchronousModelAveraging
corrects them after CROSSBOW (Koliousis et al., PVLDB 2019); their accuracy is that of the average model.

The digits need scikit-learn: pip install '.[examples]' in the clone.
"""

import argparse
import copy
import time
import warnings

import torch
import torch.distributed as dist
from digits_ddp import cifar_shaped, digits, join_the_ranks, require_installed, small_network, sum_over_ranks
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import mucudnn
from mucudnn.distributed import SynchronousModelAveraging

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch warns of its own code
    from torch.distributed.optim import PostLocalSGDOptimizer

DATA = {"digits": digits, "synthetic": cifar_shaped}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", choices=DATA, default="digits")
    parser.add_argument("--batch", type=int, default=16, help="samples of each rank in a step")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--learning-rate", type=float, default=0.003)
    parser.add_argument("--period", type=int, default=1, help="steps between two corrections")
    parser.add_argument("--momentum", type=float, default=0.9, help="of the average")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    require_installed(["sklearn"] * (options.data == "digits"))
    device = join_the_ranks()
    compare(device, options)
    dist.barrier()  # torchrun ends all ranks when the first one ends
    dist.destroy_process_group()


def compare(device, options):
    images, labels = DATA[options.data]()
    train, test = torch.randperm(len(images), generator=torch.Generator().manual_seed(0)).chunk(2)
    deviation, mean = torch.std_mean(images[train])
    images = ((images - mean) / deviation).expand(-1, 3, -1, -1)
    data = [TensorDataset(images[half], labels[half]) for half in (train, test)]
    trainings = [Training(name, data, device, options) for name in ("data-parallel", "learners")]
    tell(f"{options.data}, {dist.get_world_size()} ranks of {options.batch} samples, test accuracy in percent")
    tell("epoch", *(f"{training.name:>14}" for training in trainings))
    for epoch in range(options.epochs):
        for training in trainings:  # in turns, so that a slow minute of the machine is everybody's
            training.train(epoch)
        tell(f"{epoch + 1:5}", *(f"{training.accuracy():14.2f}" for training in trainings))
    tell("    s", *(f"{training.seconds:14.2f}" for training in trainings))


def tell(*words):
    if dist.get_rank() == 0:
        print(*words, flush=True)


class Training:
    """A model in training. averager: of learners; None in data-parallel training."""

    def __init__(self, name, data, device, options):
        (train, self.test), self.device, self.name = data, device, name
        torch.manual_seed(options.seed)
        images, _ = train[: options.batch]
        self.model = mucudnn.optimize(small_network().to(device), images.to(device))
        self.optimizer = torch.optim.SGD(self.model.parameters(), options.learning_rate, momentum=0.9)
        self.averager = None
        if name == "learners":
            self.averager = SynchronousModelAveraging(options.period, momentum=options.momentum)
            self.optimizer = PostLocalSGDOptimizer(self.optimizer, self.averager)
        else:
            self.model = DistributedDataParallel(self.model)
        self.sampler = DistributedSampler(train, seed=options.seed, drop_last=True)
        self.loader = DataLoader(train, options.batch, sampler=self.sampler, drop_last=True)
        self.seconds = 0.0

    def train(self, epoch):
        self.model.train()
        self.sampler.set_epoch(epoch)
        start = time.perf_counter()
        for images, labels in self.loader:
            self.optimizer.zero_grad()
            F.cross_entropy(self.model(images.to(self.device)), labels.to(self.device)).backward()
            self.optimizer.step()
        self.seconds += time.perf_counter() - start

    @torch.no_grad()
    def trained(self):
        """Return the model, of learners the average one, with the mean of their statistics of batch norm."""
        if self.averager is None:
            return self.model
        average = copy.deepcopy(self.model)
        for parameter, value in zip(average.parameters(), self.averager.average, strict=True):
            parameter.copy_(value)
        for buffer in filter(torch.is_floating_point, average.buffers()):
            dist.all_reduce(buffer)
            buffer /= dist.get_world_size()
        return average

    @torch.no_grad()
    def accuracy(self):
        """Return the test accuracy in percent; each rank looks at its part of the images."""
        model = self.trained().eval()
        images, labels = (part[dist.get_rank() :: dist.get_world_size()] for part in self.test.tensors)
        right = model(images.to(self.device)).argmax(1) == labels.to(self.device)
        return 100 * sum_over_ranks(right) / len(self.test)


if __name__ == "__main__":
    main()
