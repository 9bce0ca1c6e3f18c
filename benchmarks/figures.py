"""How all figures look, drawn without a screen."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

plt.rcParams |= {"axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False}
plt.rcParams |= {"figure.constrained_layout.use": True}


def save(figure: plt.Figure, path: Path) -> None:
    figure.savefig(path, dpi=110, metadata={"Software": None})  # the same bytes each time
    plt.close(figure)
