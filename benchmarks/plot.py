"""Draws results.json as plot.svg: images per second of each contestant, with the range over the rounds."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

TITLES = {"small": "500x375 JPEGs", "large": "12-megapixel JPEGs"}


def main(folder: Path) -> None:
    results = json.loads((folder / "results.json").read_text())["results"]
    figure, axes = plt.subplots(len(results), 1, figsize=(8, 3.6 * len(results)), squeeze=False, layout="constrained")
    for axis, (kind, contestants) in zip(axes[:, 0], results.items(), strict=True):
        names = [name for name in contestants if "one caller" not in name and "no preproc" not in name][::-1]
        rates = [[value["rate"] for value in contestants[name]] for name in names]
        middle = [statistics.median(values) for values in rates]
        spread = [
            [value - min(values) for value, values in zip(middle, rates, strict=True)],
            [max(values) - value for value, values in zip(middle, rates, strict=True)],
        ]
        colours = ["tab:blue" if name.startswith("suite") else "lightgrey" for name in names]
        bars = axis.barh(names, middle, xerr=spread, color=colours, capsize=3)
        axis.bar_label(bars, fmt="%.0f", padding=8)
        axis.set_title(TITLES[kind])
        axis.set_xlabel("images per second")
        axis.margins(x=0.12)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(folder / "plot.svg")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
