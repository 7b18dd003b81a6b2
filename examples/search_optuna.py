"""Search widths, kernel sizes, batch and learning rate with Optuna; processes share one database of measurements.

    python search_optuna.py --folder search              # two processes; best trial, and what was measured
    python search_optuna.py --folder search              # again: a second study, which measures nothing new

It needs optuna and scikit-learn: pip install '.[examples]' in the clone. Optuna keeps the studies, and ends the trials
that do worse than others; mucudnn.optimize is all that is added to a trial.
"""

import argparse
import multiprocessing
from functools import partial
from pathlib import Path

import optuna
import torch
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from searched_training import BATCH_SIZES, KERNEL_SIZES, LEARNING_RATES, WIDTHS, digits, epochs, network, tuned


def accuracy(trial, data, database):
    """Train what the trial suggests; return the accuracy that is reached."""
    widths = [trial.suggest_categorical(f"width_{layer}", WIDTHS) for layer in (1, 2)]
    kernel_size = trial.suggest_categorical("kernel_size", KERNEL_SIZES)
    batch = trial.suggest_categorical("batch", BATCH_SIZES)
    learning_rate = trial.suggest_float("learning_rate", *LEARNING_RATES, log=True)
    torch.manual_seed(0)
    model, results, seconds = tuned(network(widths, kernel_size), data[0][0][:batch], database)
    trial.set_user_attr("measured", results)
    trial.set_user_attr("tuning_s", seconds)
    for epoch, reached in enumerate(epochs(model, data, batch, learning_rate)):
        trial.report(reached, epoch)
        if trial.should_prune():
            raise optuna.TrialPruned
    return reached


def search(worker, name, options):
    """Run this process's share of the trials."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    torch.set_num_threads(options.threads)
    # What it suggests depends on no other process, so that a second study tries the same.
    sampler = optuna.samplers.RandomSampler(seed=worker)
    study = optuna.load_study(study_name=name, storage=storage_in(options.folder), sampler=sampler, pruner=PRUNER)
    trials = len(range(worker, options.trials, options.workers))
    study.optimize(partial(accuracy, data=digits(), database=options.folder / "measurements.sqlite"), n_trials=trials)


PRUNER = optuna.pruners.MedianPruner(n_startup_trials=4)


def storage_in(folder):
    return JournalStorage(JournalFileBackend(str(folder / "studies.journal")))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("search"), help="of the studies and the database")
    parser.add_argument("--trials", type=int, default=12)
    parser.add_argument("--workers", type=int, default=2, help="processes")
    parser.add_argument("--threads", type=int, default=1, help="of each process; times depend on it")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    storage = storage_in(options.folder)
    name = f"digits {len(storage.get_all_studies()) + 1}"
    study = optuna.create_study(study_name=name, storage=storage, direction="maximize")

    spawned = multiprocessing.get_context("spawn")
    processes = [spawned.Process(target=search, args=(worker, name, options)) for worker in range(options.workers)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()

    if failed := [process.exitcode for process in processes if process.exitcode]:
        raise SystemExit(f"{len(failed)} of {options.workers} processes failed")
    pruned = sum(trial.state is optuna.trial.TrialState.PRUNED for trial in study.trials)
    print(f"{name}: {len(study.trials)} trials, {pruned} of them ended early")
    print(f"best accuracy {study.best_value:.1%} with {study.best_params}")
    results = [trial.user_attrs["measured"] for trial in study.trials]
    print(f"{sum(map(bool, results))} tunings measured {sum(results)} results; {results.count(0)} measured nothing")


if __name__ == "__main__":
    main()
