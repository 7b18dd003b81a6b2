"""The search of search_optuna.py with Ray Tune: its processes share one database of measurements.

    python search_ray.py --folder search              # best trial, and what was measured
    python search_ray.py --folder search              # again: measures nothing new

It needs ray[tune] and scikit-learn: pip install 'ray[tune]' scikit-learn.
"""

import argparse
from functools import partial
from pathlib import Path

import ray
import torch
from ray import tune
from ray.tune.schedulers import ASHAScheduler
from ray.tune.search import BasicVariantGenerator
from searched_training import (
    BATCH_SIZES,
    EPOCHS,
    KERNEL_SIZES,
    LEARNING_RATES,
    WIDTHS,
    digits,
    epochs,
    network,
    tuned,
)


def trial(given, database):
    """Train what the search suggests, and report the accuracy after each epoch."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data, batch = digits(), given["batch"]
    widths = given["width_1"], given["width_2"]
    model, results, seconds = tuned(network(widths, given["kernel_size"]), data[0][0][:batch], database)
    for reached in epochs(model, data, batch, given["learning_rate"]):
        tune.report({"accuracy": reached, "measured": results, "tuning_s": seconds})


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("search"), help="of results and the database")
    parser.add_argument("--trials", type=int, default=12)
    parser.add_argument("--workers", type=int, default=2, help="processes")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    database = options.folder.resolve() / "measurements.sqlite"  # Ray's processes have folders of their own

    ray.init(num_cpus=options.workers, include_dashboard=False)
    space = {
        "width_1": tune.choice(WIDTHS),
        "width_2": tune.choice(WIDTHS),
        "kernel_size": tune.choice(KERNEL_SIZES),
        "batch": tune.choice(BATCH_SIZES),
        "learning_rate": tune.loguniform(*LEARNING_RATES),
    }
    config = tune.TuneConfig(
        metric="accuracy",
        mode="max",
        num_samples=options.trials,
        search_alg=BasicVariantGenerator(random_state=0),
        scheduler=ASHAScheduler(max_t=EPOCHS),
    )
    run = tune.RunConfig(storage_path=str(database.parent), verbose=1)
    found = tune.Tuner(partial(trial, database=database), param_space=space, tune_config=config, run_config=run).fit()

    results = [one.metrics["measured"] for one in found]
    best = found.get_best_result()
    print(f"best accuracy {best.metrics['accuracy']:.1%} with {best.config}")
    print(f"{sum(map(bool, results))} tunings measured {sum(results)} results; {results.count(0)} measured nothing")


if __name__ == "__main__":
    main()
