"""Two trials of Ray Tune under PopulationBasedTraining: `python -m tests.cluster.tuned FOLDER`
prints how they ended as JSON.
"""

import json
import sys
from pathlib import Path

from gpurl.checkpoints.folders import load_checkpoint
from gpurl.cluster.ray_places import connect
from gpurl.cluster.ray_tune import tune_trainable

EVERY, SLICES = 2048, 2


def main(folder: Path) -> None:
    connect(None)
    from ray import tune
    from ray.tune.schedulers import PopulationBasedTraining

    trainable = tune_trainable(
        *("ppo", "pendulum", EVERY),
        num_envs=32,
        horizon=16,
        minibatches=2,
        total_steps=SLICES * EVERY,
        eval_episodes=8,
        preset="none",
        schedule="constant",
        device="cpu",
        threads=1,
    )
    scheduler = PopulationBasedTraining(
        time_attr="steps",
        metric="return",
        mode="max",
        perturbation_interval=EVERY,
        hyperparam_mutations={"learning_rate": tune.loguniform(1e-5, 1e-2)},
        quantile_fraction=0.5,
        synch=True,
    )
    results = tune.Tuner(
        tune.with_resources(trainable, {"cpu": 1}),
        param_space={"learning_rate": tune.loguniform(1e-5, 1e-2)},
        tune_config=tune.TuneConfig(scheduler=scheduler, num_samples=2, reuse_actors=False),
        run_config=tune.RunConfig(name="tuned", storage_path=str(folder), verbose=0),
    ).fit()
    trials = []
    for each in results:
        parts, manifest = load_checkpoint(Path(each.checkpoint.path))
        (optimizer,) = parts["training"]["optimizers"].values()
        trials.append(
            {
                "steps": manifest["step"],
                "rate": each.config["learning_rate"],
                "rate_in_run": float(optimizer["learning_rate"]),
            }
        )
    exploited = scheduler._num_perturbations
    print(json.dumps({"errors": results.num_errors, "trials": trials, "exploited": exploited}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
