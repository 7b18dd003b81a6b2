"""The built-in networks against their published sizes, mostly without computing anything (meta device)."""

from __future__ import annotations

import pytest
import torch
from support.command_line import invoke
from support.in_threads import train_in_threads
from torch import Tensor, nn

from mucudnn.bench.sources import layers, models, networks
from mucudnn.bench.sources.networks import NETWORKS, arguments_for, build, input_shape_of, objective_for
from mucudnn.bench.sources.networks.blocks import StochasticDepth
from mucudnn.bench.sources.networks.diffusion import VAE, UNet
from mucudnn.bench.suites.training import benchmark as training

# (parameters, 10^9 multiply-adds for one image of 224x224), both as published with torchvision's weights
PUBLISHED = {
    "alexnet": (61_100_840, 0.714),
    "vgg16": (138_357_544, 15.470),
    "vgg19": (143_667_240, 19.632),
    "resnet18": (11_689_512, 1.814),
    "resnet50": (25_557_032, 4.089),
    "squeezenet": (1_235_496, 0.349),
    "mobilenetv2": (3_504_872, 0.301),
    "efficientnet-b0": (5_288_548, 0.386),
    "convnext-t": (28_589_128, 4.456),
    "regnety-400mf": (4_344_144, 0.402),
}
# Networks that torchvision does not have, by what papers say: millions of parameters, to the digits that they give
IN_PAPERS = {"densenet40": (1.0, 1), "segformer-b0": (3.8, 1)}
OF_ITS_TABLE = "googlenet"  # torchvision's has other filters
# 10^6 multiply-adds of its modules, column "ops" of table 1. That of 5a, 54, does not follow from the other columns.
GOOGLENET_TABLE = {"3a": 128, "3b": 304, "4a": 73, "4b": 88, "4c": 100, "4d": 119, "4e": 170, "5b": 71}
OF_OUR_WIDTH = {"unet": 20_118_915, "vae": 20_945_575}
SMALL = {  # images on which all parts of a network still have something to do
    "alexnet": 63,
    "densenet40": 8,
    "segformer-b0": 64,
    "unet": 8,
    "vae": 8,
}


def build_on_meta(name: str, num_classes: int | None = None) -> nn.Module:
    with torch.device("meta"):
        return build(name, num_classes)


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def multiply_adds(name: str) -> dict[str, int]:
    """Return those of each layer, by its name, for one image."""
    model, found = build_on_meta(name), {}
    for path, module in model.named_modules():
        if isinstance(module, nn.Conv2d | nn.Linear):

            def count(module: nn.Module, inputs: object, y: torch.Tensor, path: str = path) -> None:
                found[path] = y.numel() * module.get_parameter("weight")[0].numel()

            module.register_forward_hook(count)
    model(torch.empty(1, *input_shape_of(name), device="meta"))
    return found


def test_parameters_and_work_are_the_published_ones() -> None:
    assert {*NETWORKS} == {*PUBLISHED, *IN_PAPERS, *OF_OUR_WIDTH, OF_ITS_TABLE}
    for name, (count, work) in PUBLISHED.items():
        assert parameters(build_on_meta(name)) == count
        assert sum(multiply_adds(name).values()) / 1e9 == pytest.approx(work, abs=5e-4)
        scores = build_on_meta(name, num_classes=7)(torch.empty(2, *input_shape_of(name), device="meta"))
        assert scores.shape == (2, 7)


def test_modules_of_googlenet_do_the_work_of_its_table() -> None:
    found = multiply_adds(OF_ITS_TABLE)
    for module, millions in GOOGLENET_TABLE.items():
        work = sum(each for path, each in found.items() if path.startswith(f"inception{module}."))
        assert work / 1e6 == pytest.approx(millions, abs=0.7)
    assert parameters(build_on_meta(OF_ITS_TABLE)) == 7_005_832


def test_diffusion_networks_of_full_width_have_the_published_parameters() -> None:
    """DDPM's network for CIFAR-10, and the autoencoder of Stable Diffusion 1."""
    with torch.device("meta"):
        assert parameters(UNet(width=128)) == 35_746_307
        assert parameters(VAE(width=128)) == 83_653_863
    for name, expected in OF_OUR_WIDTH.items():
        assert parameters(build_on_meta(name)) == expected
    for name, (millions, digits) in IN_PAPERS.items():
        assert round(parameters(build_on_meta(name)) / 1e6, digits) == millions


def test_a_training_step_is_finite_and_reaches_every_parameter() -> None:
    """Not those whose classifiers alone are as large as all other networks."""
    for name in sorted({*NETWORKS} - {"vgg16", "vgg19", "alexnet"}):
        torch.manual_seed(0)
        model, objective, edge = build(name), objective_for(name), SMALL.get(name, 32)
        x, labels = torch.randn(2, 3, edge, edge), torch.tensor([1, 3])
        loss = objective.loss(model(*objective.arguments(x)), objective.target(x, labels))
        loss.backward()  # type: ignore[no-untyped-call]
        assert loss.isfinite()
        assert loss.dim() == 0
        for parameter in model.parameters():
            assert parameter.grad is not None
            assert parameter.grad.isfinite().all()


def test_stochastic_depth_drops_whole_samples_and_keeps_the_mean() -> None:
    torch.manual_seed(0)
    drop = StochasticDepth(0.25)
    dropped = drop(torch.ones(4000, 2, 3))
    assert dropped.unique().tolist() == pytest.approx([0, 4 / 3])
    assert torch.equal(dropped, dropped[:, :1, :1].expand_as(dropped))
    assert dropped.mean().item() == pytest.approx(1, abs=0.05)
    assert torch.equal(drop.eval()(dropped), dropped)


def test_diffusion_tells_times_apart_and_draws_latents_in_training_alone() -> None:
    x = torch.randn(1, 3, 8, 8)
    model = build("vae")
    with torch.no_grad():
        early, late = build("unet").eval()(x.expand(2, -1, -1, -1), torch.tensor([3, 900]))
        (first, mean, _), (second, same_mean, _) = model(x), model(x)
        (once, *_), (again, *_) = model.eval()(x), model(x)
    assert not torch.allclose(early, late)
    assert not torch.equal(first, second)
    assert torch.equal(mean, same_mean)
    assert torch.equal(once, again)


def test_losses_of_perfect_outputs() -> None:
    """Where every pixel has the score of its label, the loss is that of one pixel; a perfect image costs nothing."""
    labels, objective = torch.tensor([0, 2]), objective_for("segformer-b0")
    target = objective.target(torch.empty(2, 3, 8, 12), labels)
    scores = 3.0 * nn.functional.one_hot(labels, 4).float()[:, :, None, None].expand(-1, -1, 2, 3)
    assert target.shape == (2, 8, 12)
    expected = nn.functional.cross_entropy(scores[:, :, 0, 0], labels)
    assert torch.isclose(objective.loss(scores, target), expected)
    x, zeros, objective = torch.randn(2, 3, 8, 8), torch.zeros(2, 4, 1, 1), objective_for("vae")
    assert objective.loss((x, zeros, zeros), objective.target(x, labels)) == 0
    assert min(objective.loss((x, zeros + 1, zeros), x), objective.loss((x, zeros, zeros + 1), x)) > 0


class Timed(nn.Module):
    """As small as can be, with a second argument; it says how often it had both."""

    calls = 0

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        Timed.calls += len(t) == len(x) == 2
        y: Tensor = self.conv(x) * t.to(x.dtype)[:, None, None, None]
        return y


def test_commands_give_a_network_all_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    train_in_threads(monkeypatch)
    for module in (networks, layers, models, training):
        known = {"timed": networks.Network(Timed, input_shape=(3, 6, 6), objective=NETWORKS["unet"].objective)}
        monkeypatch.setattr(module, "NETWORKS", known)
    asked = ("--algorithms", "gemm", "--time-limit", "10ms", "--threads", "1")
    for command in (
        "tune timed --workspace-limit headroom",
        "bench memory timed --rounds 2 --runs 0 --variants mucudnn",
        "bench training timed --variants mucudnn --rounds 1 --precisions float32 --memory-format contiguous",
    ):
        monkeypatch.setattr(Timed, "calls", 0)
        result = invoke(*command.split(), "--batch", "2", *asked)
        assert result.exit_code == 0, result.output
        assert Timed.calls > 0, command


def test_models_of_the_user_get_images_alone() -> None:
    x = torch.empty(2, 3, 8, 8)
    assert arguments_for("package.module:factory", x) == (x,)
    images, times = arguments_for("unet", x)
    assert images is x
    assert times.shape == (2,)
    assert ((times >= 0) & (times < 1000)).all()


def test_outputs_follow_the_inputs_once_statistics_are_settled() -> None:
    def difference_of_outputs() -> float:
        with torch.no_grad():
            one, other = (model.eval()(torch.randn(2, 3, 64, 64)) for _ in range(2))
        return float((one - other).norm() / other.norm())

    torch.manual_seed(0)
    model, _ = models.load_model("mobilenetv2")
    assert difference_of_outputs() < 0.01  # the bias of the last layer is all that is left
    models.settle_statistics(model, (torch.randn(4, 3, 64, 64),))
    assert difference_of_outputs() > 0.1
