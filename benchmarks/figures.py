"""How all figures look, drawn without a screen."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.text import Text

plt.rcParams |= {"axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False}
plt.rcParams |= {"figure.constrained_layout.use": True, "pdf.fonttype": 42}  # fonts that journals accept


def save(figure: plt.Figure, *paths: Path) -> None:
    """As PNG or PDF, at most twice as wide as high, with text of 6 points where it is printed 3.3 inches wide."""
    width, height = figure.get_size_inches()
    figure.set_figheight(max(height, width / 2))
    for axes in figure.axes:
        axes.tick_params(labelsize=6 * width / 3.3)
    for text in figure.findobj(Text):
        text.set_fontsize(6 * width / 3.3)
    for path in paths:
        metadata = {"Software": None} if path.suffix == ".png" else None  # a PNG has the same bytes each time
        figure.savefig(path, dpi=200, metadata=metadata)
    plt.close(figure)
