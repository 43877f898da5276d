"""gpurl's own trainer on Chasing, Pursuit and Gymnasium's Pendulum.

The clock is read after every iteration and not in the environment, because CUDA graphs and the
persistent rollout call no Python. An interval is a collection and an update, as for the other
trainers.
"""

import torch

from benchmarks.peers import job as cases
from benchmarks.peers.job import (
    PENDULUM,
    TENSOR_TASK,
    Job,
    Outcome,
    rollouts,
)
from benchmarks.timing import now
from benchmarks.training import ready_trainer
from gpurl.envs.registry import make_env
from gpurl.run.evaluator import evaluate, greedy
from gpurl.run.settings import make_settings

ENVS = {"chasing": "chasing", "pursuit": "benchmarks.peers.pursuit:Pursuit"}
MODES = {"default": {}, "tf32": {"precision": "tf32"}, "bf16": {"precision": "bf16"}}


def tensor_task(job: Job) -> Outcome:
    """gpurl on Chasing or Pursuit."""
    device = torch.device(job.device)
    network = {"hidden": list(job.hidden), "activation": job.activation}
    shape = {
        "num_envs": job.num_envs,
        "horizon": job.horizon,
        "epochs": job.epochs,
        "minibatches": job.minibatches,
        "seed": job.seed,
    }
    plain = {"schedule": "constant", "normalize_obs": False, "normalize_value": False}
    trainer = ready_trainer(
        make_settings(
            "ppo",
            ENVS[job.case],
            **TENSOR_TASK,
            **shape,
            **plain,
            **MODES[job.mode],
            network=network,
        ),
        device,
    )
    marks = []
    for _ in range(rollouts(job)):
        trainer.iterate()
        marks.append(now(device))
    return Outcome(marks, job.num_envs * job.horizon, float(trainer.engine.buffer["reward"].mean()))


def pendulum(job: Job) -> Outcome:
    """gpurl on Gymnasium's own Pendulum-v1."""
    device, rows = torch.device(job.device), job.num_envs * cases.PENDULUM_HORIZON
    shape = {
        "num_envs": job.num_envs,
        "horizon": cases.PENDULUM_HORIZON,
        "epochs": cases.PENDULUM_EPOCHS,
        "minibatches": rows // cases.PENDULUM_BATCH,
    }
    plain = {
        "schedule": "constant",
        "normalize_obs": False,
        "normalize_value": False,
        "normalize_advantage": "minibatch",
        "seed": job.seed,
    }
    network = {"hidden": list(job.hidden), "activation": job.activation}
    name = "gymnasium_cpu:Pendulum-v1"
    trainer = ready_trainer(
        make_settings("ppo", name, **PENDULUM, **shape, **plain, network=network), device
    )
    marks = [now(device)]
    while trainer.steps < job.total_steps:
        trainer.iterate()
        marks.append(now(device))
    score = evaluate(
        greedy(trainer.algorithm),
        make_env(name, cases.PENDULUM_EPISODES, device),
        cases.PENDULUM_EPISODES,
    )["eval/mean_reward"]
    return Outcome(marks, rows, score)
