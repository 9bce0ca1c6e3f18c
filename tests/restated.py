"""PPO, PPG and IMPALA once more, from the papers' equations: slow, one sample at a time, without the scripts' code.

The functions of these names train on recorded steps of environments, with recorded orders of minibatches. The scripts
must end with the same parameters to rounding (test_restated.py). `args` are the settings of a script. The papers:

GAE: Schulman et al. 2016, https://arxiv.org/abs/1506.02438.  PPO: Schulman et al. 2017, https://arxiv.org/abs/1707.06347.
PPG: Cobbe et al. 2020, https://arxiv.org/abs/2009.04416. Adam, RMSProp and the clipping of gradients are PyTorch's.
IMPALA: Espeholt et al. 2018, https://arxiv.org/abs/1802.01561, with the learner of TorchBeast's MonoBeast (Kuettler et
al. 2019, https://arxiv.org/abs/1910.03552).
"""

import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.optim import Adam, Optimizer, RMSprop

Parameters = dict[str, Tensor]  # by name, as in a script's `Agent`


class Step(NamedTuple):
    """A step of one environment. `next_obs` belongs to the same episode as `obs`, even where the step ends it."""

    obs: Tensor
    action: int
    reward: float
    next_obs: Tensor
    terminated: bool  # the episode has ended by itself
    truncated: bool  # a time limit has ended the episode


class Sample(NamedTuple):
    """What an update learns from at one step."""

    obs: Tensor
    action: int
    old_logprob: Tensor
    old_value: Tensor
    advantage: Tensor
    target: Tensor  # of the value: old value + advantage (before it is normalised)


# ---------------------------------------------------------------------------------------------------------- networks


def linear(params: Parameters, name: str, x: Tensor) -> Tensor:
    return params[f"{name}.weight"] @ x + params[f"{name}.bias"]


def features_of(params: Parameters, encoder: str, obs: Tensor) -> Tensor:
    return torch.tanh(linear(params, f"{encoder}.2", torch.tanh(linear(params, f"{encoder}.0", obs))))


def policy_of(params: Parameters, obs: Tensor) -> Tensor:
    """The probability of each action."""
    return linear(params, "policy_head.linear", features_of(params, "encoder", obs)).softmax(0)


def value_of(params: Parameters, obs: Tensor, arch: str) -> Tensor:
    """V(obs). With `arch` "dual", the value has an encoder of its own; with "shared" (as in PPO) and "detach", it is a
    head on the policy's; with "detach", its gradient ends there (PPG's variant with a single network)."""
    features = features_of(params, "value_encoder" if arch == "dual" else "encoder", obs)
    return linear(params, "value_head", features.detach() if arch == "detach" else features)[0]


# ---------------------------------------------------------------------------------------- advantages and value targets


class RewardScale:
    """Rewards divided by the standard deviation of all discounted returns so far, clipped to +-10 (OpenAI's baselines).

    The returns include this rollout's. As much as 1e-4 of a return with mean 0 and variance 1 is there from the start.
    """

    def __init__(self, num_envs: int, gamma: float):
        self.gamma, self.running, self.returns = gamma, [0.0] * num_envs, []

    def __call__(self, rollout: list[list[Step]], envs: Iterable[int]) -> list[list[Step]]:
        """`envs` are the numbers of the environments that have made these steps."""
        for n, steps in zip(envs, rollout, strict=True):
            for step in steps:
                self.running[n] = step.reward + self.gamma * self.running[n]
                self.returns.append(self.running[n])
                if step.terminated or step.truncated:
                    self.running[n] = 0.0
        count = 1e-4 + len(self.returns)
        mean = sum(self.returns) / count
        variance = (1e-4 * (1 + mean**2) + sum((each - mean) ** 2 for each in self.returns)) / count

        def scale(reward: float) -> float:
            scaled = max(-10.0, min(10.0, reward / math.sqrt(variance + 1e-8)))
            return torch.tensor(scaled, dtype=torch.float32).item()  # as the scripts keep rewards

        return [[step._replace(reward=scale(step.reward)) for step in steps] for steps in rollout]


def advantage_of(params: Parameters, steps: list[Step], args: Any, arch: str) -> Tensor:
    """GAE, equation 16, for the first of these steps: the sum over l of (gamma lambda)^l delta_(t+l), up to the end of
    the episode or of the rollout. The value after the end of an episode is 0, but not where a time limit has cut it."""
    advantage = 0.0
    for distance, step in enumerate(steps):
        next_value = 0.0 if step.terminated else value_of(params, step.next_obs, arch)
        delta = step.reward + args.gamma * next_value - value_of(params, step.obs, arch)
        advantage = advantage + (args.gamma * args.gae_lambda) ** distance * delta
        if step.terminated or step.truncated:
            break
    return advantage


def normalized(samples: list[Sample]) -> list[Sample]:
    """The same samples with advantages of mean 0 and standard deviation 1 (with Bessel's correction)."""
    mean = sum(sample.advantage for sample in samples) / len(samples)
    std = math.sqrt(sum((sample.advantage - mean) ** 2 for sample in samples) / (len(samples) - 1))
    return [sample._replace(advantage=(sample.advantage - mean) / (std + 1e-8)) for sample in samples]


@torch.no_grad()
def samples_of(params: Parameters, rollout: list[list[Step]], args: Any, arch: str) -> list[list[Sample]]:
    """The samples of each environment, by the agent that has made the rollout."""
    samples = []
    for steps in rollout:
        for t, step in enumerate(steps):
            logprob, value = policy_of(params, step.obs)[step.action].log(), value_of(params, step.obs, arch)
            advantage = advantage_of(params, steps[t:], args, arch)
            samples.append(Sample(step.obs, step.action, logprob, value, advantage, value + advantage))
    return split(normalized(samples) if args.norm_adv == "batch" else samples, args.num_steps)


# ------------------------------------------------------------------------------------------------- losses and descent


def policy_loss(policy: Tensor, sample: Sample, args: Any) -> Tensor:
    """PPO, equation 7, and the entropy bonus of equation 9; negative, since both are to be maximised. With `kl_penalty`
    (PPG, section 3.5), the ratio is not clipped; a penalty on the KL divergence is, as half the squared log-ratio."""
    penalty = getattr(args, "kl_penalty", None)
    logratio = policy[sample.action].log() - sample.old_logprob
    ratio, advantage = logratio.exp(), sample.advantage
    if penalty is None:
        clipped = max(1 - args.clip_coef, min(1 + args.clip_coef, ratio))
        objective = min(ratio * advantage, clipped * advantage)
    else:
        objective = ratio * advantage - penalty * logratio**2 / 2
    entropy = -(policy * policy.log()).sum()
    return -(objective + args.ent_coef * entropy)


def value_loss(value: Tensor, sample: Sample, args: Any) -> Tensor:
    """Half the squared error, weighted. With `clip_coef_vf`, that of the value or of the value clipped to this distance
    from the old one, whichever is larger (baselines)."""
    clip = getattr(args, "clip_coef_vf", None)
    error = (value - sample.target) ** 2
    if clip is not None:
        change = max(-clip, min(clip, value - sample.old_value))
        error = max(error, (sample.old_value + change - sample.target) ** 2)
    return args.vf_coef * error / 2


def mean(losses: Iterator[Tensor]) -> Tensor:
    losses = list(losses)
    return sum(losses) / len(losses)


def descend(params: Parameters, optimizer: Optimizer, loss: Tensor, rate: float, max_norm: float | None) -> None:
    """Take one step along the gradients, scaled down together to an L2 norm of `max_norm` (but for PyTorch's 1e-6)."""
    gradients = torch.autograd.grad(loss, list(params.values()), materialize_grads=True)
    for value, gradient in zip(params.values(), gradients, strict=True):
        value.grad = gradient
    if max_norm is not None:
        clip_grad_norm_(params.values(), max_norm)
    optimizer.param_groups[0]["lr"] = rate
    optimizer.step()


# --------------------------------------------------------------------------------------------------------- algorithms


def split(items: list, length: int) -> list[list]:
    """The items in lists of this length; the last may be shorter."""
    return [items[start : start + length] for start in range(0, len(items), length)]


def shuffled(items: list, orders: Iterator[list[int]]) -> list:
    """The items in the next of the orders."""
    order = next(orders)
    assert sorted(order) == list(range(len(items)))
    return [items[number] for number in order]


def iterations(history: list[list[Step]], args: Any) -> Iterator[tuple[list[list[Step]], float]]:
    """Each iteration's rollout, with scaled rewards, and what is left of the learning rate. `history` has the steps of
    each environment."""
    scale, count = RewardScale(len(history), args.norm_reward_gamma), len(history[0]) // args.num_steps
    for i, rollout in enumerate(zip(*(split(steps, args.num_steps) for steps in history), strict=True)):
        yield (
            scale(rollout, range(len(history))) if args.norm_reward == "return" else rollout,
            1 - i / count if args.anneal_lr else 1.0,
        )


def ppo(params: Parameters, history: list[list[Step]], orders: Iterator[list[int]], args: Any) -> None:
    """PPO, algorithm 1: train `params`, in place."""
    adam = Adam(params.values(), eps=args.adam_eps)
    for rollout, left in iterations(history, args):
        by_time = zip(*samples_of(params, rollout, args, "shared"), strict=True)
        samples = [sample for step in by_time for sample in step]  # step 0 of all environments, then step 1, ...
        for _ in range(args.update_epochs):
            for minibatch in split(shuffled(samples, orders), len(samples) // args.num_minibatches):
                minibatch = normalized(minibatch) if args.norm_adv == "minibatch" else minibatch
                losses = [policy_loss(policy_of(params, s.obs), s, args) for s in minibatch]
                loss = mean(losses) + mean(value_loss(value_of(params, s.obs, "shared"), s, args) for s in minibatch)
                descend(params, adam, loss, args.learning_rate * left, args.max_grad_norm)


def units_of(rollouts: list[list], width: int, whole: bool) -> list[list]:
    """What is shuffled: whole rollouts of one environment, as in OpenAI's PPG, or single steps, as in PPO, of `width`
    rollouts side by side."""
    if whole:
        return rollouts
    by_time = (step for iteration in split(rollouts, width) for step in zip(*iteration, strict=True))
    return [[sample] for step in by_time for sample in step]


def ppg(params: Parameters, history: list[list[Step]], orders: Iterator[list[int]], args: Any) -> None:
    """PPG, algorithm 1: train `params`, in place. As in OpenAI's code, policy and value have one loss and one Adam if
    they have as many passes, and else passes and an Adam of their own."""
    adam, value_adam, aux_adam = (Adam(params.values(), eps=args.adam_eps) for _ in range(3))
    passes = ["both"] * args.e_policy
    if args.e_policy != args.e_value:
        passes = ["value"] * args.e_value + ["policy"] * args.e_policy
    phase, last = [], len(history[0]) // args.num_steps
    for i, (rollout, left) in enumerate(iterations(history, args), start=1):
        samples, rate = samples_of(params, rollout, args, args.arch), args.learning_rate * left
        units = units_of(samples, args.num_envs, args.whole_rollouts)
        for learns in passes:
            for drawn in split(shuffled(units, orders), len(units) // args.num_minibatches):
                minibatch, loss = [sample for unit in drawn for sample in unit], 0.0
                minibatch = normalized(minibatch) if args.norm_adv == "minibatch" else minibatch
                if learns != "value":
                    loss = loss + mean(policy_loss(policy_of(params, s.obs), s, args) for s in minibatch)
                if learns != "policy":
                    loss = loss + mean(value_loss(value_of(params, s.obs, args.arch), s, args) for s in minibatch)
                optimizer = value_adam if learns == "value" else adam
                descend(params, optimizer, loss, rate, args.max_grad_norm)
        phase += samples
        if i % args.n_pi == 0 or i == last:
            auxiliary_phase(params, aux_adam, phase, orders, args.aux_learning_rate * left, args)
            phase = []


def auxiliary_phase(
    params: Parameters, adam: Optimizer, phase: list[list[Sample]], orders: Iterator[list[int]], rate: float, args: Any
) -> None:
    """PPG, section 2: L^joint = L^aux + beta_clone KL(old policy || policy), and L^value, on a phase's samples."""
    with torch.no_grad():
        phase = [[(sample, policy_of(params, sample.obs)) for sample in samples] for samples in phase]
    units = units_of(phase, args.num_envs, args.whole_rollouts)
    size = len(units) // len(phase) * args.num_aux_rollouts * args.num_aux_grad_accum
    for _ in range(args.e_aux):
        for minibatch in split(shuffled(units, orders), size):
            losses = []
            for sample, old_policy in (each for samples in minibatch for each in samples):
                aux_value = linear(params, "aux_value_head", features_of(params, "encoder", sample.obs))[0]
                kl = (old_policy * (old_policy / policy_of(params, sample.obs)).log()).sum()
                errors = aux_value - sample.target, value_of(params, sample.obs, args.arch) - sample.target
                losses.append(errors[0] ** 2 / 2 + args.beta_clone * kl + errors[1] ** 2 / 2)
            descend(params, adam, mean(losses), rate, args.max_grad_norm)


# ------------------------------------------------------------------------------------------------------------- IMPALA

State = tuple[Tensor, Tensor] | None  # h and c of the LSTM


class Played(NamedTuple):
    """An unroll of one environment: T steps, and one more of which only the observation counts."""

    env: int
    steps: list[Step]
    last_values: list[float]  # the discounted value of the last observation where a time limit has cut an episode, or 0
    probabilities: list[Tensor]  # of the actions, by the policy that took them
    state: State  # before the first observation


def view_of(params: Parameters, obs: Tensor, state: State) -> tuple[Tensor, Tensor, State]:
    """The probability of each action, the value, and the next state."""
    features = features_of(params, "encoder", obs)
    if state is not None:  # Hochreiter and Schmidhuber 1997 with forget gates, which PyTorch keeps second of four
        gates = params["lstm.weight_ih"] @ features + params["lstm.bias_ih"]
        i, f, g, o = (gates + params["lstm.weight_hh"] @ state[0] + params["lstm.bias_hh"]).split(len(features))
        cell = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
        features = o.sigmoid() * cell.tanh()
        state = features, cell
    policy = linear(params, "policy_head.linear", features).softmax(0)
    return policy, linear(params, "value_head", features)[0], state


def next_state(step: Step, state: State) -> State:
    """The state before the next observation: zeros where this step has ended an episode."""
    ended = state is not None and (step.terminated or step.truncated)
    return tuple(torch.zeros_like(each) for each in state) if ended else state


@torch.no_grad()
def play(params: Parameters, env: int, steps: list[Step], state: State, args: Any) -> tuple[Played, State]:
    """What an actor hands over, and its next state."""
    last_values, probabilities, first = [], [], state
    for step in steps[:-1]:
        policy, _, state = view_of(params, step.obs, state)
        probabilities.append(policy[step.action])
        cut = step.truncated and not step.terminated
        last_values.append(args.gamma * view_of(params, step.next_obs, state)[1] if cut else 0.0)
        state = next_state(step, state)
    return Played(env, steps, last_values, probabilities, first), state


def outputs_of(params: Parameters, unroll: Played) -> tuple[list[Tensor], list[Tensor]]:
    """The policies and the values at the T + 1 observations of an unroll."""
    policies, values, state = [], [], unroll.state
    for step in unroll.steps:
        policy, value, state = view_of(params, step.obs, state)
        policies, values, state = [*policies, policy], [*values, value], next_state(step, state)
    return policies, values


@torch.no_grad()
def unroll_samples(policies: list[Tensor], values: list[Tensor], unroll: Played, args: Any) -> list[Sample]:
    """The T samples of an unroll, with V-trace's targets and advantages, from the learner's policies and values."""
    steps = unroll.steps[:-1]
    gammas = [args.gamma * (not (step.terminated or step.truncated)) for step in steps]
    probabilities = [policy[step.action] for policy, step in zip(policies, steps, strict=False)]
    ratios = [ours / acting for ours, acting in zip(probabilities, unroll.probabilities, strict=True)]
    rewards = [step.reward + value for step, value in zip(steps, unroll.last_values, strict=True)]
    targets, advantages = vtrace(ratios, rewards, gammas, values, args)
    return [
        Sample(step.obs, step.action, probabilities[t].log(), values[t].detach(), advantages[t], targets[t])
        for t, step in enumerate(steps)
    ]


def vtrace(ratios: list, rewards: list, gammas: list, values: list, args: Any) -> tuple[list, list]:
    """V-trace's targets (equation 1) and policy-gradient advantages (section 4.2) for T steps, from T + 1 values.
    `gammas` are 0 where an episode ends."""
    rho, c = [min(args.rho_bar, r) for r in ratios], [args.vtrace_lambda * min(args.c_bar, r) for r in ratios]
    targets = list(values)
    for s in range(len(rewards)):
        for t in range(s, len(rewards)):
            delta = rho[t] * (rewards[t] + gammas[t] * values[t + 1] - values[t])
            targets[s] = targets[s] + math.prod(gammas[i] * c[i] for i in range(s, t)) * delta
    advantages = [
        min(args.pg_rho_bar, ratios[s]) * (rewards[s] + gammas[s] * targets[s + 1] - values[s])
        for s in range(len(rewards))
    ]
    return targets[:-1], advantages


def impala_loss(params: Parameters, unroll: Played, args: Any) -> Tensor:
    """The sum over an unroll of the policy-gradient loss, half the squared errors of the values, and the entropies."""
    loss, (policies, values) = 0.0, outputs_of(params, unroll)
    for t, sample in enumerate(unroll_samples(policies, values, unroll, args)):
        entropy = -(policies[t] * policies[t].log()).sum()
        loss = loss - sample.advantage * policies[t][sample.action].log() - args.ent_coef * entropy
        loss = loss + value_loss(values[t], sample, args)
    return loss


def appo_pass(
    params: Parameters, adam: Optimizer, batch: list[Played], orders: Iterator[list[int]], rate: float, args: Any
) -> None:
    """V-trace once for the batch, then PPO's losses on minibatches of the steps drawn: with an LSTM of whole unrolls,
    else of single steps. The old policy is that before the first minibatch, not the one that acted."""
    samples = [unroll_samples(*outputs_of(params, unroll), unroll, args) for unroll in batch]
    units = units_of([[(b, t) for t in range(args.num_steps)] for b in range(len(batch))], len(batch), args.use_lstm)
    drawn = shuffled(units, orders)[: math.ceil(args.sample_fraction * len(units))]
    for numbers in torch.arange(len(drawn)).tensor_split(args.num_minibatches):
        outputs, losses = [outputs_of(params, unroll) for unroll in batch], []
        for b, t in (place for number in numbers for place in drawn[number]):
            (policies, values), sample = outputs[b], samples[b][t]
            losses.append(policy_loss(policies[t], sample, args) + value_loss(values[t], sample, args))
        descend(params, adam, mean(losses), rate, args.max_grad_norm)


TREATMENTS = {
    "none": lambda reward: reward,
    "clip": lambda reward: max(-1.0, min(1.0, reward)),
    "soft-asymmetric": lambda reward: 5 * math.tanh(reward / 5) * (0.3 if reward < 0 else 1.0),  # for DMLab
}


def treat_rewards(batch: list[Played], scale: RewardScale, args: Any) -> list[Played]:
    """The same unrolls with rewards as `--norm-reward` says."""
    rollout = [unroll.steps[:-1] for unroll in batch]
    if args.norm_reward == "return":
        rollout = scale(rollout, [unroll.env for unroll in batch])
    else:
        treat = TREATMENTS[args.norm_reward]
        rollout = [[step._replace(reward=treat(step.reward)) for step in steps] for steps in rollout]
    return [each._replace(steps=[*steps, each.steps[-1]]) for each, steps in zip(batch, rollout, strict=True)]


def impala(params: Parameters, history: list[list[Step]], orders: Iterator[list[int]], args: Any) -> None:
    """IMPALA with RMSProp (losses are means over T x B steps, as are a script's settings), or asynchronous PPO: train
    `params`, in place. Rounds of one unroll of each environment are played by the newest parameters, and wait for their
    batch."""
    size, start = args.num_steps * args.batch_size, None
    if args.use_lstm:
        start = tuple(torch.zeros(2, args.feature_dim))
    adam, rmsprop = Adam(params.values(), eps=args.adam_eps), RMSprop(params.values(), alpha=0.99, eps=args.rmsprop_eps)
    states, waiting, played = [start] * len(history), [], 0
    scale = RewardScale(len(history), args.norm_reward_gamma)
    for i in range(args.total_timesteps // size):
        while len(waiting) < args.batch_size:
            for n, steps in enumerate(history):
                unroll, states[n] = play(params, n, steps[played : played + args.num_steps + 1], states[n], args)
                waiting.append(unroll)
            played += args.num_steps
        batch, waiting = treat_rewards(waiting[: args.batch_size], scale, args), waiting[args.batch_size :]
        rate = args.learning_rate * (1 - i * size / args.total_timesteps if args.anneal_lr else 1)
        rate *= 0.5 if args.halve_lr_at and i * size >= args.halve_lr_at else 1
        if args.preset == "appo":
            appo_pass(params, adam, batch, orders, rate, args)
        else:
            loss = sum(impala_loss(params, unroll, args) for unroll in batch) / size
            descend(params, rmsprop, loss, rate, args.max_grad_norm)
