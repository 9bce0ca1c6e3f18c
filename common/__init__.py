"""What the scripts share. A file imports from layers above its own in this list, and from files before it.

errors, settings, signals: the two errors, flags and their limits, how a process ends
procgen_env, video, reward_scale, envs: environments, their states, videos, the scale of rewards
files, provenance, scores, run: the run folder, where its numbers come from, normalised returns
device, gpu_kernels, kernels, accelerate, learning, actors: where and how things are computed
world: one process, or the ranks of torchrun
intrinsic: RND and ICM, an algorithm that PPO and PPG share
checkpoint, resume, load, evaluation: keep a run, find it again, load its agent, test it on held-out levels
session: all of it for a script's `main`
"""
