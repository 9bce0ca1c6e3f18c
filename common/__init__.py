"""What the scripts share and a reader of an algorithm may skip: environments, device set-up, run folder."""
