"""Min-max normalised returns, in which Procgen's games can be averaged."""

# Returns of a policy that sees nothing, and of the best there is (Cobbe et al. 2020, https://arxiv.org/abs/1912.01588,
# appendix C). For easy jumper and leaper the paper prints 3 as the least; 1 and 1.5 are those of the authors' code.
# fmt: off
RETURN_RANGES = {
    "easy": {
        "coinrun": (5, 10), "starpilot": (2.5, 64), "caveflyer": (3.5, 12), "dodgeball": (1.5, 19),
        "fruitbot": (-1.5, 32.4), "chaser": (0.5, 13), "miner": (1.5, 13), "jumper": (1, 10),
        "leaper": (1.5, 10), "maze": (5, 10), "bigfish": (1, 40), "heist": (3.5, 10),
        "climber": (2, 12.6), "plunder": (4.5, 30), "ninja": (3.5, 10), "bossfight": (0.5, 13),
    },
    "hard": {
        "coinrun": (5, 10), "starpilot": (1.5, 35), "caveflyer": (2, 13.4), "dodgeball": (1.5, 19),
        "fruitbot": (-0.5, 27.2), "chaser": (0.5, 14.2), "miner": (1.5, 20), "jumper": (1, 10),
        "leaper": (1.5, 10), "maze": (4, 10), "bigfish": (0, 40), "heist": (2, 10),
        "climber": (1, 12.6), "plunder": (3, 30), "ninja": (2, 10), "bossfight": (0.5, 13),
    },
}
# fmt: on


def normalized(episodic_return: float, game: str, distribution_mode: str) -> float:
    """(R - min) / (max - min) of a return in a Procgen game; NaN where no range is published."""
    if game not in RETURN_RANGES.get(distribution_mode, ()):
        return float("nan")
    least, best = RETURN_RANGES[distribution_mode][game]
    return (episodic_return - least) / (best - least)
