"""Draw gain.png, the picture of README.md, from docs/results. Run: python docs/images/draw.py"""

from __future__ import annotations

from pathlib import Path

import pandas
from matplotlib.axes import Axes
from matplotlib.figure import Figure

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parent / "results"
NETWORKS = {
    "convnext-t": "ConvNeXt-T, batch 4",
    "vgg16": "VGG-16, batch 8",
    "alexnet": "AlexNet, batch 32",
    "resnet18": "ResNet-18, batch 16",
    "efficientnet-b0": "EfficientNet-B0, batch 8",
    "mobilenetv2": "MobileNetV2, batch 8",
    "resnet50": "ResNet-50, batch 8",
    "densenet40": "DenseNet-40, batch 32",
}
TORCH, OURS, LIGHT = "#9a9a9a", "#1b6ca8", "#9cc3e0"


def rows(machine: str, source: str, part: str) -> pandas.DataFrame:
    every = pandas.read_csv(RESULTS / f"amd-epyc-{machine}.csv")
    return every[(every["source"] == source) & (every["part"] == part)]


def best_ms(total: pandas.Series, whose: str) -> float:
    """Milliseconds in the memory format that is the faster one for ``whose``."""
    return 1e3 * min(total[f"{whose}_contiguous_s"], total[f"{whose}_channels_last_s"])


def draw_networks(axes: Axes) -> None:
    """Draw PyTorch beside mucudnn, each in its better memory format, as shares of PyTorch's time."""
    for place, (name, shown) in enumerate(NETWORKS.items()):
        row = 1.35 * place  # two bars and their name
        total = rows("zen5-2-cores", f"{name}, 64 MiB", "total").iloc[0]
        torch_ms, ours_ms = best_ms(total, "torch"), best_ms(total, "mucudnn")
        axes.barh(row - 0.2, 1, 0.38, color=TORCH)
        axes.barh(row + 0.2, ours_ms / torch_ms, 0.38, color=OURS)
        axes.text(0.98, row - 0.2, f"PyTorch {torch_ms:,.0f} ms", va="center", ha="right", color="white")
        axes.text(0.02, row + 0.2, f"mucudnn {ours_ms:,.0f} ms", va="center", color="white")
        axes.text(ours_ms / torch_ms + 0.02, row + 0.2, f"{torch_ms / ours_ms:.2f}×", va="center", weight="bold")
        axes.text(0, row - 0.47, shown, va="bottom")
    axes.set(ylim=(1.35 * len(NETWORKS) - 0.9, -0.75), xlim=(0, 1.0), xticks=[], yticks=[])
    axes.set_title("All convolutions of a network,\nforward and both gradients", loc="left", fontsize=10)


def draw_origin(axes: Axes) -> None:
    """Fastest undivided algorithm over ours, under each workspace limit. A bar begins at 1: nothing is gained."""
    long = rows("zen4-2-cores", "limits-batch16", "limits")
    shown = [*dict.fromkeys(long["subject"])]
    limits = long.pivot_table("value", "subject", "quantity").loc[shown]
    for row, (_, limit) in enumerate(limits.iterrows()):
        axes.barh(row, limit["geometric_mean"] - 1, color=OURS)
        told = f"{limit['geometric_mean']:.2f}×"
        if limit["without_rival"]:
            told += f"; {limit['without_rival']:.0f} of 44: no undivided algorithm fits"
        axes.text(limit["geometric_mean"] - 0.99, row, told, va="center")
    axes.set(yticks=range(len(limits)), yticklabels=shown, xlim=(0, 0.6), xticks=[])
    axes.invert_yaxis()
    what = "What micro-batches add to the fastest undivided algorithm,"
    title = f"{what}\nby workspace limit (44 problems of DeepBench, batch 16)"
    axes.set_title(title, loc="left", fontsize=10)


def main() -> None:
    figure = Figure(figsize=(9, 6.4), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.05))
    draw_networks(left)
    draw_origin(right)
    for axes in (left, right):
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0)
    figure.savefig(HERE / "gain.png", dpi=110)


if __name__ == "__main__":
    main()
