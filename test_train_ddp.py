"""Tests of train_ddp.py: real process groups on the CPU, no network, no mocks of torch or Keras.

This process imports both once and does no arithmetic in torch, which would hang a forked child. What
a test runs, it runs in a `Child`: forked, so that nothing is imported again.
"""

import contextlib
import csv
import multiprocessing
import os
import pickle
import re
import resource
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections import Counter
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

import train_ddp  # before Keras, whose backend it sets

# isort: split
import keras
import torch
import torch.distributed as dist
from keras import layers
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset, Subset

HERE, SCRIPT = Path(train_ddp.__file__).parent, train_ddp.__file__
FILES = {"model.keras", "history.csv", "checkpoint.pt"}
TINY = ["--nproc", "2", "--device", "cpu", "--batch-size", "8"]
FORK = [*TINY, "--start-method", "fork"]
GPU = pytest.mark.skipif(not torch.cuda.device_count(), reason="needs a GPU")
register = keras.saving.register_keras_serializable("test")


# ---- Running things in processes of their own ----
class Ended(NamedTuple):
    code: int
    out: str
    err: str
    result: object


class Child:
    """A forked process in a session of its own that runs `function(*args)`."""

    def __init__(self, function, *args):
        self.files = [tempfile.TemporaryFile() for _ in range(3)]  # noqa: SIM115 - until it is freed
        fork = multiprocessing.get_context("fork")
        self.process = fork.Process(target=self.run, args=(function, args))
        self.process.start()
        self.pid = self.process.pid

    def run(self, function, args):
        os.setsid()
        for number, file in enumerate(self.files[:2], start=1):
            os.dup2(file.fileno(), number)
        sys.stdout, sys.stderr = open(1, "w"), open(2, "w")  # noqa: SIM115 - not those of pytest
        pickle.dump(function(*args), self.files[2])
        self.files[2].flush()

    def left(self):
        """The processes of the session, or with its name in their environment, that still run."""
        found, name = [], f"CHILD={self.pid}".encode()
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # ended in the meantime
                state, *_, session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
                named = name in (folder / "environ").read_bytes().split(b"\0")
                if state != "Z" and (int(session) == self.pid or named):
                    found.append(int(folder.name))
        return found

    def wait(self, timeout=100):
        """Waits until the process has ended, and sees that it left none behind."""
        ended = until(lambda: self.process.exitcode is not None, timeout)
        alone = until(lambda: not self.left(), timeout=10)
        for pid in self.left():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        out, err, result = (file.seek(0) or file.read() for file in self.files)
        out, err = out.decode(), err.decode()
        assert ended, f"still ran after {timeout} s: {out[-999:]}{err}"
        assert alone, f"left a process behind: {out[-999:]}{err}"
        return Ended(self.process.exitcode, out, err, pickle.loads(result) if result else None)


def until(condition, timeout=60):
    """Waits until the condition holds; says whether it did before the safety net of `timeout`."""
    end = time.monotonic() + timeout
    while not (met := condition()) and time.monotonic() < end:
        time.sleep(0.02)
    return met


def call(function, *args):
    """Returns what the function returns in a child, on the CPU."""

    def run():
        with keras.device("cpu"):
            return function(*args)

    ended = Child(run).wait()
    assert ended.code == 0, ended.err
    return ended.result


def python(*args, **environ):
    """Starts a fresh interpreter, which inherits nothing of this process."""

    def replace():
        os.chdir("/")
        os.environ.update({"PYTHONPATH": str(HERE)} | environ, CHILD=str(os.getpid()))
        os.execv(sys.executable, [sys.executable, *map(str, args)])

    return Child(replace)


def on_replicas(world, function, *args, device="cpu"):
    """Runs `function(rank, *args)` on replicas in a process group; returns their results."""

    def replica(rank):
        store = dist.FileStore(f"{folder}/store", world)
        place = train_ddp.setup_device(rank, world, device=device, backend="gloo", store=store)
        with keras.device(str(place)):
            result = function(rank, *args)
        train_ddp.cleanup()
        return result

    with tempfile.TemporaryDirectory() as folder:
        ended = [child.wait() for child in [Child(replica, rank) for rank in range(world)]]
    assert not any(run.code for run in ended), "".join(run.err for run in ended)
    return [run.result for run in ended]


# ---- Small data and models ----
class Points(Dataset):
    """An ordinary map-style data set: 6 floats, or what `inputs` makes of them, and 10 labels.

    With a `trap` of (rank, count, action), that replica calls the action at that access.
    """

    def __init__(self, samples, seed=0, inputs=lambda x: x, trap=None):
        random = np.random.default_rng(seed)
        self.x = random.normal(size=(samples, 6)).astype("float32")
        self.y = random.integers(0, 10, samples)
        self.inputs, self.trap, self.count = inputs, trap, 0

    def __len__(self):
        return len(self.y)

    def __getitem__(self, index):
        self.count += 1
        if self.trap and (dist.get_rank(), self.count) == self.trap[:2]:
            self.trap[2]()
        return self.inputs(self.x[index]), self.y[index]


def points(samples=64, tests=20, trap=None, test_trap=None, **options):
    """Returns a `get_dataset`. Of 64 samples each of 2 replicas takes 32 an epoch, and 8 to build."""
    return lambda data=None: (
        Points(samples, trap=trap, **options),
        Points(tests, seed=1, trap=test_trap, **options),
    )


small_data = points()


def save_npz(path, **changes):
    """Writes 64 and 20 images in the layout of Keras' MNIST."""
    random = np.random.default_rng(0)
    x, y = random.integers(0, 256, (64, 28, 28), "uint8"), random.integers(0, 10, 64)
    arrays = {"x_train": x, "y_train": y, "x_test": x[:20], "y_test": y[:20]} | changes
    np.savez(path, **{name: array for name, array in arrays.items() if array is not None})
    return path


def chain(*steps, inputs=6):
    x = first = keras.Input((inputs,))
    for step in steps:
        x = step(x)
    return keras.Model(first, x)


def small_model(units=16):
    """Batch normalization, and noise from both sources."""
    norm = layers.BatchNormalization(momentum=0.5)
    noise = layers.Dropout(0.1), layers.Dropout(0.1, seed=1)
    return chain(layers.Dense(units, use_bias=False), norm, layers.ReLU(), *noise, layers.Dense(10))


def wide_model():
    """Its files are big, and its checkpoint is thrice its model.keras."""
    return small_model(2048)


def linear_model():
    return chain(layers.Dense(10))


# ---- Training, and what it leaves ----
def start(flags="", folder=None, get_model=small_model, get_dataset=small_data):
    """Starts `main` with two forked replicas, unless the flags say something else."""
    args = *FORK, *flags.split(), *(["--output-dir", str(folder)] if folder else [])
    return Child(train_ddp.main, args, get_model, get_dataset)


def train(*args, **options):
    return start(*args, **options).wait()


def trained(*args, **options):
    run = train(*args, **options)
    assert run.code == 0, run.err
    assert run.err == ""
    return run


def message(run):
    """Returns the one line that says what was wrong, before the one that says what was kept."""
    first, *others = run.err.splitlines()
    assert run.code == 1 and len(others) < 2 and "Traceback" not in run.err, run.err
    return first


def history(folder):
    with open(folder / "history.csv") as file:
        return [{name: float(x) for name, x in row.items()} for row in csv.DictReader(file)]


def contents(folder):
    return {path: path.is_dir() or path.read_bytes() for path in folder.rglob("*")}


def arrays(variables):
    return [getattr(v, "value", v).detach().cpu().numpy() for v in variables]


def checkpoint(folder):
    """Returns epochs, weights and everything of a checkpoint."""

    def read():
        found = torch.load(folder / "checkpoint.pt", weights_only=True)
        leaves = keras.tree.flatten([found["variables"], found["optimizer"]])
        leaves = [x.numpy().tobytes() if torch.is_tensor(x) else x for x in leaves]
        return [row[:5] for row in found["history"]], arrays(found["variables"]), leaves

    return call(read)


def saved_weights(folder):
    return call(lambda: keras.saving.load_model(folder / "model.keras").get_weights())


def bits(folder):
    """What a run left but for its flags and times, in a form that compares equal if all bits are."""
    rows, _, leaves = checkpoint(folder)
    assert rows == [list(row.values())[:5] for row in history(folder)]
    return rows, leaves, [weight.tobytes() for weight in saved_weights(folder)]


def alone(folder, data):
    """Returns mean loss and hits of the saved model on the data, in one process and one batch."""

    def run():
        model = keras.saving.load_model(folder / "model.keras")
        x, y = map(torch.from_numpy, (data.x, data.y))
        outputs = model(x, training=False).float()
        return cross_entropy(outputs, y).item(), (outputs.argmax(-1) == y).sum().item()

    return call(run)


def check_evaluation(folder, tests=20, tolerance=1e-4):
    """Sees that the last reported evaluation is that of the saved model alone, to the sample."""
    (loss, hits), row = alone(folder, Points(tests, seed=1)), history(folder)[-1]
    assert row["val_accuracy"] * tests == pytest.approx(hits, abs=1e-6)
    assert row["val_loss"] == pytest.approx(loss, abs=tolerance)


def fit(rank, get_model, data, epochs=2, rate=0.0, seed=0, batch_size=8):
    """Trains a replica with SGD; returns the model, and outputs, targets and losses of its steps."""
    keras.utils.set_random_seed(rank)
    model, steps = get_model(), []
    optimizer = torch.optim.SGD([v.value for v in model.trainable_variables], lr=rate)
    place = rank, dist.get_world_size(), batch_size
    loader = train_ddp.prepare_dataloader(data, *place, seed=seed)
    tests = train_ddp.prepare_dataloader(Subset(data, range(4)), *place, training=False)

    def loss_fn(outputs, targets):
        loss = cross_entropy(outputs, targets % 10)
        if torch.is_grad_enabled():  # not in the evaluation
            steps.append(arrays([outputs, targets, loss]))
        return loss

    ddp_model = DistributedDataParallel(model)
    train_ddp.train_model(ddp_model, loader, epochs, optimizer, loss_fn, tests)
    return model, zip(*steps)


# ---- Data and inputs ----
def test_an_epoch_takes_every_sample_once_and_each_epoch_in_another_order():
    def orders(rank, seed):
        data = Points(100)
        data.y = np.arange(100)
        _, (_, targets, _) = fit(rank, linear_model, data, seed=seed)
        return np.concatenate(targets).reshape(2, -1)  # (epoch, sample)

    ranks, others = (np.array(on_replicas(3, orders, seed)) for seed in (0, 1))
    for epoch in 0, 1:
        times = Counter(ranks[:, epoch].ravel().tolist())
        assert sorted(times.values()) == [1] * 98 + [2] * 2  # 100 samples, padded to 3 * 34
    assert (ranks[:, 0] != ranks[:, 1]).any() and (ranks != others).any()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_loaders_take_ours_a_subset_and_any_map_style_data_set(tmp_path, num_workers):
    def read():
        ours, _ = train_ddp.get_dataset(str(save_npz(tmp_path / "data.npz")))
        for data in Points(20), ours, Subset(ours, range(5, 25)):
            options = {"training": False, "num_workers": num_workers}
            x, y = zip(*train_ddp.prepare_dataloader(data, 1, 2, 4, **options))
            assert len(y[0]) == len(y[1]) == 4
            assert (np.concatenate(y) == [data[i][1] for i in range(1, len(data), 2)]).all()
        return x[0].dtype, tuple(x[0].shape)

    assert call(read) == (torch.uint8, (4, 28, 28, 1))


class Probe(keras.Model):
    """Writes down what it is called with."""

    def __init__(self, folder):
        super().__init__()
        self.folder, self.dense = folder, layers.Dense(10)

    def call(self, inputs, training=None):
        flat = keras.tree.flatten(inputs)
        if flat[0].device.type != "meta":  # Keras builds with it
            seen = keras.tree.map_structure(lambda x: f"{x.dtype} {tuple(x.shape[1:])}", inputs)
            with open(self.folder / str(os.getpid()), "a") as file:
                print(training, seen, file=file)
        flat = [keras.ops.reshape(keras.ops.cast(x, "float32"), (len(x), -1)) for x in flat]
        return self.dense(keras.ops.concatenate(flat, -1))


def ids(x):
    return (x > 0).astype("int64")


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        (lambda x: np.zeros((4, 4, 1), "uint8"), "torch.uint8 (4, 4, 1)"),
        (ids, "torch.int64 (6,)"),
        (
            lambda x: {"a": ids(x), "b": [x, x[:1]]},
            "{'a': 'torch.int64 (6,)', 'b': ['torch.float32 (6,)', 'torch.float32 (1,)']}",
        ),
    ],
)
def test_inputs_pass_as_they_are_and_training_is_true_in_training_only(tmp_path, inputs, expected):
    trained("--epochs 3", get_model=lambda: Probe(tmp_path), get_dataset=points(inputs=inputs))
    calls = [Counter(path.read_text().splitlines()) for path in tmp_path.iterdir()]
    assert len(calls) == 2
    for seen in calls:
        assert seen.keys() == {f"True {expected}", f"False {expected}"}
        assert seen[f"True {expected}"] == 3 * 4 + 1 and seen[f"False {expected}"] >= 3 * 2


def test_a_model_of_token_ids_and_named_inputs_trains(tmp_path):
    def get_model():
        a, b = keras.Input((6,), dtype="int64", name="a"), keras.Input((6,), name="b")
        x = layers.Concatenate()([layers.Flatten()(layers.Embedding(2, 4)(a)), b])
        return keras.Model({"a": a, "b": b}, layers.Dense(10)(layers.BatchNormalization()(x)))

    get_dataset = points(inputs=lambda x: {"a": ids(x), "b": x})
    flags = "--learning-rate 0.05 --epochs 5 --sync-batchnorm"
    trained(flags, tmp_path, get_model, get_dataset)
    losses = [row["loss"] for row in history(tmp_path)]
    assert losses[-1] < losses[0] - 0.1


# ---- The training loop ----
class Penalty(layers.Layer):
    def build(self, shape):
        self.w = self.add_weight(shape=(3,), initializer="ones")

    def call(self, inputs):
        self.add_loss(keras.ops.sum(keras.ops.square(self.w)))
        return inputs


def test_the_models_own_losses_are_reported_and_trained(tmp_path):
    def get_model():
        return chain(Penalty(), layers.Dense(10, kernel_regularizer=keras.regularizers.L2(5.0)))

    trained("--learning-rate 1e-12 --epochs 1", tmp_path / "a", get_model)
    w, kernel, bias = checkpoint(tmp_path / "a")[1]
    data = Points(64)
    logits = data.x @ kernel + bias
    losses = np.log(np.exp(logits).sum(1)) - logits[range(64), data.y]
    expected = losses.mean() + 5 * np.square(kernel).sum() + np.square(w).sum()
    assert history(tmp_path / "a")[0]["loss"] == pytest.approx(expected, abs=1e-4)

    trained("--learning-rate 0.1 --epochs 5", tmp_path / "b", get_model)
    w, trained_kernel, _ = checkpoint(tmp_path / "b")[1]
    assert abs(w).max() < 0.5
    assert np.square(trained_kernel).sum() < np.square(kernel).sum() / 4


def test_constraints_hold_after_training(tmp_path):
    def get_model():
        norm = layers.BatchNormalization(gamma_constraint=keras.constraints.MaxNorm(0.5))
        return chain(norm, layers.Dense(10, kernel_constraint="non_neg"))

    trained("--learning-rate 0.1", tmp_path, get_model)
    gamma, *_, kernel, _ = saved_weights(tmp_path)
    assert kernel.min() == 0 < kernel.max()
    assert np.linalg.norm(gamma) <= 0.5 + 1e-6


class Steps(layers.Layer):
    """Counts in an integer variable, on each replica another number."""

    def build(self, shape):
        self.steps = self.add_weight(shape=(), dtype="int64", initializer="zeros", trainable=False)

    def call(self, inputs, training=None):
        if training:
            self.steps.assign(self.steps + dist.get_rank() + 1)
        return inputs


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=GPU)])
def test_replicas_stay_equal_to_the_bit_and_frozen_and_integer_state_is_left_alone(device):
    """On the GPU over gloo, where two replicas may share one."""

    def get_model():
        frozen = layers.Dense(512, trainable=False, bias_initializer="glorot_normal")
        norm = layers.BatchNormalization(momentum=0.5)
        return chain(frozen, norm, Steps(), layers.Dropout(0.5), layers.Dense(10))

    def replica(rank):
        model, _ = fit(rank, get_model, Points(96), rate=0.1)
        kernel, bias, _, _, mean, variance, steps = arrays(model.variables[:7])
        assert (mean != 0).all() and (variance != 1).all() and steps == 2 * 4 * (rank + 1)
        keras.utils.set_random_seed(0)  # that of rank 0, which the others take up
        for before, after in zip(arrays(get_model().variables[:2]), (kernel, bias)):
            assert before.tobytes() == after.tobytes()
        return [x.tobytes() for x in (mean, variance, *arrays(model.trainable_variables))]

    first, *others = on_replicas(3, replica, device=device)
    assert all(other == first for other in others)


def test_noise_differs_by_replica_epoch_and_seed_and_is_the_same_in_each_run():
    noises = partial(layers.Dropout, 0.5), partial(layers.Dropout, 0.5, seed=1)
    noises = *noises, partial(layers.GaussianNoise, 1.0, seed=1)

    def get_model():
        inputs = keras.Input((6,))
        x = layers.Concatenate()([noise()(inputs) for noise in noises])
        dense = layers.Dense(18, kernel_initializer="identity", use_bias=False)
        return keras.Model(inputs, dense(x))

    def noise(rank, seed):
        _, (outputs, _, _) = fit(rank, get_model, Points(32, inputs=np.ones_like), seed=seed)
        return np.reshape(outputs, (2, 2 * 8, 3, 6))  # (epoch, sample, layer, feature)

    drawn, again, others = (np.array(on_replicas(2, noise, seed)) for seed in (0, 0, 1))
    assert (drawn == again).all()
    for layer in range(3):
        draws = np.concatenate([drawn, others])[..., layer, :].reshape(8, -1)
        assert len({draw.tobytes() for draw in draws}) == 8  # of 2 replicas, epochs and seeds


# ---- Evaluation and what is reported ----
def test_evaluation_equals_that_of_the_saved_model_to_the_sample(tmp_path):
    trained("--nproc 3", tmp_path, get_dataset=points(96, tests=1003))
    check_evaluation(tmp_path, tests=1003)


def test_training_loss_and_accuracy_are_means_over_all_samples_of_all_replicas(tmp_path):
    flags = "--learning-rate 1e-12 --batch-size 16 --epochs 1"  # steps of 16, 16 and 8
    trained(flags, tmp_path, linear_model, points(80))
    (loss, hits), row = alone(tmp_path, Points(80)), history(tmp_path)[0]
    assert row["accuracy"] * 80 == pytest.approx(hits, abs=1e-6)
    assert row["loss"] == pytest.approx(loss, abs=1e-5)


@pytest.mark.parametrize(
    ("replicas", "samples", "tests", "batch", "flag"),
    [
        (3, 2, 2, 8, ""),
        (3, 1, 1, 8, ""),
        (3, 1, 1, 8, "--sync-batchnorm"),
        (1, 1, 1, 8, ""),
        (1, 1, 1, 8, "--sync-batchnorm"),
        (1, 9, 1, 8, ""),
        (2, 5, 3, 1000, ""),
    ],
)
def test_odd_but_good_input_works(tmp_path, replicas, samples, tests, batch, flag):
    flags = f"--nproc {replicas} --batch-size {batch} {flag}"
    trained(flags, tmp_path, get_dataset=points(samples, tests))
    check_evaluation(tmp_path, tests)


# ---- Batch normalization ----
def replica_norm(synchronized=True, **options):
    layer = train_ddp.ReplicaBatchNormalization(**options)
    layer.synchronized = synchronized
    return layer


def run_layer(layer, x, dy):
    """Returns outputs, gradients and moving statistics of two steps."""
    x = x.clone().requires_grad_()
    for _ in range(2):
        y = layer(x, training=True)
    (y * dy).sum().backward()
    gradients = [v.value.grad for v in layer.trainable_variables]
    found = [y, x.grad, *gradients, *[v.value for v in layer.non_trainable_variables]]
    return [tensor.detach().double().numpy() for tensor in found]


def run_both(layer, x, dy):
    """Runs the layer and Keras' own, that in float64."""
    layer.build(x.shape)
    layer.set_weights([np.random.uniform(0.5, 2, weight.shape) for weight in layer.get_weights()])
    config = layer.get_config() | {"dtype": "float64", "synchronized": False}
    keras_layer = layers.BatchNormalization.from_config(config)
    keras_layer.build(x.shape)
    keras_layer.set_weights(layer.get_weights())
    return run_layer(layer, x, dy), run_layer(keras_layer, x.double(), dy.double())


both_kinds = pytest.mark.parametrize("synchronized", [False, True])


@both_kinds
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((8, 5), {}),
        ((8, 5), {"trainable": False}),
        ((256, 5), {"dtype": "mixed_bfloat16"}),
        ((1, 5), {}),
        ((8, 7, 5), {"scale": False}),
        ((8, 7, 5), {"axis": 1, "center": False}),
        ((4, 6, 7, 5), {"momentum": 0.3, "epsilon": 0.1}),
        ((4, 5, 6, 7), {"axis": 1, "scale": False, "center": False}),
        ((2, 3, 4, 5, 6), {}),
        ((2, 3, 4, 5, 6), {"axis": 1}),
    ],
)
def test_batch_norm_equals_that_of_keras(shape, options, synchronized):
    half = "dtype" in options  # the statistics are float32 all the same

    def run(rank):
        keras.utils.set_random_seed(1)
        x, dy = torch.randn(shape) * 3 + 1, torch.randn(shape)
        x, dy = (x.bfloat16(), dy.bfloat16()) if half else (x, dy)
        return run_both(replica_norm(synchronized, **options), x, dy)

    ((found, expected),) = on_replicas(1, run)
    for one, other in zip(found[:-2], expected[:-2], strict=True):
        np.testing.assert_allclose(
            one, other, rtol=0.02 if half else 1e-5, atol=0.05 if half else 1e-5
        )
    np.testing.assert_allclose(found[-2:], expected[-2:], rtol=1e-5)


@both_kinds
def test_batch_norm_is_exact_far_from_zero(synchronized):
    """Keras' own layer is off by 0.3 there, and so is no reference."""
    x = np.random.default_rng(0).normal(1000, 1, (256, 5)).astype("float32")

    def run(rank):
        layer = replica_norm(synchronized, epsilon=1e-6, momentum=0.0)
        return arrays([layer(torch.from_numpy(x), training=True), *layer.non_trainable_variables])

    ((y, mean, variance),) = on_replicas(1, run)
    exact = x.astype("float64")
    np.testing.assert_allclose(mean, exact.mean(0), rtol=1e-6)
    np.testing.assert_allclose(variance, exact.var(0), rtol=1e-5)
    exact = (exact - exact.mean(0)) / np.sqrt(exact.var(0) + 1e-6)
    np.testing.assert_allclose(y, exact, atol=3e-4)  # float32 at 1000 is good for 6e-5


def test_synchronized_replicas_train_like_one_with_the_global_batch():
    """Over 50 steps: the sampler deals the same global batches to any number of replicas."""

    def get_model(norm):
        return chain(
            *(layers.Dense(12, use_bias=False), layers.Reshape((2, 2, 3)), norm(momentum=0.9)),
            *(keras.ops.tanh, layers.Conv2D(6, 2), norm(axis=1, scale=False, momentum=0.5)),
            *(layers.Flatten(), layers.Dense(10)),
        )

    def replica(rank, norm):
        options = {"epochs": 1, "rate": 0.1, "batch_size": 24 // dist.get_world_size()}
        model, (_, _, losses) = fit(rank, lambda: get_model(norm), Points(50 * 24), **options)
        return np.array(losses), np.concatenate(arrays(model.non_trainable_variables))

    def run(world, norm):
        losses, statistics = zip(*on_replicas(world, replica, norm))
        return np.mean(losses, 0), statistics[0]

    one, statistics = run(1, layers.BatchNormalization)
    assert len(one) == 50
    for world in 2, 3, 4:
        losses, found = run(world, replica_norm)
        np.testing.assert_allclose(losses, one, rtol=0, atol=1e-5)
        np.testing.assert_allclose(found, statistics, rtol=1e-4, atol=1e-4)
    assert abs(run(2, layers.BatchNormalization)[0] - one).max() > 1e-3


def nested_model():
    """A model in a model in a model, and layers that are used twice."""
    tanh, norm = keras.ops.tanh, [layers.BatchNormalization(momentum=0.5) for _ in range(3)]
    dense = layers.Dense(12, use_bias=False)  # Adam would turn a bias' zero gradient into noise
    inner = chain(dense, norm[0], inputs=12)
    x = keras.Input((12,))
    middle = keras.Model(x, tanh(layers.Add()([norm[1](inner(x)), inner(tanh(x))])))
    return chain(layers.Dense(12), tanh, middle, norm[2], tanh, norm[2], layers.Dense(10))


def test_the_flag_synchronizes_nested_and_shared_layers_and_saves_plain_ones(tmp_path):
    def losses(name, world, flag="--sync-batchnorm"):
        flags = f"--epochs 5 --nproc {world} --batch-size {24 // world} {flag}"
        trained(flags, tmp_path / name, nested_model, points(24, tests=101))
        return np.array([[row["loss"], row["val_loss"]] for row in history(tmp_path / name)])

    one = losses("1", world=1)
    for world in 2, 3:
        np.testing.assert_allclose(losses(str(world), world), one, atol=1e-5)
    assert abs(losses("unsynchronized", 2, flag="") - one).max() > 1e-3
    check_evaluation(tmp_path / "3", tests=101)
    with zipfile.ZipFile(tmp_path / "3" / "model.keras") as file:
        config = file.read("config.json").decode()
    assert config.count('"class_name": "BatchNormalization"') == 3 and "train_ddp" not in config


@register
class Subclassed(keras.Model):
    def __init__(self, **options):
        super().__init__(**options)
        self.norm, self.dense = layers.BatchNormalization(), layers.Dense(10)

    def call(self, inputs, training=None):
        return self.dense(self.norm(inputs, training=training))


@register
class Opposite(keras.Model):
    """A Functional model with a `call` of its own, which a clone does without."""

    def __init__(self, **options):
        x = keras.Input((6,))
        super().__init__(x, layers.Dense(10)(layers.BatchNormalization()(x)), **options)

    def call(self, inputs, training=None):
        return -super().call(inputs, training=training)


@register
class OwnInTraining(keras.Sequential):
    """What a clone leaves out does not show before it has learned, or in training only."""

    def call(self, inputs, training=None, mask=None):
        return super().call(inputs * 0 + 1 if training else inputs, training=training)


def own_in_training():
    zeros = layers.Dense(10, kernel_initializer="zeros")
    return OwnInTraining([keras.Input((6,)), layers.BatchNormalization(), zeros])


@register
class OwnNorm(layers.BatchNormalization):
    pass


def with_norm(norm):
    """Has a convolution, which the script may replace, too."""
    conv = layers.Reshape((2, 3, 1)), layers.Conv2D(4, 2)
    return chain(*conv, norm, layers.Flatten(), layers.Dense(10))


@pytest.mark.parametrize(
    "get_model",
    [
        Subclassed,
        Opposite,
        own_in_training,
        lambda: with_norm(OwnNorm()),
        lambda: with_norm(layers.BatchNormalization(renorm=True)),
        lambda: chain(
            *(layers.Reshape((3, 2)), layers.Masking(), layers.BatchNormalization()),
            *(layers.GlobalAveragePooling1D(), layers.Dense(10)),
        ),
    ],
    ids=["subclassed", "own call", "own call in training", "own layer", "renorm", "mask"],
)
def test_a_model_that_cannot_be_synchronized_is_refused_with_the_flag_only(tmp_path, get_model):
    refused = train("--sync-batchnorm", tmp_path, get_model)
    assert "--sync-batchnorm" in message(refused)
    assert not list(tmp_path.iterdir())

    trained("", tmp_path, get_model)
    check_evaluation(tmp_path)


class Inner(layers.Layer):
    """Calls a layer that the model has elsewhere, too."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def call(self, inputs):
        return self.layer(inputs)


def test_a_layer_in_two_places_stays_one():
    def get_model():
        conv = layers.Conv2D(1, 1)
        steps = layers.Reshape((3, 2, 1)), conv, Inner(conv), layers.Flatten(), layers.Dense(10)
        return chain(*steps)

    trained("", None, get_model)


@pytest.mark.parametrize("flag", ["", "--sync-batchnorm"])
def test_one_replica_trains_like_a_plain_loop(tmp_path, flag):
    """With convolutions of all kinds, each followed by batch normalization."""

    def get_model():
        steps = [layers.Dense(240), layers.Reshape((12, 10, 2))]
        for options in (
            {"padding": "same", "strides": 2},
            {"kernel_size": (2, 3)},
            {"padding": "same", "dilation_rate": 2, "groups": 2, "use_bias": False},
            {"padding": "valid", "activation": "relu", "kernel_regularizer": "l2"},
        ):
            conv = layers.Conv2D(**{"filters": 4, "kernel_size": 2} | options)
            steps += conv, layers.BatchNormalization(), keras.ops.tanh
        last = layers.Permute((3, 1, 2)), layers.Conv2D(3, 2, data_format="channels_first")
        last = layers.Conv2D(4, 1, activation=lambda x: x * 2), *last
        model = chain(*steps, *last, layers.Flatten(), layers.Dense(10))
        steps[2].kernel.trainable = steps[3].beta.trainable = False
        return model

    def losses():
        keras.utils.set_random_seed(0)
        model, data = get_model(), Points(64)
        optimizer = torch.optim.Adam([v.value for v in model.trainable_variables], lr=1e-3)
        for _ in range(5):
            outputs = model(torch.from_numpy(data.x), training=True)
            loss = cross_entropy(outputs, torch.from_numpy(data.y)) + sum(model.losses)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            yield loss.item()

    trained(f"--nproc 1 --batch-size 64 --epochs 5 {flag}", tmp_path, get_model)
    found = [row["loss"] for row in history(tmp_path)]
    np.testing.assert_allclose(found, call(lambda: list(losses())), atol=1e-5)


# ---- The whole run ----
def test_the_same_seed_gives_the_same_bits_also_with_two_runs_at_once(tmp_path):
    a, b, c = (tmp_path / name for name in "abc")
    runs = start("--seed 0", a), start("--seed 0", b), start("--seed 1", c)
    assert [run.wait().code for run in runs] == [0, 0, 0]
    assert bits(a) == bits(b) != bits(c)


def test_the_command_line_trains_and_leaves_a_plain_model(tmp_path):
    """As users start it: a fresh interpreter, spawned replicas, the script's own model."""
    data, out = save_npz(tmp_path / "data.npz"), tmp_path / "new" / "out"
    run = python(SCRIPT, *TINY, "--data", data, "--output-dir", out).wait()
    assert (run.code, run.err) == (0, "")
    what, *epochs = run.out.splitlines()
    for part in "2", "cpu", "gloo", "local batch 8", "global batch 16", str(data), "64", "20":
        assert part in what
    assert [line.split()[:2] for line in epochs] == [["epoch", "1/2"], ["epoch", "2/2"]]
    assert set(os.listdir(out)) == FILES
    columns = "epoch,loss,accuracy,val_loss,val_accuracy,seconds,samples_per_second"
    assert ",".join(history(out)[0]) == columns
    code = f"""if True:
        import sys, keras, numpy
        model, data = keras.saving.load_model("{out}/model.keras"), numpy.load("{data}")
        labels = keras.ops.argmax(model(data["x_test"][..., None]), -1)
        print(sum(keras.ops.convert_to_numpy(labels) == data["y_test"]), "train_ddp" in sys.modules)
    """
    hits, known = python("-c", code, KERAS_BACKEND="torch", PYTHONPATH="").wait().out.split()
    assert int(hits) == round(history(out)[-1]["val_accuracy"] * 20, 6) and known == "False"


def test_a_model_and_data_of_ones_own_train_and_the_data_are_loaded_once():
    def get_dataset(data):
        print("loaded", data)
        samples = [(np.zeros(6, "float32"), i % 4) for i in range(24)]
        return samples, samples

    loaded, what, *epochs, last = trained(
        "--data here", None, linear_model, get_dataset
    ).out.splitlines()
    assert loaded == "loaded here"
    assert len(epochs) == 2 and all("list" in line for line in (what, *epochs))
    assert "nothing was written" in last


def test_the_parent_leaves_torch_to_forked_replicas(tmp_path):
    """Had it computed with threads, one that has as many would hang; two share the cores here."""

    def get_model():
        flat = layers.Rescaling(1 / 255), layers.Flatten()
        return keras.Sequential([keras.Input((28, 28, 1)), *flat, layers.Dense(10)])

    x, y = np.zeros((200, 28, 28), "uint8"), np.zeros(200, "int64")
    data = save_npz(tmp_path / "data.npz", x_train=x, y_train=y)
    flags = "--nproc", "1", "--batch-size", "200", "--data", str(data)
    run = Child(train_ddp.main, [*FORK, *flags], get_model).wait()
    assert (run.code, run.err) == (0, "")


def test_a_function_that_cannot_be_pickled_fails_with_spawn(tmp_path):
    run = train("--start-method spawn", tmp_path)
    assert run.code == 1 and "pickle" in run.err
    assert not list(tmp_path.iterdir())


def test_importing_the_script_starts_nothing():
    code = """if True:
        import multiprocessing, os, sys, threading
        sys.argv = ["x", "--frobnicate"]
        import train_ddp, torch
        assert not torch.cuda.is_initialized() and not torch.distributed.is_initialized()
        assert threading.active_count() == 1 and not multiprocessing.active_children()
        pid = os.fork()  # had CUDA been touched, the forked child could not use it
        if not pid:
            torch.zeros(1, device="cuda" if torch.cuda.device_count() else "cpu") + 1
        assert not pid or os.waitpid(pid, 0)[1] == 0
    """
    run = python("-c", code).wait()
    assert (run.code, run.out, run.err) == (0, "", "")


def test_keras_on_another_backend_gives_a_clear_error():
    # Keras' numpy backend imports these, and does not use them here.
    code = """if True:
        import sys, unittest.mock
        jax = "keras.src.backend.jax"
        absent = "jax", "jax.numpy", "jax.scipy", jax, jax + ".math", "scipy", "scipy.linalg"
        sys.modules.update(dict.fromkeys(absent, unittest.mock.MagicMock()))
        import keras, train_ddp
    """
    run = python("-c", code, KERAS_BACKEND="numpy").wait()
    assert run.code == 1 and re.match(r"ImportError: .*numpy", run.err.splitlines()[-1])


def test_the_cpu_is_enough_where_keras_default_device_can_compute_nothing(tmp_path):
    code = f"""if True:
        import test_train_ddp as tests
        args = [*tests.FORK, "--output-dir", "{tmp_path}", "--resume", "--epochs"]
        for epochs in "1", "2":
            tests.train_ddp.main([*args, epochs], tests.small_model, tests.small_data)
    """
    run = python("-c", code, KERAS_TORCH_DEVICE="meta").wait()
    assert (run.code, run.err) == (0, "")
    assert len(history(tmp_path)) == 2
    check_evaluation(tmp_path)


def test_bfloat16_computes_in_it_and_saves_a_float32_model(tmp_path):
    a, b = tmp_path / "a", tmp_path / "b"
    trained("", a, linear_model)
    trained("--precision bfloat16", b, linear_model)
    one, other = history(a)[0]["loss"], history(b)[0]["loss"]
    assert one != other == pytest.approx(one, abs=0.02)
    assert {weight.dtype for weight in saved_weights(b)} == {np.dtype("float32")}
    check_evaluation(b, tolerance=1e-5)


def test_without_network_the_default_data_are_synthetic_and_every_line_says_so(tmp_path):
    """And neither --data mnist nor torchrun fall back."""
    code = """if True:
        import test_train_ddp as tests, os, sys
        def get_model():
            flat = tests.layers.Rescaling(1 / 255), tests.layers.Flatten()
            shape = tests.keras.Input((28, 28, 1))
            return tests.keras.Sequential([shape, *flat, tests.layers.Dense(10)])
        tests.train_ddp.main([*tests.FORK, "--batch-size", "512", "--epochs", "1"], get_model)
        for data, torchrun in ("mnist", {}), (None, {"TORCHELASTIC_RUN_ID": "none"}):
            print("----", file=sys.stderr, flush=True)
            os.environ.update(torchrun)
            try:
                tests.train_ddp.get_dataset(data)
            except SystemExit as error:
                print(error.code, file=sys.stderr)
    """
    environ = dict.fromkeys(("http_proxy", "https_proxy", "all_proxy"), "http://127.0.0.1:9")
    home = {"HOME": str(tmp_path), "KERAS_HOME": str(tmp_path / "keras"), "no_proxy": ""}
    run = python("-c", code, **environ, **home).wait()
    assert run.code == 0, run.err
    accuracies = [line for line in run.out.splitlines() if "accuracy" in line]
    assert accuracies and all("synthetic" in line for line in accuracies)
    warning, *refusals = run.err.split("----\n")
    assert "SYNTHETIC" in warning
    for refusal in refusals:
        assert re.fullmatch(r"[^\n]*MNIST[^\n]*\n2\n", refusal)


def test_synthetic_digits_are_as_many_as_mnist_has_and_the_same_each_time():
    def digits():
        for x, y in (data[:] for data in train_ddp.get_dataset("synthetic")):
            images = {image.tobytes() for image in x.numpy()}
            yield [*x.shape, x.dtype, images], y.bincount().tolist()

    (train_set, counts), (test_set, test_counts) = first = call(lambda: list(digits()))
    assert first == call(lambda: list(digits()))
    assert train_set[:-1] == [60_000, 28, 28, 1, torch.uint8] and min(counts) > 5_500
    assert test_set[:-1] == [10_000, 28, 28, 1, torch.uint8] and min(test_counts) > 900
    assert len(train_set[-1]) == 60_000 and not train_set[-1] & test_set[-1]


def test_help_shows_every_default():
    text = train("--help").out
    shown = " ".join(text.split())
    for default in None, 2, 64, 0.001, 0, "auto", "float32", False, "spawn":
        assert f"(default: {default})" in shown
    assert shown.count("(default: ") == text.count("\n  --") > 11  # all but -h


def test_progress_shows_on_a_terminal_only():
    def on_terminal():
        terminal, end = os.openpty()
        os.dup2(end, 1)
        train_ddp.main([*FORK, "--epochs", "1"], small_model, small_data)
        return os.read(terminal, 4096).decode()

    assert "4/4" in call(on_terminal)
    assert "4/4" not in trained().out


def test_each_process_takes_its_share_of_the_cores_it_may_use():
    def threads(rank):
        return torch.get_num_threads()

    def threads_on_one_core():
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
        return on_replicas(1, threads)

    cores = len(os.sched_getaffinity(0))
    assert on_replicas(1, threads) == [cores]
    assert on_replicas(2, threads) == [max(1, cores // 2)] * 2
    assert call(threads_on_one_core) == [1]


# ---- What a run survives ----
EPOCHS = "--epochs 3"
SECOND_EPOCH = 60  # the access of a sample in it


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """The bits of a run of `wide_model` that nothing happened to."""
    folder = tmp_path_factory.mktemp("unbroken")
    trained(EPOCHS, folder, wide_model)
    return bits(folder)


def resumed(folder):
    """Returns the bits of a run of `wide_model` after it was resumed."""
    run = trained(f"{EPOCHS} --resume", folder, wide_model)
    assert "another run" not in run.out and set(os.listdir(folder)) == FILES
    return bits(folder)


def kill(number=signal.SIGKILL):
    os.kill(os.getpid(), number)


def limit_files(path, kills):
    """Lets no file of this process grow beyond half of this one; trying may kill, as SIGKILL does."""
    half = path.stat().st_size // 2
    resource.setrlimit(resource.RLIMIT_FSIZE, (half, half))
    if kills:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores it


@pytest.mark.parametrize(
    ("rank", "at", "what"),
    [
        (1, 1, "building"),
        (0, 30, "training"),
        (1, SECOND_EPOCH, "training"),
        (1, 30, "training, by SIGTERM"),
        (1, 15, "evaluating"),
        (0, SECOND_EPOCH, "writing model.keras"),
        (0, SECOND_EPOCH, "writing checkpoint.pt"),
    ],
)
def test_a_killed_rank_is_named_and_the_resumed_run_has_the_same_bits(
    tmp_path, unbroken, rank, at, what
):
    action = partial(kill, signal.SIGTERM) if "SIGTERM" in what else kill
    if what.startswith("writing"):
        action = partial(limit_files, tmp_path / what.split()[1], kills=True)
    traps = {"test_trap" if what == "evaluating" else "trap": (rank, at, action)}
    run = train(EPOCHS, tmp_path, wide_model, points(**traps))
    assert re.search(rf"\brank {rank}\b.*\bsignal\b", message(run)) and "--resume" in run.err
    assert resumed(tmp_path) == unbroken


@pytest.mark.parametrize("name", ["model.keras", "checkpoint.pt"])
def test_a_full_disk_is_reported_and_leaves_the_last_checkpoint_whole(tmp_path, unbroken, name):
    action = partial(limit_files, tmp_path / name, kills=False)
    run = train(EPOCHS, tmp_path, wide_model, points(trap=(0, SECOND_EPOCH, action)))
    assert str(tmp_path / name) in message(run) and "File too large" in message(run)
    assert set(os.listdir(tmp_path)) == FILES and len(checkpoint(tmp_path)[0]) == 1
    assert resumed(tmp_path) == unbroken


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_ends_the_run_and_leaves_no_process(tmp_path, unbroken, number):
    """To the parent alone, as a cluster sends it, but SIGINT to all, as a terminal does."""
    ready = tmp_path / "ready"

    def stall():
        ready.touch()
        time.sleep(300)

    child = start(EPOCHS, tmp_path, wide_model, points(trap=(1, SECOND_EPOCH, stall)))
    assert until(ready.exists)
    (os.killpg if number == signal.SIGINT else os.kill)(child.pid, number)
    run = child.wait(timeout=30)
    ready.unlink()
    if number == signal.SIGKILL:
        assert (run.code, run.err) == (-9, "")
    else:
        assert run.code == 128 + number and re.fullmatch(r".*--resume.*\n", run.err)
    assert resumed(tmp_path) == unbroken


@pytest.mark.parametrize(("method", "training"), [("spawn", False), ("forkserver", True)])
def test_ctrl_c_ends_fresh_replicas_without_a_traceback(tmp_path, method, training):
    data, out = save_npz(tmp_path / "data.npz"), tmp_path / "out"
    args = "--data", data, "--epochs", 100_000, "--start-method", method, "--output-dir", out
    child = python(SCRIPT, *TINY, *args)
    if training:
        assert until((out / "checkpoint.pt").exists)
    else:  # parent, resource tracker and two replicas, which import torch and Keras
        assert until(lambda: len(child.left()) == 4)
    os.killpg(child.pid, signal.SIGINT)
    run = child.wait(timeout=30)
    assert run.code == 130 and re.fullmatch(r".*--resume.*\n", run.err)


class Interrupted:
    """A `get_model`, pickled for each spawned replica: Ctrl-C comes while the second is started."""

    times = 0

    def __getstate__(self):
        Interrupted.times += 1
        if Interrupted.times == 2:
            time.sleep(1)  # the first imports torch and Keras now
            os.killpg(0, signal.SIGINT)
            time.sleep(1)
        return {"some": "state"}


def test_ctrl_c_while_processes_are_started_waits_until_they_are(tmp_path):
    samples = [(0.0, 0)] * 8
    out = tmp_path / "out"
    run = train("--start-method spawn", out, Interrupted(), lambda data: (samples, samples))
    assert run.code == 130 and re.fullmatch(r".*--resume.*\n", run.err)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_fresh_replicas_end_with_their_parent_whose_signal_comes_twice(tmp_path, number):
    data = save_npz(tmp_path / "data.npz")
    child = python(SCRIPT, *TINY, "--data", data, "--epochs", 100_000)
    assert until(lambda: len(child.left()) == 4)
    for each in number, number:
        os.kill(child.pid, each)
        time.sleep(0.01)
    assert until(lambda: not child.left(), timeout=30)
    child.wait()


def test_main_works_in_a_thread_and_puts_the_signal_handlers_back():
    def handlers():
        return [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]

    def run():
        before, args = handlers(), ([*FORK, "--epochs", "1"], small_model, small_data)
        thread = threading.Thread(target=train_ddp.main, args=args)
        thread.start()
        while thread.is_alive():
            assert handlers() == before
            time.sleep(0.01)
        train_ddp.main(*args)
        assert handlers() == before

    ended = Child(run).wait()
    assert (ended.code, ended.err) == (0, "") and ended.out.count("epoch 1/1") == 2


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_an_exception_in_one_rank_shows_its_own_traceback_once(tmp_path, rank):
    def fail():
        raise ValueError(f"a bad sample on {rank}")

    trap = rank, SECOND_EPOCH, fail
    run = train(f"{EPOCHS} --nproc 3", tmp_path, get_dataset=points(96, trap=trap))
    assert run.code == 1
    assert run.err.count("Traceback") == run.err.count(f"ValueError: a bad sample on {rank}") == 1
    assert f"rank {rank}" in run.err and "--resume" in run.err.splitlines()[-1]
    assert len(checkpoint(tmp_path)[0]) == 1


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_good_checkpoint(tmp_path):
    data, tests = small_data()
    data.trap = 1, SECOND_EPOCH, lambda: data.x.fill(np.nan)
    run = train(EPOCHS, tmp_path, get_dataset=lambda _: (data, tests))
    assert re.search(r"epoch 2\b.*\bnan\b", message(run)) and "--resume" in run.err
    assert len(checkpoint(tmp_path)[0]) == len(history(tmp_path)) == 1
    trained(f"{EPOCHS} --resume", tmp_path)
    assert all(np.isfinite(weight).all() for weight in saved_weights(tmp_path))


def test_a_rank_that_stops_answering_ends_the_run(tmp_path):
    def run():
        train_ddp.COLLECTIVE_TIMEOUT = timedelta(seconds=3)
        args = [*FORK, *EPOCHS.split(), "--output-dir", str(tmp_path)]
        trap = 1, SECOND_EPOCH, partial(kill, signal.SIGSTOP)
        train_ddp.main(args, small_model, points(trap=trap))

    ended = Child(run).wait()
    assert ended.code == 1 and re.search("(?i)timed out|timeout", ended.err)
    assert "--resume" in ended.err.splitlines()[-1]


def test_ten_short_runs_in_a_row_end():
    """With gloo a process group that goes before its last tensor can hang for ever."""

    def run():
        for world in [1, 2, 3, 1, 2, 3, 1, 2, 3, 1]:
            args = [*FORK, "--nproc", str(world), "--epochs", "1"]
            train_ddp.main(args, small_model, points(320 * world))

    ended = Child(run).wait()
    assert ended.code == 0 and ended.out.count("epoch 1/1") == 10


def test_three_replicas_resume_with_the_same_bits(tmp_path):
    for name, epochs in ("a", 3), ("b", 1), ("b", 3):
        trained(f"--nproc 3 --epochs {epochs} --resume", tmp_path / name, get_dataset=points(96))
    assert bits(tmp_path / "a") == bits(tmp_path / "b")


def test_a_resumed_run_takes_the_new_flags_and_says_so(tmp_path):
    trained("--epochs 1", tmp_path, linear_model)
    before = checkpoint(tmp_path)[1]
    run = trained("--epochs 2 --learning-rate 1e-12 --resume", tmp_path, linear_model)
    assert re.search("learning.rate.*1e-12", run.out) and "another run" in run.out
    rows, after, _ = checkpoint(tmp_path)
    assert len(rows) == 2
    for one, other in zip(before, after):
        np.testing.assert_allclose(one, other, atol=1e-9)


def test_resuming_a_run_that_has_ended_says_so_and_changes_nothing(tmp_path):
    trained("--epochs 1", tmp_path)
    before = contents(tmp_path)
    run = trained("--epochs 1 --resume", tmp_path)
    assert re.search(r"(?i)no more|nothing|already|all \d+ epochs", run.out)
    assert contents(tmp_path) == before
    weights = saved_weights(tmp_path)
    (tmp_path / "model.keras").unlink()
    trained("--epochs 1 --resume", tmp_path)
    np.testing.assert_equal(saved_weights(tmp_path), weights)


# ---- torchrun ----
WORKER = """
import os, sys, time
import test_train_ddp as tests

rank, restarts = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
time.sleep(3 * (rank == "1" and restarts == "1"))  # the first must not meet who was there before
trap = (1, tests.SECOND_EPOCH, tests.kill) if "--resume" in sys.argv and restarts == "0" else None
tests.train_ddp.main(None, tests.wide_model, tests.points(trap=trap))
"""


def torchrun(folder, options, flags):
    """Starts two workers; with --resume, the second is killed in the second epoch."""
    worker = folder / "worker.py"
    worker.write_text(WORKER)
    options = f"-m torch.distributed.run --nproc-per-node 2 {options} --".split()
    return python(*options, worker, *TINY[2:], *flags.split())


def test_torchrun_restarts_a_killed_worker_and_the_bits_are_the_same(tmp_path, unbroken):
    flags = f"{EPOCHS} --resume --output-dir {tmp_path}/out"
    run = torchrun(tmp_path, "--standalone --max-restarts 3", flags).wait()
    assert run.code == 0, run.err
    # torchrun names the killed worker, or the one that lost its connection to it.
    assert re.search(r"failed \(exitcode: (-9|1)\)", run.err)
    assert "resumed after epoch" in run.out
    assert bits(tmp_path / "out") == unbroken


def test_two_machines_give_what_four_replicas_give_and_the_first_writes(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{free.getsockname()[1]}"
    options = f"--nnodes 2 --rdzv-backend c10d --rdzv-endpoint {place} --local-addr 127.0.0.1"
    folders = [tmp_path / name for name in ("a", "b")]
    flags = [f"{EPOCHS} --output-dir {folder}" for folder in folders]
    runs = [child.wait() for child in [torchrun(tmp_path, options, each) for each in flags]]
    assert [run.code for run in runs] == [0, 0], runs[0].err + runs[1].err
    counts = [len(list(folder.glob("*"))) for folder in folders]
    assert sorted(counts) == [0, 3]
    assert [run.out.count("epoch 3/3") for run in runs] == [count // 3 for count in counts]
    trained(f"{EPOCHS} --nproc 4", tmp_path / "c", wide_model)
    found, expected = checkpoint(folders[counts.index(3)])[0], checkpoint(tmp_path / "c")[0]
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_torchrun_refuses_bad_input_once(tmp_path):
    run = torchrun(tmp_path, "--standalone", "--nproc 2").wait()
    assert run.code != 0 and run.out == ""
    assert len(re.findall(r"^train_ddp\.py: .*--nproc", run.err, re.MULTILINE)) == 1


# ---- Bad input: one line, exit 2, nothing written ----
def check_refusal(folder, args, said, *functions):
    before = contents(folder)
    run = Child(train_ddp.main, [*TINY, *map(str, args)], *functions).wait()
    assert (run.code, run.out, run.err.count("\n")) == (2, "", 1), run
    assert said in run.err
    assert contents(folder) == before


@pytest.mark.parametrize(
    "flags",
    [
        *("--nproc 0", "--nproc -1", "--nproc two", "--device tpu", "--frobnicate", "more"),
        *("--epochs 0", "--epochs -1", "--epochs 1.5", "--epochs nan", "--epochs"),
        *("--batch-size 0", "--batch-size -8", "--batch-size inf", "--learning-rate 0"),
        *("--learning-rate -1", "--learning-rate nan", "--learning-rate inf"),
        *("--learning-rate fast", "--seed -1", "--seed 4294967296", "--seed one"),
        *("--precision float16", "--start-method thread"),
    ],
)
def test_bad_flags_are_refused_by_their_names(tmp_path, flags):
    args = *flags.split(), "--output-dir", tmp_path / "out"
    check_refusal(tmp_path, args, flags.split()[0], small_model, small_data)


@pytest.mark.parametrize(
    ("flags", "said", "get_dataset"),
    [
        ("--resume", "--output-dir", small_data),
        ("--device cuda --nproc 99", f"there are {torch.cuda.device_count()}", small_data),
        ("--output-dir {}/new", "sample", points(0, 20)),
        ("--output-dir {}/new", "sample", points(64, 0)),
        ("--output-dir {}/file", "{}/file", small_data),
        ("--output-dir {}/file/below", "{}/file", small_data),
        ("--output-dir /proc/none", "/proc/none", small_data),
        ("", "a training and a test set", lambda data: None),
        ("", "a training and a test set", lambda data: Points(20)),
        ("", "a training and a test set", lambda data: (iter([]), iter([]))),
    ],
)
def test_what_cannot_be_done_is_refused(tmp_path, flags, said, get_dataset):
    (tmp_path / "file").touch()
    args = flags.format(tmp_path).split()
    check_refusal(tmp_path, args, said.format(tmp_path), small_model, get_dataset)


class Malicious:
    """Unpickled, it would write a file."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return Path.touch, (self.folder / "bad",)


X, Y = np.zeros((20, 28, 28), "uint8"), np.zeros(20, "int64")


@pytest.mark.parametrize(
    ("said", "make"),
    [
        ("", lambda path: None),
        ("", lambda path: path.mkdir()),
        ("", lambda path: path.touch()),
        ("", lambda path: path.write_text("x_train, y_train, x_test, y_test")),
        ("", lambda path: path.write_bytes(save_npz(path).read_bytes()[:5000])),
        ("", lambda path: path.write_bytes(save_npz(path).read_bytes().replace(b"\1", b"\2"))),
        ("", lambda path: path.write_bytes(X.dumps())),
        ("", lambda path: save_npz(path, y_train=np.array([Malicious(path.parent)] * 64))),
        ("y_test", lambda path: save_npz(path, y_test=None)),
        ("x_train", lambda path: save_npz(path, x_train=None)),
        ("y_train", lambda path: save_npz(path, y_train=Y)),
        ("x_test", lambda path: save_npz(path, x_test=X[:, :27])),
        ("x_test", lambda path: save_npz(path, x_test=X[..., None])),
        ("x_test", lambda path: save_npz(path, x_test=X[:, None], y_test=Y[:, None])),
        ("x_test", lambda path: save_npz(path, x_test=X[0], y_test=Y[0])),
        ("x_test", lambda path: save_npz(path, x_test=X.astype("float32"))),
        ("y_test", lambda path: save_npz(path, y_test=Y.astype("float32"))),
        ("y_test", lambda path: save_npz(path, y_test=Y.astype("U"))),
        ("y_test", lambda path: save_npz(path, y_test=Y + 10)),
        ("y_test", lambda path: save_npz(path, y_test=Y - 1)),
        ("x_train", lambda path: save_npz(path, x_train=X[:0], y_train=Y[:0])),
        ("x_test", lambda path: save_npz(path, x_test=X[:0], y_test=Y[:0])),
    ],
)
def test_bad_data_are_refused(tmp_path, said, make):
    path = tmp_path / "data.npz"
    make(path)
    check_refusal(tmp_path, ["--data", path, "--output-dir", tmp_path / "out"], said or str(path))


@pytest.mark.parametrize("name", sorted(FILES))
def test_a_folder_with_a_run_is_refused_without_resume(tmp_path, name):
    (tmp_path / name).write_text("an earlier run's")
    check_refusal(tmp_path, ["--output-dir", tmp_path], "--resume", small_model, small_data)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
        lambda path: path.write_text("no checkpoint"),
        lambda path: path.write_bytes(pickle.dumps(Malicious(path.parent))),
        lambda path: torch.save(Malicious(path.parent), path),
        lambda path: torch.save({"model": torch.zeros(2)}, path),
        lambda path: torch.save([1, 2], path),
        lambda path: path.unlink() or path.mkdir(),
    ],
)
def test_a_bad_checkpoint_is_refused(tmp_path, spoil):
    trained("--epochs 1", tmp_path)
    call(lambda: spoil(tmp_path / "checkpoint.pt") and None)
    args = "--resume", "--output-dir", tmp_path
    check_refusal(tmp_path, args, "checkpoint.pt", small_model, small_data)


@pytest.mark.parametrize("get_model", [wide_model, linear_model])
def test_a_checkpoint_of_another_model_gives_one_message(tmp_path, get_model):
    trained("--epochs 1", tmp_path)
    before = contents(tmp_path)
    said = message(train("--resume", tmp_path, get_model))
    assert "checkpoint.pt" in said and "another model" in said
    assert contents(tmp_path) == before


# ---- Models of one's own, and how they go wrong ----
class Blocks(keras.Model):
    """Its layers are in a plain list, and are built in the first call."""

    def __init__(self, names=(None, None)):
        super().__init__()
        self.blocks = [layers.Dense(10, name=name) for name in names]

    def call(self, inputs):
        return self.blocks[1](keras.ops.tanh(self.blocks[0](inputs)))

    def get_config(self):
        return {}


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "float64"])
def test_models_of_another_dtype_policy_are_evaluated_in_float32(tmp_path, policy):
    def get_model():
        scale = layers.Rescaling(50.0)
        return chain(scale, layers.Dense(10, dtype=policy), layers.BatchNormalization(dtype=policy))

    trained("--sync-batchnorm", tmp_path, get_model)
    check_evaluation(tmp_path, tolerance=1e-5)


def unbuilt_model():
    return keras.Sequential([layers.Dense(8), layers.LayerNormalization(), layers.Dense(10)])


@pytest.mark.parametrize("get_model", [unbuilt_model, Blocks])
def test_replicas_of_a_model_that_is_built_in_its_first_call_stay_equal(tmp_path, get_model):
    def kept():
        """Returns the model; when the replica ends, it leaves its weights in a file."""
        model, path = get_model(), tmp_path / str(os.getpid())

        def keep():
            path.write_bytes(pickle.dumps([weight.tobytes() for weight in model.get_weights()]))

        multiprocessing.util.Finalize(None, keep, exitpriority=1)
        return model

    trained("--learning-rate 0.1", get_model=kept)
    first, second = [pickle.loads(path.read_bytes()) for path in tmp_path.iterdir()]
    assert len(first) >= 4 and first == second


class Lazy(keras.Model):
    """Makes its layer in the first call."""

    def call(self, inputs):
        self.dense = layers.Dense(10)
        return self.dense(inputs)


class Unused(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense, self.unused = layers.Dense(10), layers.Dense(10)

    def build(self, shape):
        self.dense.build(shape)
        self.unused.build(shape)

    def call(self, inputs):
        return self.dense(inputs)


@pytest.mark.parametrize(
    ("said", "get_model"),
    [
        # Of two weights with one path torch sees the last; DDP would let the other drift apart.
        ("twin", lambda: Blocks(["twin", "twin"])),
        ("nothing to train", lambda: chain(layers.Dense(10, trainable=False))),
        ("state must be created in the `__init__()`", Lazy),  # says Keras
        ("find_unused_parameters", Unused),
    ],
)
def test_a_model_that_cannot_be_trained_gives_one_clear_message(tmp_path, said, get_model):
    run = train("", tmp_path, get_model)
    assert run.code == 1 and said in run.err and run.err.count("Traceback") <= 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("flag", ["", "--sync-batchnorm"])
def test_frozen_layers_stay_as_they_were_to_the_bit(tmp_path, flag):
    def get_model():
        norm = layers.BatchNormalization(moving_mean_initializer="normal")
        norm.trainable = False
        return chain(layers.Dense(512, trainable=False), norm, layers.Dense(10))

    def initial_weights():
        keras.utils.set_random_seed(0)
        return get_model().get_weights()

    trained(f"--nproc 3 {flag}", tmp_path, get_model)
    weights = zip(call(initial_weights), saved_weights(tmp_path), strict=True)
    assert [one.tobytes() == other.tobytes() for one, other in weights] == [True] * 6 + [False] * 2


# ---- GPUs ----
@GPU
@pytest.mark.parametrize("flag", ["", "--sync-batchnorm", "--precision bfloat16"])
def test_one_gpu_trains_with_nccl_and_resumes(tmp_path, flag):
    flags = f"{flag} --device cuda --nproc 1 --resume --epochs"
    run = trained(f"{flags} 1", tmp_path)
    assert "cuda" in run.out and "nccl" in run.out
    trained(f"{flags} 2", tmp_path)
    assert len(history(tmp_path)) == 2
    check_evaluation(tmp_path, tolerance=1e-3)


# ---- Compiled, and the README's own words ----
def test_the_default_model_compiles_to_one_graph():
    def run():
        x = torch.zeros((8, 28, 28, 1), dtype=torch.uint8)
        replica, swapped = train_ddp.swap_layers(train_ddp.get_model(), False, True)
        whole = torch.compile(replica, backend="eager", fullgraph=True)  # fails at a graph break
        return len(swapped), tuple(whole(x, training=True).shape)

    assert call(run) == (3, (8, 10))


@pytest.mark.skipif(not shutil.which("c++"), reason="torch.compile needs a C++ compiler")
def test_compiled_steps_give_the_losses_of_plain_ones(tmp_path):
    """Of 30 samples the last batch is of 6, and runs uncompiled."""

    def plain():
        norm = layers.BatchNormalization(momentum=0.5)
        return chain(layers.Dense(16, use_bias=False), norm, layers.ReLU(), layers.Dense(10))

    losses = []
    for folder, flags in (tmp_path / "a", ""), (tmp_path / "b", "--compile"):
        run = train(f"--nproc 1 {flags}", folder, plain, points(30))
        assert run.code == 0, run.err
        losses.append([[row["loss"], row["val_loss"]] for row in history(folder)])
    np.testing.assert_allclose(*losses, atol=1e-5)


README = (HERE / "README.md").read_text()


def recipe(folder, first_line="", *changes):
    """Writes the README's code of that first line, and a copy of the script with its changes."""
    script = Path(SCRIPT).read_text()
    blocks = re.findall(r"```diff\n(.*?)```", README, re.DOTALL)
    for change in changes:
        (block,) = [block for block in blocks if change in block]
        lines = block.splitlines(keepends=True)
        old, new = ("".join(x[1:] for x in lines if x[0] in kind) for kind in (" -", " +"))
        assert script.count(old) == 1, block
        script = script.replace(old, new)
    (folder / "train_ddp.py").write_text(script)
    code = re.findall(rf"```python\n(# {first_line}\n.*?)```", README, re.DOTALL)
    assert len(code) == 1 or not first_line
    (folder / "job.py").write_text("".join(code))


def run_recipe(folder, *args):
    def run():
        os.chdir(folder)
        sys.path[0], sys.argv[1:] = str(folder), args
        del sys.modules["train_ddp"]
        runpy.run_path("job.py", run_name="__main__")

    run = Child(run).wait()
    assert (run.code, run.err) == (0, "")
    return run.out


def train_recipe(folder, flags, get_model, get_dataset, *changes):
    """Trains with the changed script; returns the table and the last learning rate."""

    def run():
        os.chdir(folder)
        sys.path[0] = str(folder)
        del sys.modules["train_ddp"]
        import train_ddp as changed

        changed.main([*FORK, "--output-dir", "out", *flags.split()], get_model, get_dataset)

    folder.mkdir()
    recipe(folder, "", *changes)
    ended = Child(run).wait()
    assert (ended.code, ended.err) == (0, "")
    with open(folder / "out" / "history.csv") as file:
        names, *rows = csv.reader(file)
    state = call(lambda: torch.load(folder / "out" / "checkpoint.pt")["optimizer"])
    return names, np.array(rows, float)[:, 1:5], state["param_groups"][0]["lr"]


def test_the_readmes_own_model_and_data_train(tmp_path):
    recipe(tmp_path, "my_job.py")
    run = python(tmp_path / "job.py", *TINY, "--output-dir", tmp_path / "out").wait()
    assert run.code == 0, run.err
    assert set(os.listdir(tmp_path / "out")) == FILES


def test_the_readmes_files_are_read_by_workers(tmp_path):
    recipe(tmp_path, "my_files.py", "num_workers")
    for i in range(40):
        folder = tmp_path / "data" / ("train" if i < 30 else "test") / str(i % 10)
        folder.mkdir(parents=True, exist_ok=True)
        np.save(folder / f"{i}.npy", np.random.default_rng(i).random((32, 32, 3), "float32"))
    out = run_recipe(tmp_path, *FORK, "--data", "data")
    assert "Files: 30 training and 10 test samples" in out and "epoch 2/2" in out


def test_the_readmes_notebook_trains_and_its_picture_is_drawn(tmp_path):
    recipe(tmp_path, "a notebook's cell")
    assert run_recipe(tmp_path).count("on list: loss") == 2
    trained("", tmp_path / "out")
    (command,) = re.findall(r"^column .*", README, re.MULTILINE)
    if shutil.which("column"):
        table = subprocess.run(command.split(), cwd=tmp_path, capture_output=True, check=True)
        assert len(table.stdout.splitlines()) == 3 and b"," not in table.stdout
    pytest.importorskip("matplotlib")
    recipe(tmp_path, "history.py")
    run_recipe(tmp_path)
    assert (tmp_path / "out" / "history.png").stat().st_size > 5000


def test_the_readmes_changes_of_the_loop_do_what_they_say(tmp_path):
    job = linear_model, points(64)
    plain = train_recipe(tmp_path / "plain", "--batch-size 32 --epochs 3", *job)
    accumulated = train_recipe(tmp_path / "accumulated", "--epochs 3", *job, "no_sync")
    np.testing.assert_allclose(accumulated[1], plain[1], atol=1e-5)
    others = train_recipe(
        tmp_path / "others", "--epochs 3", *job, "clip_grad_norm_", 'optimizer.defaults["lr"]'
    )
    assert plain[2] == 1e-3 and others[2] == 1e-3 / 4


def test_the_readmes_loss_and_metric_are_used(tmp_path):
    def get_dataset(data):
        samples = [(np.full(6, i, "float32"), np.full(10, i, "float32")) for i in range(32)]
        return samples, samples

    def get_model():
        return chain(layers.Dense(10, kernel_initializer="zeros"))

    flags = "--learning-rate 1e-12 --epochs 1"
    changes = "MSELoss", "abs()", "val_error"
    names, ((loss, error, *_),), _ = train_recipe(
        tmp_path / "x", flags, get_model, get_dataset, *changes
    )
    assert names[1:5] == ["loss", "error", "val_loss", "val_error"]
    assert loss == pytest.approx(np.mean(np.arange(32.0) ** 2), rel=1e-5)
    assert error == pytest.approx(15.5, rel=1e-5)
