"""Tests of train_ddp.py: real process groups on the CPU, no network, no mocks.

This process imports torch and Keras once and does no arithmetic in torch, which would hang a forked
child. What a test runs, it runs in a `Child`: forked, so that it need not import them again.
"""

import contextlib
import csv
import multiprocessing
import os
import pickle
import re
import resource
import signal
import socket
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
import train_ddp  # before Keras, for its backend

import keras
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, Subset

SCRIPT = train_ddp.__file__
FILES = {"model.keras", "history.csv", "checkpoint.pt"}
TINY = ["--nproc", "2", "--device", "cpu", "--batch-size", "8"]
FORK = [*TINY, "--start-method", "fork"]


# ---- Running things in processes of their own ----
class Ended(NamedTuple):
    code: int
    out: str
    err: str
    result: object


class Child:
    """A forked process in a session of its own that runs `function(*args)`."""

    def __init__(self, function, *args):
        self.files = [tempfile.TemporaryFile() for _ in range(3)]
        run = multiprocessing.get_context("fork").Process(target=self.run, args=(function, args))
        run.start()
        self.process, self.pid = run, run.pid

    def run(self, function, args):
        os.setsid()
        for number, file in enumerate(self.files[:2], start=1):
            os.dup2(file.fileno(), number)
        sys.stdout, sys.stderr = open(1, "w"), open(2, "w")  # not those of pytest
        pickle.dump(function(*args), self.files[2])
        self.files[2].flush()

    def left(self):
        """The processes of the session, and those whose environment names it, that still run."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                state, _, _, session = (
                    folder.joinpath("stat").read_text().rpartition(")")[2].split()[:4]
                )
                named = f"CHILD={self.pid}".encode() in folder.joinpath(
                    "environ"
                ).read_bytes().split(b"\0")
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
    return bool(met)


def call(function, *args):
    """Returns what the function returns in a child."""
    ended = Child(function, *args).wait()
    assert ended.code == 0, ended.err
    return ended.result


def python(*args, cwd=None, **environ):
    """Starts a fresh interpreter, which forks nothing of this process."""

    def replace():
        os.chdir(cwd or "/")
        os.environ.update(
            {"PYTHONPATH": str(Path(SCRIPT).parent)} | environ, CHILD=str(os.getpid())
        )
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


# ---- Small models and data ----
class Points(Dataset):
    """An ordinary map-style data set: of (6,) floats, or of what `inputs` makes of them, and ten labels.

    When `when(count of accesses)` first holds on the replica `rank`, `action()` is called there.
    """

    def __init__(
        self, samples, seed=0, inputs=lambda x: x, rank=0, when=lambda count: False, action=None
    ):
        random = np.random.default_rng(seed)
        self.x = random.normal(size=(samples, 6)).astype("float32")
        self.y = random.integers(0, 10, samples)
        self.inputs, self.rank, self.when, self.action, self.count = inputs, rank, when, action, 0

    def __len__(self):
        return len(self.y)

    def __getitem__(self, index):
        self.count += 1
        if dist.is_initialized() and dist.get_rank() == self.rank and self.when(self.count):
            self.when = lambda count: False
            self.action()
        return self.inputs(self.x[index]), self.y[index]


def points(samples=64, tests=20, **options):
    """Returns a `get_dataset`."""
    return lambda: (Points(samples, **options), Points(tests, seed=1))


def small_model(units=16):
    """Batch normalization, and noise from both sources."""
    inputs = keras.Input((6,))
    x = keras.layers.Dense(units, use_bias=False)(inputs)
    x = keras.layers.BatchNormalization(momentum=0.5)(x)
    x = keras.layers.ReLU()(x)
    x = keras.layers.Dropout(0.1)(x)
    x = keras.layers.Dropout(0.1, seed=1)(x)
    return keras.Model(inputs, keras.layers.Dense(10)(x))


def linear_model():
    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(10)])


def train(*args, get_model=small_model, get_dataset=points()):
    """Runs `main` with two forked replicas, unless the arguments say something else."""
    return Child(train_ddp.main, [*FORK, *map(str, args)], get_model, get_dataset).wait()


def trained(*args, **options):
    run = train(*args, **options)
    assert run.code == 0, run.err
    assert run.err == ""
    return run


def message(run):
    """Returns the one line that says what was wrong, before the one that says what was kept."""
    first, *others = run.err.splitlines()
    assert len(others) < 2 and "Traceback" not in run.err
    return first


def history(folder):
    with open(folder / "history.csv") as file:
        return [{name: float(x) for name, x in row.items()} for row in csv.DictReader(file)]


def contents(folder):
    return {path: path.is_dir() or path.read_bytes() for path in folder.rglob("*")}


def checkpoint(folder):
    """Returns the checkpoint with arrays in the place of tensors."""

    def read():
        found = torch.load(folder / "checkpoint.pt", weights_only=True)
        return keras.tree.map_structure(lambda x: x.numpy() if torch.is_tensor(x) else x, found)

    return call(read)


def bits(folder):
    """What a run left but for its flags and times, in a form that compares equal if all bits are."""
    found = checkpoint(folder)
    weights = call(lambda: keras.saving.load_model(folder / "model.keras").get_weights())
    rows = [row[:5] for row in found["history"]]
    assert rows == [list(row.values())[:5] for row in history(folder)]
    everything = keras.tree.flatten([found["variables"], found["optimizer"], weights])
    return rows, [getattr(x, "tobytes", lambda: x)() for x in everything]


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
            steps.append([tensor.detach().cpu().numpy() for tensor in (outputs, targets, loss)])
        return loss

    train_ddp.train_model(DistributedDataParallel(model), loader, epochs, optimizer, loss_fn, tests)
    return model, zip(*steps)


def values(variables):
    return [variable.value.detach().cpu().numpy() for variable in variables]


def save_npz(path, **changes):
    """Writes 64 and 20 images in the layout of Keras' MNIST."""
    random = np.random.default_rng(0)
    x, y = random.integers(0, 256, (64, 28, 28), "uint8"), random.integers(0, 10, 64)
    arrays = {"x_train": x, "y_train": y, "x_test": x[:20], "y_test": y[:20]} | changes
    np.savez(path, **{name: array for name, array in arrays.items() if array is not None})
    return path


def alone(path, data):
    """Returns mean loss and hits of a saved model on the data, in one process and one batch."""

    def run():
        model = keras.saving.load_model(path)
        x, y = map(torch.from_numpy, (data.x, data.y))
        outputs = model(x, training=False)
        return cross_entropy(outputs, y).item(), (outputs.argmax(-1) == y).sum().item()

    return call(run)


# ---- Data and inputs ----
def test_an_epoch_takes_every_sample_once_and_each_epoch_in_another_order():
    def orders(rank, seed):
        data = Points(100)
        data.y = np.arange(100)
        _, (_, targets, _) = fit(rank, linear_model, data, seed=seed)
        return np.concatenate(targets).reshape(2, -1)  # (epoch, sample)

    ranks = np.array(on_replicas(3, orders, 0))
    for epoch in 0, 1:
        times = Counter(ranks[:, epoch].ravel().tolist())
        assert sorted(times.values()) == [1] * 98 + [2] * 2  # 100 samples, padded to 3 * 34
    assert set(ranks[0, 0]) != set(ranks[0, 1])
    assert (ranks[:, 0] == np.array(on_replicas(3, orders, 0))[:, 0]).all()
    assert (ranks[:, 0] != np.array(on_replicas(3, orders, 1))[:, 0]).any()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_loaders_take_ours_a_subset_and_any_map_style_data_set(tmp_path, num_workers):
    def labels():
        ours, _ = train_ddp.get_dataset(str(save_npz(tmp_path / "data.npz")))
        sets = Points(20), ours, Subset(ours, range(5, 25))
        for data in sets:
            loader = train_ddp.prepare_dataloader(
                data, 1, 2, 4, training=False, num_workers=num_workers
            )
            assert isinstance(loader, DataLoader)
            batches = list(loader)
            assert [len(y) for _, y in batches[:2]] == [4, 4]
            read = np.concatenate([y for _, y in batches])
            assert (read == [data[i][1] for i in range(1, len(data), 2)]).all()
        return batches[0][0].dtype, batches[0][0].shape

    assert call(labels) == (torch.uint8, (4, 28, 28, 1))


class Probe(keras.Model):
    """Writes down what it is called with."""

    def __init__(self, folder):
        super().__init__()
        self.folder, self.dense = folder, keras.layers.Dense(10)

    def call(self, inputs, training=None):
        flat = keras.tree.flatten(inputs)
        seen = keras.tree.map_structure(lambda x: f"{x.dtype} {tuple(x.shape[1:])}", inputs)
        if flat[0].device.type != "meta":  # Keras builds with it
            with open(self.folder / str(os.getpid()), "a") as file:
                print(training, seen, sep="|", file=file)
        flat = [keras.ops.reshape(keras.ops.cast(x, "float32"), (len(x), -1)) for x in flat]
        return self.dense(keras.ops.concatenate(flat, -1))


def ids(x):
    return (x > 0).astype("int64")


NESTED = {
    "a": "torch.int64 (6,)",
    "b": ["torch.float32 (6,)", "torch.float32 (1,)"],
}  # torch collates tuples to lists


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        (lambda x: np.zeros((4, 4, 1), "uint8"), "torch.uint8 (4, 4, 1)"),
        (ids, "torch.int64 (6,)"),
        (lambda x: {"a": ids(x), "b": (x, x[:1])}, str(NESTED)),
    ],
)
def test_inputs_pass_as_they_are_and_training_is_true_in_training_only(tmp_path, inputs, expected):
    def get_dataset():
        return Points(64, inputs=inputs), Points(20, inputs=inputs)

    trained("--epochs", 3, get_model=lambda: Probe(tmp_path), get_dataset=get_dataset)
    calls = [Counter(path.read_text().splitlines()) for path in tmp_path.iterdir()]
    assert len(calls) == 2
    for seen in calls:
        assert seen.keys() == {f"True|{expected}", f"False|{expected}"}
        assert seen[f"True|{expected}"] == 3 * 4
        assert seen[f"False|{expected}"] >= 3 * 2


def token_model():
    embedding = keras.layers.Embedding(2, 4)
    layers = keras.layers.Flatten(), keras.layers.Dense(10)
    return keras.Sequential([keras.Input((6,), dtype="int64"), embedding, *layers])


def dict_model():
    a, b = keras.Input((6,), dtype="int64", name="a"), keras.Input((6,), name="b")
    x = keras.layers.Flatten()(keras.layers.Embedding(2, 4)(a))
    x = keras.layers.BatchNormalization()(keras.layers.Concatenate()([x, b]))
    return keras.Model({"a": a, "b": b}, keras.layers.Dense(10)(x))


@pytest.mark.parametrize(
    ("get_model", "inputs"), [(token_model, ids), (dict_model, lambda x: {"a": ids(x), "b": x})]
)
def test_token_ids_and_named_inputs_train(tmp_path, get_model, inputs):
    def get_dataset():
        return (Points(64, inputs=inputs),) * 2

    args = "--learning-rate", 0.05, "--epochs", 5, "--sync-batchnorm", "--output-dir", tmp_path
    trained(*args, get_model=get_model, get_dataset=get_dataset)
    losses = [row["val_loss"] for row in history(tmp_path)]
    assert losses[-1] < losses[0] - 0.1


# ---- The training loop ----
class Penalty(keras.layers.Layer):
    def build(self, shape):
        self.w = self.add_weight(shape=(3,), initializer="ones")

    def call(self, inputs):
        self.add_loss(keras.ops.sum(keras.ops.square(self.w)))
        return inputs


def penalized_model():
    dense = keras.layers.Dense(10, kernel_regularizer=keras.regularizers.L2(5.0))
    return keras.Sequential([keras.Input((6,)), Penalty(), dense])


def test_the_models_own_losses_are_reported_and_trained(tmp_path):
    trained(
        "--learning-rate", 1e-12, "--epochs", 1, "--output-dir", tmp_path, get_model=penalized_model
    )
    w, kernel, bias = checkpoint(tmp_path)["variables"]
    data = Points(64)
    logits = data.x @ kernel + bias
    losses = np.log(np.exp(logits).sum(1)) - logits[range(64), data.y]
    expected = losses.mean() + 5 * np.square(kernel).sum() + np.square(w).sum()
    assert history(tmp_path)[0]["loss"] == pytest.approx(expected, abs=1e-4)

    trained(
        "--learning-rate",
        0.1,
        "--epochs",
        5,
        "--output-dir",
        tmp_path / "b",
        get_model=penalized_model,
    )
    w, kernel_after, _ = checkpoint(tmp_path / "b")["variables"]
    assert abs(w).max() < 0.5
    assert np.square(kernel_after).sum() < np.square(kernel).sum() / 4


def test_constraints_hold_after_training(tmp_path):
    def get_model():
        dense = keras.layers.Dense(10, kernel_constraint="non_neg", bias_constraint="max_norm")
        norm = keras.layers.BatchNormalization(gamma_constraint=keras.constraints.MaxNorm(0.5))
        return keras.Sequential([keras.Input((6,)), norm, dense])

    trained("--learning-rate", 0.1, "--output-dir", tmp_path, get_model=get_model)
    weights = call(lambda: keras.saving.load_model(tmp_path / "model.keras").get_weights())
    (gamma, *_, kernel, bias) = weights
    assert kernel.min() == 0 < kernel.max()
    assert np.linalg.norm(gamma) <= 0.5 + 1e-6
    assert np.linalg.norm(bias) <= 2 + 1e-6


class Steps(keras.layers.Layer):
    """Counts in an integer variable, on each replica another number."""

    def build(self, shape):
        self.steps = self.add_weight(shape=(), dtype="int64", initializer="zeros", trainable=False)

    def call(self, inputs, training=None):
        if training:
            self.steps.assign(self.steps + dist.get_rank() + 1)
        return inputs


GPU = pytest.mark.skipif(not torch.cuda.device_count(), reason="needs a GPU")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=GPU)])
def test_replicas_stay_equal_to_the_bit_and_frozen_and_integer_state_is_left_alone(device):
    def get_model():
        frozen = keras.layers.Dense(512, trainable=False, bias_initializer="glorot_normal")
        norm = keras.layers.BatchNormalization(momentum=0.5)
        layers = Steps(), keras.layers.Dropout(0.5), keras.layers.Dense(10)
        return keras.Sequential([keras.Input((6,)), frozen, norm, *layers])

    def replica(rank):
        model, _ = fit(rank, get_model, Points(96), rate=0.1)
        keras.utils.set_random_seed(0)  # of rank 0, which the others take up
        kernel, bias, gamma, beta, mean, variance, steps, *others = values(model.variables)
        assert (mean != 0).all() and (variance != 1).all()
        assert steps == 2 * 4 * (rank + 1)
        for before, after in zip(values(get_model().layers[0].variables), (kernel, bias)):
            assert before.tobytes() == after.tobytes()
        return [
            x.tobytes() for x in (gamma, beta, mean, variance, *values(model.trainable_variables))
        ]

    first, *others = on_replicas(3, replica, device=device)
    assert all(other == first for other in others)


def test_noise_differs_by_replica_epoch_and_seed_and_is_the_same_in_each_run():
    layers = keras.layers

    def get_model():
        inputs = keras.Input((6,))
        noise = layers.Dropout(0.5), layers.Dropout(0.5, seed=1), layers.GaussianNoise(1.0, seed=1)
        x = layers.Concatenate()([layer(inputs) for layer in noise])
        dense = layers.Dense(18, kernel_initializer="identity", use_bias=False)
        return keras.Model(inputs, dense(x))

    def noise(rank, seed):
        _, (outputs, _, _) = fit(rank, get_model, Points(32, inputs=np.ones_like), seed=seed)
        return np.reshape(outputs, (2, 2 * 8, 3, 6))  # (epoch, sample, layer, feature)

    ranks = np.array(on_replicas(2, noise, 0))
    others = np.array(on_replicas(2, noise, 1))
    for layer in range(3):
        drawn = [
            x.tobytes()
            for x in (*ranks[..., layer, :].reshape(4, -1), *others[..., layer, :].reshape(4, -1))
        ]
        assert len(set(drawn)) == 8
    assert (ranks == np.array(on_replicas(2, noise, 0))).all()


# ---- Evaluation and what is reported ----
def test_evaluation_equals_that_of_the_saved_model_to_the_sample(tmp_path):
    trained("--nproc", 3, "--output-dir", tmp_path, get_dataset=points(96, tests=1003))
    loss, hits = alone(tmp_path / "model.keras", Points(1003, seed=1))
    row = history(tmp_path)[-1]
    assert row["val_accuracy"] * 1003 == pytest.approx(hits, abs=1e-6)
    assert row["val_loss"] == pytest.approx(loss, abs=1e-4)


def test_training_loss_and_accuracy_are_means_over_all_samples_of_all_replicas(tmp_path):
    args = "--learning-rate", 1e-12, "--batch-size", 16, "--epochs", 1, "--output-dir", tmp_path
    trained(*args, get_model=linear_model, get_dataset=points(80))  # steps of 16, 16 and 8
    loss, hits = alone(tmp_path / "model.keras", Points(80))
    row = history(tmp_path)[0]
    assert row["accuracy"] * 80 == pytest.approx(hits, abs=1e-6)
    assert row["loss"] == pytest.approx(loss, abs=1e-5)


# ---- Batch normalization ----
def reference(layer, inputs, dy):
    """Keras' own layer in float64: outputs, gradients and moving statistics."""
    config = layer.get_config() | {"dtype": "float64", "synchronized": False}
    twin = keras.layers.BatchNormalization.from_config(config)
    twin.build(inputs.shape)
    twin.set_weights(layer.get_weights())
    return run_layer(twin, inputs.double(), dy.double())


def run_layer(layer, inputs, dy):
    x = inputs.clone().requires_grad_()
    for _ in range(2):
        y = layer(x, training=True)
    (y * dy).sum().backward()
    gradients = [v.value.grad for v in layer.trainable_variables]
    found = [y, x.grad, *gradients, *[v.value for v in layer.non_trainable_variables]]
    return [tensor.detach().double().numpy() for tensor in found]


@pytest.mark.parametrize("synchronized", [False, True])
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((8, 5), {}),
        ((8, 5), {"trainable": False}),
        ((1, 5), {}),
        ((8, 7, 5), {"scale": False}),
        ((8, 7, 5), {"axis": 1, "center": False}),
        ((4, 6, 7, 5), {"momentum": 0.3, "epsilon": 0.1}),
        ((4, 5, 6, 7), {"axis": 1, "scale": False, "center": False}),
        ((2, 3, 4, 5, 6), {}),
        ((2, 3, 4, 5, 6), {"axis": 1}),
        ((2, 3, 4, 5, 6), {"axis": 2}),
    ],
)
def test_batch_norm_equals_that_of_keras(shape, options, synchronized):
    def run(rank):
        keras.utils.set_random_seed(1)
        layer = train_ddp.ReplicaBatchNormalization(**options)
        layer.synchronized = synchronized
        layer.build(shape)
        layer.set_weights([np.random.uniform(0.5, 2, w.shape) for w in layer.get_weights()])
        x, dy = torch.randn(shape) * 3 + 1, torch.randn(shape)
        return reference(layer, x, dy), run_layer(layer, x, dy)

    ((expected, found),) = on_replicas(1, run)
    for one, other in zip(expected, found, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("synchronized", [False, True])
def test_batch_norm_is_exact_far_from_zero(synchronized):
    """Keras' own layer is off by 0.3 there, and so is no reference."""
    x = np.random.default_rng(0).normal(1000, 1, (256, 5)).astype("float32")

    def run(rank):
        layer = train_ddp.ReplicaBatchNormalization(epsilon=1e-6, momentum=0.0)
        layer.synchronized = synchronized
        layer.build(x.shape)
        return [
            layer(torch.from_numpy(x), training=True).detach().numpy(),
            *values(layer.variables),
        ]

    ((y, _, _, mean, variance),) = on_replicas(1, run)
    exact = x.astype("float64")
    np.testing.assert_allclose(mean, exact.mean(0), rtol=1e-6)
    np.testing.assert_allclose(variance, exact.var(0), rtol=1e-5)
    exact = (exact - exact.mean(0)) / np.sqrt(exact.var(0) + 1e-6)
    np.testing.assert_allclose(y, exact, atol=3e-4)  # float32 at 1000 is good for 6e-5


@pytest.mark.parametrize("synchronized", [False, True])
def test_batch_norm_takes_bfloat16_and_keeps_its_statistics_in_float32(synchronized):
    def run(rank):
        layer = train_ddp.ReplicaBatchNormalization(dtype="mixed_bfloat16")
        layer.synchronized = synchronized
        layer.build((256, 5))
        x = (torch.randn(256, 5) * 3 + 7).bfloat16()
        dy = torch.randn(256, 5).bfloat16()
        assert layer(x, training=True).dtype == torch.bfloat16
        assert {v.value.dtype for v in layer.variables} == {torch.float32}
        layer.moving_mean.assign(torch.zeros(5)), layer.moving_variance.assign(torch.ones(5))
        return reference(layer, x, dy), run_layer(layer, x, dy)

    ((expected, found),) = on_replicas(1, run)
    for one, other in zip(expected[:-2], found[:-2], strict=True):
        np.testing.assert_allclose(other, one, rtol=0.02, atol=0.05)
    np.testing.assert_allclose(found[-2:], expected[-2:], rtol=1e-5)


def test_synchronized_replicas_train_like_one_with_the_global_batch():
    def get_model(norm):
        layers = keras.layers
        x = inputs = keras.Input((6,))
        for layer in (
            layers.Dense(12, use_bias=False),
            layers.Reshape((2, 2, 3)),
            norm(momentum=0.9),
            layers.Activation("tanh"),
            layers.Conv2D(6, 2, use_bias=False),
            norm(axis=1, scale=False, momentum=0.5),
            layers.Flatten(),
            layers.Dense(10),
        ):
            x = layer(x)
        return keras.Model(inputs, x)

    def synchronized(**options):
        layer = train_ddp.ReplicaBatchNormalization(**options)
        layer.synchronized = True
        return layer

    def losses_and_statistics(rank, norm):
        batch_size = 48 // dist.get_world_size()
        args = {"epochs": 50, "rate": 0.1, "batch_size": batch_size}
        model, (_, _, losses) = fit(rank, lambda: get_model(norm), Points(48), **args)
        return np.array(losses), np.concatenate(values(model.non_trainable_variables))

    def run(world, norm):
        losses, statistics = zip(*on_replicas(world, losses_and_statistics, norm))
        return np.mean(losses, 0), statistics[0]

    one, statistics = run(1, keras.layers.BatchNormalization)
    assert one[-1] < one[0] - 0.1
    for world in 2, 3, 4:
        losses, others = run(world, synchronized)
        np.testing.assert_allclose(losses, one, rtol=0, atol=1e-5)
        np.testing.assert_allclose(others, statistics, rtol=1e-4, atol=1e-4)
    losses, _ = run(2, keras.layers.BatchNormalization)
    assert abs(losses - one).max() > 1e-3


def nested_model():
    """A model in a model in a model, and layers that are used twice."""
    layers = keras.layers
    tanh, norm = keras.ops.tanh, [layers.BatchNormalization(momentum=0.5) for _ in "123"]
    dense = layers.Dense(12, use_bias=False)  # Adam would turn a bias' zero gradient into noise
    inner = keras.Sequential([keras.Input((12,)), dense, norm[0]])
    x = keras.Input((12,))
    middle = keras.Model(x, tanh(layers.Add()([norm[1](inner(x)), inner(tanh(x))])))
    x = inputs = keras.Input((6,))
    for layer in layers.Dense(12), tanh, middle, norm[2], tanh, norm[2], layers.Dense(10):
        x = layer(x)
    return keras.Model(inputs, x)


def test_the_flag_synchronizes_nested_and_shared_layers_and_saves_plain_ones(tmp_path):
    def losses(name, *args):
        args = "--epochs", 5, "--output-dir", tmp_path / name, *args
        out = trained(*args, get_model=nested_model, get_dataset=points(24, tests=101)).out
        assert "global batch 24" in out
        return np.array([[row["loss"], row["val_loss"]] for row in history(tmp_path / name)])

    one = losses("1", "--nproc", 1, "--batch-size", 24, "--sync-batchnorm")
    for world in 2, 3:
        args = "--nproc", world, "--batch-size", 24 // world
        np.testing.assert_allclose(losses(str(world), *args, "--sync-batchnorm"), one, atol=1e-5)
    assert abs(losses("unsynchronized", *args) - one).max() > 1e-3

    path = tmp_path / "3" / "model.keras"
    assert alone(path, Points(101, seed=1))[0] == pytest.approx(one[-1, 1], abs=1e-4)
    with zipfile.ZipFile(path) as file:
        config = file.read("config.json").decode()
    assert config.count('"class_name": "BatchNormalization"') == 3 and "train_ddp" not in config


@keras.saving.register_keras_serializable("test")
class Subclassed(keras.Model):
    def __init__(self, **options):
        super().__init__(**options)
        self.norm, self.dense = keras.layers.BatchNormalization(), keras.layers.Dense(10)

    def call(self, inputs, training=None):
        return self.dense(self.norm(inputs, training=training))


@keras.saving.register_keras_serializable("test")
class Opposite(keras.Model):
    """A Functional model with a `call` of its own, which a clone does without."""

    def __init__(self, **options):
        x = keras.Input((6,))
        norm, dense = keras.layers.BatchNormalization(), keras.layers.Dense(10)
        super().__init__(x, dense(norm(x)), **options)

    def call(self, inputs, training=None):
        return -super().call(inputs, training=training)


@keras.saving.register_keras_serializable("test")
class OwnNorm(keras.layers.BatchNormalization):
    pass


def norm_model(norm):
    """Has a layer that the script may replace, too."""
    shape, conv = keras.layers.Reshape((2, 3, 1)), keras.layers.Conv2D(4, 2)
    layers = conv, norm, keras.layers.Flatten(), keras.layers.Dense(10)
    return keras.Sequential([keras.Input((6,)), shape, *layers])


@pytest.mark.parametrize(
    "get_model",
    [
        Subclassed,
        Opposite,
        lambda: norm_model(OwnNorm()),
        lambda: norm_model(keras.layers.BatchNormalization(renorm=True)),
    ],
    ids=["subclassed", "own call", "own layer", "renorm"],
)
def test_a_model_that_cannot_be_synchronized_is_refused_with_the_flag_only(tmp_path, get_model):
    refused = train("--sync-batchnorm", "--output-dir", tmp_path, get_model=get_model)
    assert refused.code == 1 and "--sync-batchnorm" in message(refused)
    assert not list(tmp_path.iterdir())

    trained("--output-dir", tmp_path, get_model=get_model)
    loss, _ = alone(tmp_path / "model.keras", Points(20, seed=1))
    assert history(tmp_path)[-1]["val_loss"] == pytest.approx(loss, abs=1e-4)


def conv_model():
    """Convolutions of all kinds, each followed by batch normalization."""
    layers = keras.layers
    x = inputs = keras.Input((6,))
    x = layers.Reshape((12, 10, 2))(layers.Dense(240)(x))
    for options in (
        {"padding": "same", "strides": 2},
        {"kernel_size": (2, 3)},
        {"padding": "same", "dilation_rate": 2, "groups": 2},
        {"padding": "valid", "activation": "relu", "kernel_regularizer": "l2"},
    ):
        x = layers.Conv2D(**{"filters": 4, "kernel_size": 2, "use_bias": False} | options)(x)
        x = keras.ops.tanh(layers.BatchNormalization()(x))
    x = layers.Conv2D(3, 2, data_format="channels_first")(layers.Permute((3, 1, 2))(x))
    return keras.Model(inputs, layers.Dense(10)(layers.Flatten()(x)))


@pytest.mark.parametrize("args", [[], ["--sync-batchnorm"]])
def test_one_replica_trains_like_a_plain_loop(tmp_path, args):
    def plain_losses():
        keras.utils.set_random_seed(0)
        model, data, losses = conv_model(), Points(64), []
        optimizer = torch.optim.Adam([v.value for v in model.trainable_variables], lr=1e-3)
        for _ in range(5):
            optimizer.zero_grad()
            outputs = model(torch.from_numpy(data.x), training=True)
            loss = cross_entropy(outputs, torch.from_numpy(data.y)) + sum(model.losses)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    args = *args, "--nproc", 1, "--batch-size", 64, "--epochs", 5, "--output-dir", tmp_path
    trained(*args, get_model=conv_model)
    losses = [row["loss"] for row in history(tmp_path)]
    np.testing.assert_allclose(losses, call(plain_losses), atol=1e-5)


# ---- The whole run ----
def test_the_same_seed_gives_the_same_bits_also_with_two_runs_at_once(tmp_path):
    def start(name, seed):
        args = *FORK, "--seed", seed, "--output-dir", str(tmp_path / name)
        return Child(train_ddp.main, args, small_model, points())

    for child in [start("a", "0"), start("b", "0"), start("c", "1")]:
        assert child.wait().code == 0
    assert bits(tmp_path / "a") == bits(tmp_path / "b") != bits(tmp_path / "c")


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
    assert tuple(history(out)[0]) == (
        *("epoch", "loss", "accuracy", "val_loss", "val_accuracy", "seconds", "samples_per_second"),
    )
    code = f"""if True:
        import sys, keras, numpy
        model, data = keras.saving.load_model({str(out / "model.keras")!r}), numpy.load({str(data)!r})
        labels = keras.ops.argmax(model(data["x_test"][..., None]), -1)
        print(sum(keras.ops.convert_to_numpy(labels) == data["y_test"]), "train_ddp" in sys.modules)
    """
    run = python("-c", code, cwd=tmp_path, KERAS_BACKEND="torch", PYTHONPATH="").wait()
    hits, known = run.out.split()
    assert int(hits) == round(history(out)[-1]["val_accuracy"] * 20, 6) and known == "False"


OWN = """
import os
import train_ddp
import keras, numpy

def get_model():
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(4)])

class Own:
    source = "numbers of mine"

    def __init__(self):
        self.x = numpy.zeros((24, 3), "float32")

    def __len__(self):
        return 24

    def __getitem__(self, index):
        return self.x[index], index % 4

def get_dataset(data):
    print("loaded", data)
    return Own(), Own()

if __name__ == "__main__":
    train_ddp.main(get_model=get_model, get_dataset=get_dataset)
"""


def test_a_model_and_data_of_ones_own_train_in_spawned_replicas(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(OWN)
    run = python(path, *TINY, "--data", "here").wait()
    assert (run.code, run.err) == (0, "")
    loaded, what, *epochs, last = run.out.splitlines()
    assert loaded == "loaded here"  # once
    assert len(epochs) == 2 and all("numbers of mine" in line for line in (what, *epochs))
    assert "nothing was written" in last


def test_importing_the_script_starts_nothing():
    code = """if True:
        import multiprocessing, os, sys, threading
        sys.argv = ["x", "--frobnicate"]
        import train_ddp, torch
        assert not torch.cuda.is_initialized() and not torch.distributed.is_initialized()
        assert threading.active_count() == 1 and not multiprocessing.active_children()
        pid = os.fork()  # CUDA must not have been touched: a forked child could not use it
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
    assert run.code == 1
    assert re.search(r"^ImportError: .*numpy.*$", run.err.splitlines()[-1])


def test_the_cpu_is_enough_where_keras_default_device_can_compute_nothing(tmp_path):
    code = f"""if True:
        import test_train_ddp as tests
        args = [*tests.FORK, "--output-dir", {str(tmp_path / "out")!r}, "--resume", "--epochs"]
        for epochs in "1", "2":
            tests.train_ddp.main([*args, epochs], tests.small_model, tests.points())
    """
    run = python("-c", code, KERAS_TORCH_DEVICE="meta").wait()
    assert (run.code, run.err) == (0, "")
    loss, hits = alone(tmp_path / "out" / "model.keras", Points(20, seed=1))
    assert history(tmp_path / "out")[1]["val_accuracy"] * 20 == pytest.approx(hits, abs=1e-6)


def test_bfloat16_computes_in_it_and_saves_a_float32_model(tmp_path):
    trained("--output-dir", tmp_path / "a", get_model=linear_model)
    trained("--output-dir", tmp_path / "b", "--precision", "bfloat16", get_model=linear_model)
    (one, *_), (other, *_) = history(tmp_path / "a"), history(tmp_path / "b")
    assert one["loss"] != other["loss"] == pytest.approx(one["loss"], abs=0.02)

    def dtypes():
        model = keras.saving.load_model(tmp_path / "b" / "model.keras")
        return {v.dtype for v in model.variables}, {x.dtype_policy.name for x in model.layers}

    assert call(dtypes) == ({"float32"}, {"float32"})
    loss, _ = alone(tmp_path / "b" / "model.keras", Points(20, seed=1))
    assert history(tmp_path / "b")[-1]["val_loss"] == pytest.approx(loss, abs=1e-5)


def test_without_network_the_default_data_are_synthetic_and_every_line_says_so(tmp_path):
    code = """if True:
        import test_train_ddp as tests, keras, os, sys
        def get_model():
            layers = keras.layers.Rescaling(1 / 255), keras.layers.Flatten(), keras.layers.Dense(10)
            return keras.Sequential([keras.Input((28, 28, 1)), *layers])
        args = [*tests.FORK, "--batch-size", "512", "--epochs", "1"]
        tests.train_ddp.main(args, get_model)
        for data, torchrun in ["mnist"], {}), ([], {"TORCHELASTIC_RUN_ID": "none"}):
            print("----", file=sys.stderr, flush=True)
            os.environ.update(torchrun)
            try:
                tests.train_ddp.get_dataset(*data)
            except SystemExit as error:
                print(error.code, file=sys.stderr)
    """.replace('in ["mnist"]', 'in (["mnist"]')
    closed = "http://127.0.0.1:9"
    environ = {f"{name}_proxy": closed for name in ("http", "https", "HTTP", "HTTPS")}
    run = python(
        "-c", code, **environ, HOME=str(tmp_path), KERAS_HOME=str(tmp_path / "keras")
    ).wait()
    assert run.code == 0, run.err
    accuracies = [line for line in run.out.splitlines() if "accuracy" in line]
    assert accuracies and all("synthetic" in line for line in accuracies)
    warning, *refusals = run.err.split("----\n")
    assert "SYNTHETIC" in warning
    for refusal in refusals:
        assert re.fullmatch(r"[^\n]*MNIST[^\n]*\n2\n", refusal)


def test_synthetic_digits_are_as_many_as_mnist_has_and_the_same_each_time():
    def digits():
        sets = [tuple(map(np.asarray, data.tensors)) for data in train_ddp.get_dataset("synthetic")]
        return [(x.shape, x.dtype, x[-1].tobytes(), np.bincount(y).min()) for x, y in sets]

    train_set, test_set = first = call(digits)
    assert first == call(digits)
    assert train_set[:2] == ((60_000, 28, 28, 1), "uint8") and train_set[3] > 5_500
    assert test_set[:2] == ((10_000, 28, 28, 1), "uint8") and test_set[3] > 900
    assert train_set[2] != test_set[2]


def test_help_shows_every_default():
    text = train("--help").out
    shown = " ".join(text.split())
    for default in None, 2, 64, 0.001, 0, "auto", "float32", False, "spawn":
        assert f"(default: {default})" in shown
    assert shown.count("(default: ") == text.count("\n  --") > 11  # all but -h


def test_progress_shows_on_a_terminal_only():
    def on_terminal():
        main_end, end = os.openpty()
        os.dup2(end, 1)
        train_ddp.main([*FORK, "--epochs", "1"], small_model, points())
        return os.read(main_end, 4096).decode()

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
wide_model = partial(
    small_model, 2048
)  # its checkpoint is thrice its model.keras, and both are big
RUN = "--epochs", 3, "--output-dir"


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """The bits of a run of `wide_model` that nothing happened to."""
    folder = tmp_path_factory.mktemp("unbroken")
    trained(*RUN, folder, get_model=wide_model)
    return bits(folder)


def resumed(folder):
    """Returns the bits of a run in the folder after it was resumed."""
    run = trained(*RUN, folder, "--resume", get_model=wide_model)
    assert "another run" not in run.out
    assert set(os.listdir(folder)) == FILES
    return bits(folder)


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def limit_files(path, ends):
    """No file of this process may be longer than half of this one, or else it ends."""
    half = path.stat().st_size // 2
    resource.setrlimit(resource.RLIMIT_FSIZE, (half, half))
    if ends:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores it


@pytest.mark.parametrize(
    ("rank", "count", "action"),
    [
        (1, 1, kill),  # before the first step
        (0, 30, kill),  # in the first epoch
        (1, 70, kill),  # in the second
        (0, 70, kill),
        (0, 70, "model.keras"),  # while it is written
        (0, 70, "checkpoint.pt"),
    ],
)
def test_a_killed_rank_is_named_and_the_resumed_run_has_the_same_bits(
    tmp_path, unbroken, rank, count, action
):
    kill_here = kill if action is kill else lambda: limit_files(tmp_path / action, ends=True)
    trap = points(rank=rank, when=lambda n: n == count, action=kill_here)
    run = train(*RUN, tmp_path, get_model=wide_model, get_dataset=trap)
    assert run.code == 1 and re.search(rf"\brank {rank}\b.*\bsignal\b", message(run))
    assert "--resume" in run.err
    assert resumed(tmp_path) == unbroken


def test_a_rank_killed_in_the_evaluation_is_named_and_the_run_can_be_resumed(tmp_path, unbroken):
    def get_dataset():
        return Points(64), Points(20, seed=1, rank=1, when=lambda n: n == 15, action=kill)

    run = train(*RUN, tmp_path, get_model=wide_model, get_dataset=get_dataset)
    assert run.code == 1 and re.search(r"\brank 1\b.*\bsignal\b", message(run))
    assert resumed(tmp_path) == unbroken


@pytest.mark.parametrize("name", ["model.keras", "checkpoint.pt"])
def test_a_full_disk_is_reported_and_leaves_the_last_checkpoint_whole(tmp_path, unbroken, name):
    trap = points(when=lambda n: n == 70, action=lambda: limit_files(tmp_path / name, ends=False))
    run = train(*RUN, tmp_path, get_model=wide_model, get_dataset=trap)
    assert run.code == 1
    assert str(tmp_path / name) in message(run) and "File too large" in message(run)
    assert set(os.listdir(tmp_path)) == FILES
    assert len(checkpoint(tmp_path)["history"]) == 1
    assert resumed(tmp_path) == unbroken


def stall(ready):
    ready.touch()
    time.sleep(300)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_ends_the_run_at_once_and_leaves_no_process(tmp_path, unbroken, number):
    """SIGTERM goes to the parent alone, as a cluster sends it; SIGINT to all, as a terminal does."""
    ready = tmp_path / "ready"
    trap = points(rank=1, when=lambda n: n == 70, action=lambda: stall(ready))
    child = Child(train_ddp.main, [*FORK, *map(str, RUN), str(tmp_path)], wide_model, trap)
    assert until(ready.exists)
    send = os.killpg if number == signal.SIGINT else os.kill
    send(child.pid, number)
    run = child.wait()
    ready.unlink()
    if number == signal.SIGKILL:
        assert (run.code, run.err) == (-9, "")
    else:
        assert run.code == 128 + number
        assert re.fullmatch(r".*--resume.*\n", run.err)
    assert resumed(tmp_path) == unbroken


@pytest.mark.parametrize("moment", ["start", "training"])
def test_ctrl_c_ends_spawned_replicas_without_a_traceback(tmp_path, moment):
    data = save_npz(tmp_path / "data.npz")
    args = "--data", data, "--epochs", 100_000, "--output-dir", tmp_path / "out"
    child = python(SCRIPT, *TINY, *args)
    if moment == "start":  # while they import torch and Keras
        assert until(lambda: len(child.left()) >= 4)  # the parent, its resource tracker and two
    else:
        assert until((tmp_path / "out" / "checkpoint.pt").exists)
    os.killpg(child.pid, signal.SIGINT)
    run = child.wait(timeout=30)
    assert run.code == 130
    assert re.fullmatch(r".*--resume.*\n", run.err)


def test_main_works_in_a_thread_and_puts_the_signal_handlers_back():
    def handlers():
        return [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]

    def run():
        before = handlers()
        args = [*FORK, "--epochs", "1"], small_model, points()
        thread = threading.Thread(target=train_ddp.main, args=args)
        thread.start()
        while thread.is_alive():
            assert handlers() == before
            time.sleep(0.01)
        train_ddp.main(*args)
        return handlers() == before

    child = Child(run).wait()
    assert child.result, child.err
    assert child.out.count("epoch 1/1") == 2


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_an_exception_in_one_rank_shows_its_own_traceback_once(tmp_path, rank):
    def fail():
        raise ValueError(f"a bad sample on {rank}")

    trap = points(96, rank=rank, when=lambda n: n == 50, action=fail)
    run = train("--nproc", 3, *RUN, tmp_path, get_dataset=trap)
    assert run.code == 1
    assert run.err.count("Traceback") == run.err.count(f"ValueError: a bad sample on {rank}") == 1
    assert f"rank {rank}" in run.err and "--resume" in run.err.splitlines()[-1]
    assert len(checkpoint(tmp_path)["history"]) == 1


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_good_checkpoint(tmp_path):
    data = points()()

    def spoil():
        data[0].x[:] = np.nan

    data[0].rank, data[0].when, data[0].action = 1, lambda n: n == 70, spoil
    run = train(*RUN, tmp_path, get_dataset=lambda: data)
    assert run.code == 1
    assert re.search(r"epoch 2\b.*\bnan\b", message(run)) and "--resume" in run.err
    assert [row[0] for row in checkpoint(tmp_path)["history"]] == [1]
    assert len(history(tmp_path)) == 1
    trained(*RUN, tmp_path, "--resume")
    assert all(np.isfinite(weight).all() for weight in checkpoint(tmp_path)["variables"])


def test_a_rank_that_stops_answering_ends_the_run(tmp_path):
    def run():
        train_ddp.COLLECTIVE_TIMEOUT = timedelta(seconds=3)
        trap = points(rank=1, when=lambda n: n == 70, action=freeze)
        train_ddp.main([*FORK, *map(str, RUN), str(tmp_path)], small_model, trap)

    def freeze():
        os.kill(os.getpid(), signal.SIGSTOP)

    ended = Child(run).wait()
    assert ended.code == 1
    assert re.search("(?i)time", ended.err) and "--resume" in ended.err.splitlines()[-1]


def test_ten_short_runs_in_a_row_end():
    """With gloo a process group that goes before its last tensor can hang for ever."""

    def run():
        for world in [1, 2, 3, 1, 2, 3, 1, 2, 3, 1]:
            args = [*FORK, "--nproc", str(world), "--epochs", "1"]
            train_ddp.main(args, small_model, points(320 * world))

    run = Child(run).wait()
    assert run.code == 0 and run.out.count("epoch 1/1") == 10


def test_a_resumed_run_takes_the_new_flags_and_says_so(tmp_path):
    def weights():
        return np.concatenate([w.ravel() for w in checkpoint(tmp_path)["variables"]])

    trained("--epochs", 1, "--output-dir", tmp_path, get_model=linear_model)
    before, args = weights(), ("--epochs", 2, "--learning-rate", 1e-12)
    run = trained(*args, "--output-dir", tmp_path, "--resume", get_model=linear_model)
    assert re.search("learning.rate.*1e-12", run.out) and "another run" in run.out
    np.testing.assert_allclose(weights(), before, atol=1e-9)
    assert len(history(tmp_path)) == 2


def test_resuming_a_run_that_has_ended_says_so_and_changes_nothing(tmp_path):
    args = "--epochs", 1, "--output-dir", tmp_path, "--resume"
    trained(*args)
    before = contents(tmp_path)
    run = trained(*args)
    assert re.search(r"(?i)no more|nothing|already|all \d+ epochs", run.out)
    assert contents(tmp_path) == before


# ---- torchrun ----
WORKER = """
import os, signal, sys
from pathlib import Path
import test_train_ddp as tests

def kill():
    (folder / "killed").touch()
    os.kill(os.getpid(), signal.SIGKILL)

folder, args = Path(sys.argv[1]), sys.argv[2:]
trap = tests.points(rank=1, when=lambda n: n == 70 and "--resume" in args, action=kill)
if not (folder / "killed").exists():
    get_dataset = trap
else:
    get_dataset = tests.points()
tests.train_ddp.main(args, tests.wide_model, get_dataset)
"""


def torchrun(folder, *args):
    """Starts torchrun; the options of torchrun and of the script are parted by the worker's name."""
    path = folder / "worker.py"
    path.write_text(WORKER)
    place = args.index("worker")
    args = *args[:place], "--", path, folder, *TINY[2:], *args[place + 1 :]
    return python("-m", "torch.distributed.run", *args)


def test_torchrun_restarts_a_killed_worker_and_the_bits_are_the_same(tmp_path, unbroken):
    out = tmp_path / "out"
    options = "--standalone", "--nproc-per-node", 2, "--max-restarts", 3
    run = torchrun(tmp_path, *options, "worker", *RUN, out, "--resume").wait()
    assert run.code == 0, run.err
    assert (tmp_path / "killed").exists()
    assert bits(out) == unbroken


def test_two_machines_give_what_four_replicas_give_and_the_first_writes(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = (
        "--nnodes",
        2,
        "--nproc-per-node",
        2,
        "--rdzv-backend",
        "c10d",
        "--local-addr",
        "127.0.0.1",
    )
    options = *options, "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", tmp_path.name
    machines = [
        torchrun(tmp_path, *options, "worker", *RUN, tmp_path / name) for name in ("a", "b")
    ]
    runs = [machine.wait() for machine in machines]
    assert [run.code for run in runs] == [0, 0], runs[0].err + runs[1].err
    assert sorted(run.out.count("epoch 3/3") for run in runs) == [0, 1]
    (wrote,) = [name for name in ("a", "b") if (tmp_path / name / "checkpoint.pt").exists()]
    trained("--nproc", 4, *RUN, tmp_path / "c", get_model=wide_model)
    for one, other in zip(history(tmp_path / wrote), history(tmp_path / "c"), strict=True):
        assert [*one.values()][:5] == pytest.approx([*other.values()][:5], abs=1e-6)
    assert not list((tmp_path / ("b" if wrote == "a" else "a")).glob("*"))


def test_torchrun_refuses_bad_input_once(tmp_path):
    options = "--standalone", "--nproc-per-node", 2
    run = torchrun(tmp_path, *options, "worker", "--nproc", 2).wait()
    assert run.code != 0
    assert len(re.findall("^train_ddp.py: .*--nproc", run.err, re.MULTILINE)) == 1
    assert "epoch" not in run.out


# ---- Bad input: one line, exit 2, nothing written ----
def check_refusal(folder, args, said, **options):
    before = contents(folder)
    run = Child(train_ddp.main, [str(arg) for arg in args], *options.values()).wait()
    assert (run.code, run.out, run.err.count("\n")) == (2, "", 1), run
    assert said in run.err
    assert contents(folder) == before


NO_GPU = pytest.mark.skipif(torch.cuda.device_count() > 0, reason="there is a GPU")


@pytest.mark.parametrize(
    "flags",
    [
        *("--nproc 0", "--nproc -1", "--nproc two", "--device tpu", "--frobnicate", "more"),
        *("--epochs 0", "--epochs -1", "--epochs 1.5", "--epochs nan", "--epochs"),
        *("--batch-size 0", "--batch-size -8", "--batch-size 1e3"),
        *("--learning-rate 0", "--learning-rate -1", "--learning-rate nan"),
        *("--learning-rate inf", "--learning-rate fast"),
        *("--seed -1", "--seed 4294967296", "--seed one"),
        *("--precision float16", "--start-method thread", "--sync-batchnorm yes"),
        pytest.param("--device cuda", marks=NO_GPU),
    ],
)
def test_bad_flags_are_refused(tmp_path, flags):
    args = *TINY, "--output-dir", tmp_path / "out", *flags.split()
    said = flags.split()[0] if flags != "--sync-batchnorm yes" else "yes"
    check_refusal(tmp_path, args, said, get_model=small_model, get_dataset=points())


def test_more_replicas_than_gpus_are_refused_with_their_number(tmp_path):
    args = "--device", "cuda", "--nproc", 99, "--output-dir", tmp_path / "out"
    check_refusal(tmp_path, args, f"{torch.cuda.device_count()}", model=small_model, data=points())


def test_resume_without_a_folder_is_refused(tmp_path):
    check_refusal(tmp_path, [*TINY, "--resume"], "--output-dir", model=small_model, data=points())


class Malicious:
    """Unpickled, it would write a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


IMAGES, LABELS = np.zeros((20, 28, 28), "uint8"), np.zeros(20, "int64")


@pytest.mark.parametrize(
    ("said", "make"),
    [
        ("", lambda path: None),
        ("", lambda path: path.mkdir()),
        ("", lambda path: path.touch()),
        ("", lambda path: path.write_text("x_train, y_train, x_test, y_test")),
        ("", lambda path: path.write_bytes(save_npz(path).read_bytes()[:5000])),
        ("", lambda path: path.write_bytes(save_npz(path).read_bytes().replace(b"\1", b"\2"))),
        ("", lambda path: np.save(open(path, "wb"), IMAGES)),
        ("y_test", lambda path: save_npz(path, y_test=None)),
        ("x_train", lambda path: save_npz(path, x_train=None)),
        ("", lambda path: save_npz(path, y_train=np.array([Malicious(path.parent / "bad")] * 64))),
        ("y_train", lambda path: save_npz(path, y_train=LABELS)),
        ("x_test", lambda path: save_npz(path, x_test=IMAGES[:, :27])),
        ("x_test", lambda path: save_npz(path, x_test=IMAGES[..., None])),
        ("x_test", lambda path: save_npz(path, x_test=IMAGES.astype("float32"))),
        ("y_test", lambda path: save_npz(path, y_test=LABELS.astype("float32"))),
        ("y_test", lambda path: save_npz(path, y_test=LABELS[:, None])),
        ("y_test", lambda path: save_npz(path, y_test=LABELS + 10)),
        ("y_test", lambda path: save_npz(path, y_test=LABELS - 1)),
        ("y_test", lambda path: save_npz(path, y_test=LABELS.astype("uint64") - 1)),
        ("y_test", lambda path: save_npz(path, y_test=np.array("7"))),
        ("x_train", lambda path: save_npz(path, x_train=IMAGES[:0], y_train=LABELS[:0])),
        ("x_test", lambda path: save_npz(path, x_test=IMAGES[:0], y_test=LABELS[:0])),
    ],
)
def test_bad_data_are_refused(tmp_path, said, make):
    path = tmp_path / "data.npz"
    make(path)
    args = *TINY, "--data", path, "--output-dir", tmp_path / "out"
    check_refusal(tmp_path, args, said or str(path))


@pytest.mark.parametrize("sizes", [(0, 20), (64, 0)])
def test_a_data_set_of_ones_own_without_samples_is_refused(tmp_path, sizes):
    args = *TINY, "--output-dir", tmp_path / "out"
    check_refusal(tmp_path, args, "sample", get_model=small_model, get_dataset=points(*sizes))


@pytest.mark.parametrize("folder", ["file", "file/below", "/proc/none"])
def test_a_folder_that_cannot_be_written_is_refused(tmp_path, folder):
    (tmp_path / "file").write_text("mine")
    args = *TINY, "--output-dir", tmp_path / folder
    check_refusal(
        tmp_path, args, str(tmp_path / folder), get_model=small_model, get_dataset=points()
    )


@pytest.mark.parametrize("name", sorted(FILES))
def test_a_folder_with_a_run_is_refused_without_resume(tmp_path, name):
    (tmp_path / name).write_text("mine")
    args = *TINY, "--output-dir", tmp_path
    check_refusal(tmp_path, args, "--resume", get_model=small_model, get_dataset=points())


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
        lambda path: path.write_text("no checkpoint"),
        lambda path: path.write_bytes(pickle.dumps(Malicious(path.parent / "bad"))),
        lambda path: torch.save(Malicious(path.parent / "bad"), path),
        lambda path: torch.save({"model": torch.zeros(2)}, path),
        lambda path: torch.save([1, 2], path),
        lambda path: (path.unlink(), path.mkdir()),
    ],
)
def test_a_bad_checkpoint_is_refused(tmp_path, spoil):
    trained("--epochs", 1, "--output-dir", tmp_path)
    call(lambda: spoil(tmp_path / "checkpoint.pt") and None)
    args = *TINY, "--output-dir", tmp_path, "--resume"
    check_refusal(tmp_path, args, "checkpoint.pt", get_model=small_model, get_dataset=points())


@pytest.mark.parametrize("get_model", [wide_model, linear_model])
def test_a_checkpoint_of_another_model_gives_one_message(tmp_path, get_model):
    trained("--epochs", 1, "--output-dir", tmp_path)
    before = contents(tmp_path)
    run = train("--output-dir", tmp_path, "--resume", get_model=get_model)
    assert run.code != 0
    assert "checkpoint.pt" in message(run) and "another model" in message(run)
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    ("replicas", "samples", "tests", "batch"),
    [(3, 2, 2, 8), (3, 1, 1, 8), (1, 1, 1, 8), (1, 9, 1, 8), (2, 5, 3, 1000), (1, 64, 20, 8)],
)
@pytest.mark.parametrize("args", [[], ["--sync-batchnorm"]])
def test_odd_but_good_input_works(tmp_path, replicas, samples, tests, batch, args):
    args = *args, "--nproc", replicas, "--batch-size", batch, "--output-dir", tmp_path
    trained(*args, get_dataset=points(samples, tests))
    loss, _ = alone(tmp_path / "model.keras", Points(tests, seed=1))
    assert history(tmp_path)[-1]["val_loss"] == pytest.approx(loss, abs=1e-4)


# ---- Models of one's own, and how they go wrong ----
@keras.saving.register_keras_serializable("test")
class Blocks(keras.Model):
    """Its layers are in a plain list, and are built in the first call."""

    def __init__(self, names=(None, None), **options):
        super().__init__(**options)
        self.blocks = [keras.layers.Dense(10, name=name) for name in names]

    def call(self, inputs):
        x = keras.ops.tanh(self.blocks[0](inputs))
        return self.blocks[1](x)


class Lazy(keras.Model):
    """Makes its layer in the first call."""

    def call(self, inputs):
        if not hasattr(self, "dense"):
            self.dense = keras.layers.Dense(10)
        return self.dense(inputs)


def unbuilt_model():
    layers = keras.layers
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

    trained("--learning-rate", 0.1, get_model=kept)
    first, second = [pickle.loads(path.read_bytes()) for path in tmp_path.iterdir()]
    assert len(first) >= 4 and first == second


def test_weights_that_ddp_cannot_see_are_named(tmp_path):
    """Of two weights with one path torch sees the last, and DDP would let the other drift apart."""
    run = train("--output-dir", tmp_path, get_model=lambda: Blocks(["twin", "twin"]))
    assert run.code == 1 and "twin" in message(run)
    assert not list(tmp_path.iterdir())


def test_a_layer_that_is_made_in_the_first_call_gives_keras_message_once():
    run = train(get_model=Lazy)
    assert run.code == 1 and run.err.count("state must be created in the `__init__()`") == 1


def test_a_model_with_nothing_to_train_is_refused(tmp_path):
    def get_model():
        return keras.Sequential([keras.Input((6,)), keras.layers.Dense(10, trainable=False)])

    run = train("--output-dir", tmp_path, get_model=get_model)
    assert run.code == 1 and "nothing to train" in message(run)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("args", [[], ["--sync-batchnorm"]])
def test_frozen_layers_stay_as_they_were_to_the_bit(tmp_path, args):
    def get_model():
        layers = keras.layers
        random = {"moving_mean_initializer": "normal", "moving_variance_initializer": "ones"}
        frozen = layers.Dense(512, trainable=False), layers.BatchNormalization(**random)
        frozen[1].trainable = False
        return keras.Sequential([keras.Input((6,)), *frozen, layers.Dense(10)])

    def initial():
        keras.utils.set_random_seed(0)
        return [w.tobytes() for w in get_model().get_weights()]

    def final():
        return [
            w.tobytes() for w in keras.saving.load_model(tmp_path / "model.keras").get_weights()
        ]

    trained("--nproc", 3, *args, "--output-dir", tmp_path, get_model=get_model)
    before, after = call(initial), call(final)
    assert before[:6] == after[:6]
    assert before[6:] != after[6:]


def test_weights_that_are_not_used_give_a_message_that_says_what_to_set(tmp_path):
    class Unused(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense, self.unused = keras.layers.Dense(10), keras.layers.Dense(10)

        def build(self, shape):
            self.dense.build(shape), self.unused.build(shape)

        def call(self, inputs):
            return self.dense(inputs)

    run = train("--output-dir", tmp_path, get_model=Unused)
    assert run.code == 1
    assert "find_unused_parameters" in run.err and run.err.count("Traceback") <= 1
    assert not list(tmp_path.iterdir())


def test_a_function_that_cannot_be_pickled_fails_with_spawn(tmp_path):
    args = [*TINY, "--output-dir", str(tmp_path)]
    run = Child(train_ddp.main, args, lambda: small_model(), points()).wait()
    assert run.code == 1 and "pickle" in run.err
    assert not list(tmp_path.iterdir())


# ---- GPUs ----
@GPU
@pytest.mark.parametrize("args", [[], ["--sync-batchnorm"], ["--precision", "bfloat16"]])
def test_one_gpu_trains_with_nccl_and_resumes(tmp_path, args):
    args = *args, "--device", "cuda", "--nproc", 1, "--output-dir", tmp_path, "--resume"
    run = trained("--epochs", 1, *args)
    assert "cuda" in run.out and "nccl" in run.out
    trained("--epochs", 2, *args)
    loss, hits = alone(tmp_path / "model.keras", Points(20, seed=1))
    assert history(tmp_path)[1]["val_loss"] == pytest.approx(loss, abs=1e-3)
