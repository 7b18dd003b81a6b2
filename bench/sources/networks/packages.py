"""Networks of other packages, as their authors give them, without weights.

``build`` says which package is missing.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn


def seresnet18(num_classes: int) -> nn.Module:
    """Build a ResNet-18 with squeeze-and-excitation (Hu, Shen and Sun, 2018), 11,779,624 parameters."""
    return _of_timm("seresnet18", num_classes)


def densenet121(num_classes: int) -> nn.Module:
    """Build DenseNet-121 (Huang, Liu, van der Maaten and Weinberger, 2017), 7,978,856 parameters."""
    return _of_timm("densenet121", num_classes)


def efficientnetv2_b0(num_classes: int) -> nn.Module:
    """Build EfficientNetV2-B0 (Tan and Le, 2021), 7,139,704 parameters."""
    return _of_timm("tf_efficientnetv2_b0", num_classes)


def mobilenetv4_small(num_classes: int) -> nn.Module:
    """Build MobileNetV4-Conv-Small (Qin et al., 2024), 3,774,024 parameters."""
    return _of_timm("mobilenetv4_conv_small", num_classes)


def repvit_m0_9(num_classes: int) -> nn.Module:
    """Build RepViT-M0.9 (Wang, Chen, Lin, Han and Ding, 2024) with all branches, 5,489,328 parameters."""
    return _of_timm("repvit_m0_9", num_classes)


def _of_timm(name: str, num_classes: int) -> nn.Module:
    import timm

    model: nn.Module = timm.create_model(name, num_classes=num_classes)
    return model


def yolo11n(num_classes: int) -> nn.Module:
    """Build the detector YOLO11n (Jocher and Qiu, 2024), 2,624,080 parameters for 80 classes."""
    os.environ.setdefault("YOLO_OFFLINE", "true")  # Otherwise the package looks for a network when it is imported.
    from ultralytics.nn.tasks import DetectionModel

    model: nn.Module = DetectionModel("yolo11n.yaml", nc=num_classes, verbose=False)
    return model


def unet_resnet18(num_classes: int) -> nn.Module:
    """Build a U-Net (Ronneberger, Fischer and Brox, 2015) whose encoder is ResNet-18, 14,328,209 parameters."""
    from segmentation_models_pytorch import Unet

    model: nn.Module = Unet("resnet18", encoder_weights=None, classes=num_classes)
    return model


def monai_unet(num_classes: int) -> nn.Module:
    """Build MONAI's U-Net of volumes with residual units (Kerfoot et al., 2018), 4,806,481 parameters."""
    from monai.networks.nets import UNet

    widths: dict[str, Any] = {"channels": (16, 32, 64, 128, 256), "strides": (2, 2, 2, 2), "num_res_units": 2}
    model: nn.Module = UNet(spatial_dims=3, in_channels=1, out_channels=num_classes, **widths)
    return model


def diffusers_unet2d(num_classes: int) -> nn.Module:
    """Build a small denoising ``UNet2DModel`` of diffusers (Ho et al., 2020), 1,113,955 parameters for 3 channels."""
    from diffusers import UNet2DModel

    levels = ("DownBlock2D", "AttnDownBlock2D", "DownBlock2D"), ("UpBlock2D", "AttnUpBlock2D", "UpBlock2D")
    model = UNet2DModel(
        sample_size=64,
        in_channels=3,
        out_channels=num_classes,
        down_block_types=levels[0],
        up_block_types=levels[1],
        block_out_channels=(32, 64, 64),
        layers_per_block=1,
        norm_num_groups=8,
    )
    return _AtRandomTimes(model)


class _AtRandomTimes(nn.Module):
    """A model that removes noise, which is called with images alone; the time of each of up to 1024 is drawn once."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("times", torch.randint(1000, (1024,)))

    def forward(self, x: Tensor) -> Tensor:
        noise: Tensor = self.model(x, self.get_buffer("times")[: len(x)]).sample
        return noise


def r3d_18(num_classes: int) -> nn.Module:
    """Build the ResNet-18 of clips R3D (Tran et al., 2018), 33,371,472 parameters for 400 classes."""
    from torchvision.models.video import r3d_18

    model: nn.Module = r3d_18(num_classes=num_classes)
    return model
