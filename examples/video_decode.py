"""Decode a clip in a quarter of the memory, beside the tiling of diffusers. Run: python video_decode.py [model]

Needs ``pip install diffusers``. The decoder has random weights, since time and memory do not depend on them. Tiles are
decoded apart and blended, so that their result differs from the whole decoder's; bands compute the same.
"""

import argparse
import inspect
import sys
import time
from collections.abc import Callable

import diffusers
import torch
from torch import Tensor, nn

import mucudnn
from mucudnn.kernels.memory import peak_allocated_bytes

MODELS = {
    "qwen-image": diffusers.AutoencoderKLQwenImage,
    "wan": diffusers.AutoencoderKLWan,
    "cogvideox": diffusers.AutoencoderKLCogVideoX,
    "hunyuan-video": diffusers.AutoencoderKLHunyuanVideo,
}
NARROW = {"base_dim": 32, "num_res_blocks": 1}, {"block_out_channels": (32, 64, 64, 128), "layers_per_block": 1}


class Decoder(nn.Module):
    def __init__(self, vae: nn.Module) -> None:
        super().__init__()
        self.vae = vae

    def forward(self, latents: Tensor) -> Tensor:
        return self.vae.decode(latents, return_dict=False)[0]


def measured(name: str, decode: Callable[[], Tensor], expected: Tensor | None = None) -> tuple[Tensor, int]:
    """Print the time, the memory and the largest difference of a decoder; return its clip and its memory in bytes.

    The memory is what PyTorch's allocator hands out in a call, workspace and result included.
    """
    clip = decode()
    start = time.perf_counter()
    decode()
    seconds = time.perf_counter() - start
    mucudnn.release_workspaces()  # which are kept between calls
    most = peak_allocated_bytes(decode)
    difference = "" if expected is None else f", largest difference {(clip - expected).abs().max():.1e}"
    sys.stdout.write(f"{name}: {seconds:.2f} s, {most / 2**20:.0f} MiB{difference}\n")
    return clip, most


@torch.no_grad()
def main(model: str, latents: int, frames: int, *, narrow: bool) -> None:
    torch.manual_seed(0)
    widths = NARROW[model not in ("qwen-image", "wan")] if narrow else {}
    vae = MODELS[model](**widths).eval()
    channels = vae.config.get("z_dim") or vae.config.latent_channels
    decoder, x = Decoder(vae).eval(), torch.randn(1, channels, frames, latents, latents)
    expected, whole = measured("PyTorch", lambda: decoder(x))
    budget = whole // 4
    try:
        bands = mucudnn.optimize(decoder, x, mucudnn.Config(memory_budget=budget))
    except mucudnn.InfeasibleError as error:
        sys.stdout.write(f"{error}\n")
        budget = error.smallest_feasible_bytes
        bands = mucudnn.optimize(decoder, x, mucudnn.Config(memory_budget=budget))
    measured(f"mucudnn within {budget / 2**20:.0f} MiB", lambda: bands(x), expected)
    sizes = {"tile_sample_min": 4 * latents, "tile_sample_stride": 3 * latents, "tile_overlap_factor": 0.25}
    settings = {f"{name}_{side}": size for name, size in sizes.items() for side in ("height", "width")}
    known = inspect.signature(vae.enable_tiling).parameters
    vae.enable_tiling(**{name: value for name, value in settings.items() if name in known})
    measured("diffusers in tiles", lambda: decoder(x), expected)
    sys.stdout.write(f"{mucudnn.report(bands)}\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="cogvideox", choices=MODELS)
    parser.add_argument("latents", type=int, nargs="?", default=32, help="height and width of the latents")
    parser.add_argument("frames", type=int, nargs="?", default=3, help="frames of the latents")
    parser.add_argument("--narrow", action="store_true", help="fewer channels and layers, for a first try in a minute")
    arguments = parser.parse_args()
    main(arguments.model, arguments.latents, arguments.frames, narrow=arguments.narrow)
