"""The built-in networks against their published sizes, mostly without computing anything (meta device)."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from mucudnn.bench.sources import networks
from mucudnn.bench.sources.networks import NETWORKS, build, input_shape_of
from mucudnn.bench.sources.networks.video import QwenImageDecoder
from mucudnn.bench.sources.trainee import loss_for
from mucudnn.core.errors import UnavailableError

# (parameters, 10^9 multiply-adds for one image of 224x224), both as published with torchvision's weights
PUBLISHED = {
    "alexnet": (61_100_840, 0.714),
    "vgg16": (138_357_544, 15.470),
    "resnet18": (11_689_512, 1.814),
    "resnet50": (25_557_032, 4.089),
    "squeezenet": (1_235_496, 0.349),
    "mobilenetv2": (3_504_872, 0.301),
    "efficientnet-b0": (5_288_548, 0.386),
    "convnext-t": (28_589_128, 4.456),
}
# Those of other packages: parameters, by what the packages say
PACKAGED = {
    "seresnet18": 11_779_624,
    "densenet121": 7_978_856,
    "efficientnetv2-b0": 7_139_704,
    "mobilenetv4-small": 3_774_024,
    "repvit-m0-9": 5_489_328,
    "yolo11n": 2_624_080,
    "unet-resnet18": 14_328_209,
    "monai-unet": 4_806_481,
    "diffusers-unet2d": 1_113_955,
    "r3d-18": 33_371_472,
}
# Networks that torchvision does not have, by what papers say: millions of parameters, to the digits that they give
IN_PAPERS = {"densenet40": (1.0, 1)}
OTHERS = {"googlenet", "unet-groupnorm", "conv-tasnet"}  # torchvision's GoogLeNet has other filters
SMALL = {  # images on which all parts of a network still have something to do
    "alexnet": 63,
    "densenet40": 8,
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
    assert {*NETWORKS} == {*PUBLISHED, *IN_PAPERS, *PACKAGED, *OTHERS}
    for name, (count, work) in PUBLISHED.items():
        assert parameters(build_on_meta(name)) == count
        assert sum(multiply_adds(name).values()) / 1e9 == pytest.approx(work, abs=5e-4)
        scores = build_on_meta(name, num_classes=7)(torch.empty(2, *input_shape_of(name), device="meta"))
        assert scores.shape == (2, 7)


def test_a_training_step_is_finite_and_reaches_every_parameter() -> None:
    """Not those whose classifiers alone are as large as all other networks."""
    for name in sorted({*NETWORKS} - {*PACKAGED, "vgg16", "alexnet"}):
        torch.manual_seed(0)
        model, edge = build(name), SMALL.get(name, 32)
        shape = (1, 160) if name == "conv-tasnet" else (3, edge, edge)
        x, labels = torch.randn(2, *shape), torch.tensor([1, 3])
        loss = loss_for(name)(model(x), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        assert loss.isfinite()
        assert loss.dim() == 0
        for parameter in model.parameters():
            assert parameter.grad is not None
            assert parameter.grad.isfinite().all()


def test_networks_of_packages_have_their_sizes_and_learn_by_their_loss() -> None:
    """Of those packages that are installed."""
    for name, count in PACKAGED.items():
        if find_spec(NETWORKS[name].package) is not None:
            model = build(name)
            assert parameters(model) == count
            x, labels = torch.randn(1, *input_shape_of(name)), torch.tensor([1])
            assert loss_for(name)(model.eval()(x) if NETWORKS[name].classifies else model(x), labels).isfinite()


def test_what_a_network_lacks_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(networks, "find_spec", lambda package: None)
    with pytest.raises(UnavailableError, match=r"^r3d-18 is a network of torchvision, which is not installed: pip ins"):
        build("r3d-18")
    monkeypatch.setattr(networks, "find_spec", lambda package: package)
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(UnavailableError, match=r"^seresnet18 is a network of timm, which cannot build it: ModuleNot"):
        build("seresnet18")


def test_a_package_builds_its_network_with_the_classes_that_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(networks, "find_spec", lambda package: package)
    monkeypatch.setitem(
        sys.modules, "timm", SimpleNamespace(create_model=lambda name, num_classes: (name, num_classes))
    )
    assert build("efficientnetv2-b0", 7) == ("tf_efficientnetv2_b0", 7)
    assert build("repvit-m0-9") == ("repvit_m0_9", 1000)


def test_the_decoder_of_one_frame_has_the_sizes_of_diffusers() -> None:
    """Those of ``AutoencoderKLQwenImage.decoder`` and ``post_quant_conv``, without ``time_conv``."""
    with torch.device("meta"):
        assert parameters(QwenImageDecoder()) == 71_524_595
    image = QwenImageDecoder(4)(torch.randn(1, 16, 1, 3, 2))
    assert image.shape == (1, 3, 1, 24, 16)


def test_the_separator_of_speakers_has_the_sizes_of_torchaudio_and_the_paper() -> None:
    separator = build_on_meta("conv-tasnet")
    unread = 512 * 128 + 128  # the residual path of the last block, which the paper counts
    assert parameters(separator) == 4_984_881
    assert round((parameters(separator) + unread) / 1e6, 1) == 5.1
    assert separator(torch.empty(3, 1, 167, device="meta")).shape == (3, 2, 160)
