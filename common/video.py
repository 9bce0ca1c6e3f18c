"""Videos of an environment."""

from pathlib import Path
from typing import IO, Any

import numpy as np
from gymnasium.vector import VectorWrapper


def open_video(file: Path | IO, fps: float) -> Any:
    """An MP4 with a method `write_frame` for uint8 [height, width, 3], and `close`. Needs the package av."""
    import imageio.v3  # comes with procgen; only videos need it

    writer = imageio.v3.imopen(file, "w", plugin="pyav", extension=".mp4")
    writer.init_video_stream("libx264", fps=fps)
    return writer


class RecordFirstEnv(VectorWrapper):
    """Write videos of environment 0 into `folder`, once that is set: episodes 0, 1, 8, 27, ... and every thousandth."""

    folder, episode, file = None, 0, None

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict]:
        cubic = round(self.episode ** (1 / 3)) ** 3 == self.episode  # the schedule of Gymnasium's RecordVideo
        if self.folder is not None and (cubic if self.episode < 1000 else self.episode % 1000 == 0):
            if self.file is None:
                self.folder.mkdir(exist_ok=True)
                self.file = open_video(self.folder / f"episode-{self.episode}.mp4", self.metadata.get("render_fps", 30))
            self.file.write_frame(self.env.render()[0])
        obs, rewards, terminations, truncations, infos = self.env.step(actions)
        if terminations[0] or truncations[0]:
            self.finish_video()
            self.episode += 1
        return obs, rewards, terminations, truncations, infos

    def finish_video(self) -> None:
        if self.file is not None:
            self.file.close()
            self.file = None

    def close(self, **kwargs: Any) -> None:
        self.finish_video()
        super().close(**kwargs)
