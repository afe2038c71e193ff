"""Trains a Keras model on several devices with PyTorch's DistributedDataParallel.

    python train_ddp.py                                      # every GPU, or 2 processes on the CPU
    python train_ddp.py --nproc 4 --output-dir out --resume  # keeps the model; goes on from there
    torchrun --nnodes 2 --nproc-per-node 8 ... train_ddp.py  # several machines

It follows the Keras guide "Multi-GPU distributed training with PyTorch" function by function. For a
model and data of your own change `get_model` and `get_dataset`, or give yours to `main`.
"""

import argparse
import contextlib
import gc
import io
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from multiprocessing import active_children, connection, parent_process, resource_tracker
from pathlib import Path
from typing import Any, NoReturn

if sys.stdout is None:  # closed: what is printed would go to the file that gets its number
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - for good
os.environ["KERAS_BACKEND"] = "torch"
# Importing Keras asks for CUDA. Through NVML that leaves CUDA uninitialized here, so that a forked
# process can use it (pytorch issue 40403).
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

import keras
import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset, default_collate

if keras.backend.backend() != "torch":
    raise ImportError(f"Keras already runs on {keras.backend.backend()}: import train_ddp first")

COLLECTIVE_TIMEOUT = timedelta(minutes=10)  # how long a replica waits for the others
FILES = "model.keras", "history.csv", "checkpoint.pt"  # written in this order
COLUMNS = "epoch", "loss", "accuracy", "val_loss", "val_accuracy", "seconds", "samples_per_second"


def refuse(problem: str) -> NoReturn:
    """Says in one line what can't be used, and exits with 2."""
    print(f"train_ddp.py: {problem}", file=sys.stderr)
    raise SystemExit(2)


# ---- Model and data: the two functions to replace with your own ----
def get_model() -> keras.Model:
    """Returns the guide's convnet: (batch, 28, 28, 1), pixels 0 to 255, to logits (batch, 10)."""
    # With Keras' momentum of 0.99 the moving statistics have not converged after the guide's 234
    # steps on 8 replicas: the model tests at 9.7 %. With 0.9 it tests at 96.6 %.
    norm = partial(keras.layers.BatchNormalization, scale=False, momentum=0.9)
    inputs = keras.Input((28, 28, 1))
    # An operation: the Rescaling layer would break the graph of torch.compile.
    x = keras.ops.cast(inputs, "float32") * (1.0 / 255.0)
    x = keras.layers.Conv2D(12, 3, padding="same", use_bias=False)(x)
    x = keras.layers.ReLU()(norm()(x))
    x = keras.layers.Conv2D(24, 6, strides=2, use_bias=False)(x)
    x = keras.layers.ReLU()(norm()(x))
    x = keras.layers.Conv2D(32, 6, strides=2, padding="same", name="large_k")(x)
    x = keras.layers.ReLU()(norm()(x))
    x = keras.layers.GlobalAveragePooling2D()(x)
    x = keras.layers.Dense(256, activation="relu")(x)
    x = keras.layers.Dropout(0.5)(x)
    return keras.Model(inputs, keras.layers.Dense(10)(x))


def get_dataset(data: str | None) -> Sequence[Dataset]:
    """Returns the training and the test set that `--data` names; exits with 2 if it can't."""
    if data == "synthetic":
        return synthetic_digits(60_000, seed=0), synthetic_digits(10_000, seed=1)
    if data not in (None, "mnist"):
        return read_npz(data)
    try:
        return [ArrayDataset(*split, "MNIST") for split in keras.datasets.mnist.load_data()]
    except Exception as error:  # noqa: BLE001 - Keras raises a bare one if the download fails
        problem = f"MNIST is neither in Keras' cache nor can it be downloaded ({error})"
    if data or dist.is_torchelastic_launched():  # several machines must not disagree
        refuse(f"{problem}: give --data synthetic or an .npz")
    print(f"\n*** {problem} ***\n*** SYNTHETIC digits instead ***\n", file=sys.stderr, flush=True)
    return get_dataset("synthetic")


class ArrayDataset(TensorDataset):
    """Images uint8 (N, 28, 28, 1) and labels int64 (N,); `source` is what messages call them."""

    def __init__(self, images: np.ndarray, labels: np.ndarray, source: str):
        super().__init__(*map(torch.from_numpy, (images[..., None], labels.astype("int64"))))
        self.source = source

    def __getitems__(self, indices: list[int]) -> tuple[torch.Tensor, ...]:
        """Reads a batch at once for `DataLoader`: 3 times as fast as sample by sample."""
        return self[torch.as_tensor(indices)]


def synthetic_digits(samples: int, seed: int) -> ArrayDataset:
    """Draws ten "digits", patterns of 7 by 7 squares that no seed changes, under noise."""
    squares = np.random.default_rng(0).integers(0, 2, (10, 7, 7), "uint8") * 120
    random = np.random.default_rng(seed)
    labels, noise = random.integers(0, 10, samples), random.integers(0, 136, (samples, 28, 28))
    images = squares.repeat(4, axis=1).repeat(4, axis=2)[labels] + noise.astype("uint8")
    return ArrayDataset(images, labels, "synthetic digits")


def read_npz(path: str) -> list[ArrayDataset]:
    """Reads and checks `x_train, y_train, x_test, y_test`; never loads a pickled object."""
    try:
        with np.load(path, allow_pickle=False) as file:
            splits = {name: (file[f"x_{name}"], file[f"y_{name}"]) for name in ("train", "test")}
    except Exception as error:  # noqa: BLE001 - whatever zip, zlib, numpy or the file system raises
        refuse(f"--data {path} is no .npz with x_train, y_train, x_test and y_test: {error}")
    for name, (x, y) in splits.items():
        if x.dtype != "uint8" or x.shape != (len(x), 28, 28) or not len(x):
            refuse(f"--data {path}: x_{name} must be uint8 (N, 28, 28), it is {x.dtype} {x.shape}")
        if y.dtype.kind not in "iu" or y.shape != x.shape[:1] or y.min() < 0 or y.max() > 9:
            what = f"integers from 0 to 9, as many as images: it is {y.dtype} {y.shape}"
            refuse(f"--data {path}: y_{name} must be {what}")
    return [ArrayDataset(*split, str(Path(path).resolve())) for split in splits.values()]


# ---- The training loop, and what is done once an epoch ----
def train_model(
    model: DistributedDataParallel,
    dataloader: DataLoader,
    num_epochs: int,
    optimizer: torch.optim.Optimizer,
    loss_fn: Callable,
    test_dataloader: DataLoader,
    history: Sequence[list] = (),
    report: Callable[[list], None] = print,
) -> None:
    """Trains the replica of this process in step with the others, after the epochs in `history`.

    A row of it holds `COLUMNS`: means over the samples of all replicas, seconds of training alone.
    Rank 0 gives the history to `report` after each epoch.
    """
    keras_model, history, first = model.module, list(history), dist.get_rank() == 0
    constrained = [v for v in keras_model.trainable_variables if v.constraint is not None]
    for epoch in range(len(history), num_epochs):
        seed_noise(keras_model, dataloader.sampler.seed, epoch)
        dataloader.sampler.set_epoch(epoch)  # another order each time
        progress = keras.utils.Progbar(len(dataloader), verbose=int(first and sys.stdout.isatty()))
        totals, start = 0, time.perf_counter()
        for step, batch in enumerate(dataloader, start=1):
            inputs, targets = to_device(batch, model.device)

            # Forward pass. Without `training` Keras on torch leaves dropout and batch statistics
            # out, whatever model.train() says.
            outputs = model(inputs, training=True)
            loss = loss_fn(outputs.float(), targets) + sum(keras_model.losses)

            # Backward and optimize
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            for variable in constrained:
                variable.assign(variable.constraint(variable.value))

            totals += weighted_means(loss, outputs, targets)
            progress.update(step)
        dist.all_reduce(totals)
        means, samples = (totals[:2] / totals[2]).tolist(), totals[2].item()
        seconds = time.perf_counter() - start
        average_state(keras_model)
        means += evaluate(keras_model, test_dataloader, loss_fn)
        if not np.isfinite(means).all():
            raise SystemExit(f"epoch {epoch + 1} ended with loss {means[0]}, val_loss {means[2]}")
        history.append([epoch + 1, *means, seconds, samples / seconds])
        if first:
            report(history)


@torch.no_grad()
def evaluate(model: keras.Model, dataloader: DataLoader, loss_fn: Callable) -> list[float]:
    """Returns loss and accuracy over the samples of all replicas, each counted once, in float32."""
    device = next(model.parameters()).device
    totals = torch.zeros(3, dtype=torch.float64, device=device)
    for batch in dataloader:
        inputs, targets = to_device(batch, device)
        outputs = model(inputs, training=False)
        loss = loss_fn(outputs.float(), targets) + sum(model.losses)
        totals += weighted_means(loss, outputs, targets)
    dist.all_reduce(totals)
    return (totals[:2] / totals[2]).tolist()


def to_device(batch: Any, device: torch.device) -> Any:
    """Moves inputs and targets, which may be nested; does not wait for pinned ones."""
    return keras.tree.map_structure(lambda tensor: tensor.to(device, non_blocking=True), batch)


@torch.no_grad()
def weighted_means(loss: torch.Tensor, outputs: Any, targets: Any) -> torch.Tensor:
    """Returns a batch's loss, accuracy and 1 times its samples, float64 (3,); waits for nothing."""
    accuracy = (outputs.argmax(-1) == targets).double().mean()
    return torch.stack([loss.double(), accuracy, torch.ones_like(accuracy)]) * len(targets)


@torch.no_grad()
def average_state(model: keras.Model) -> None:
    """Gives all replicas the mean of their moving statistics, which DDP syncs at the start only."""
    # In float64: a float32 mean of three equal numbers may be another, and frozen weights must stay.
    for variable in model.non_trainable_variables:
        if variable.value.is_floating_point():
            mean = variable.value.double()
            dist.all_reduce(mean)
            variable.assign(mean / dist.get_world_size())


def seed_noise(model: keras.Model, seed: int, epoch: int) -> None:
    """Gives each replica noise of its own in each epoch, and the same in each run."""
    # Plain Dropout draws from torch's generator; layers with a seed from Keras', whose states are
    # variables but no weights, and which DDP makes alike everywhere at the start.
    weights = {id(variable) for variable in model.weights}
    states = [variable for variable in model.variables if id(variable) not in weights]
    sequence = np.random.SeedSequence((seed, epoch, dist.get_rank()))
    first, *others = sequence.generate_state(1 + len(states)).tolist()
    keras.utils.set_random_seed(first)
    for state, other in zip(states, others):
        state.assign([other // 2, 0])


# ---- Layers on torch's own kernels, and batch statistics of the global batch ----
class ReplicaConv2D(keras.layers.Conv2D):
    """Keras' layer without the two copies that Keras 3.15 makes of its input, 5 of 55 ms a step.

    Not for torch.compile, which removes them itself and makes slower code of this layer.
    """

    def convolution_op(self, inputs: torch.Tensor, kernel: torch.Tensor) -> torch.Tensor:
        if self.data_format == "channels_first":
            return super().convolution_op(inputs, kernel)
        x, options = inputs.movedim(-1, 1), (self.strides, self.padding, "channels_first")
        return keras.ops.conv(x, kernel, *options, self.dilation_rate).movedim(1, -1)


class ReplicaBatchNormalization(keras.layers.BatchNormalization):
    """Keras' layer on torch's kernel, which makes a training step 1.3 times as fast.

    If `synchronized`, which Keras has on TensorFlow only, its statistics are those of the global
    batch, and N replicas train like one with N times the batch.
    """

    def call(self, inputs: Any, training: bool | None = None, mask: Any = None) -> torch.Tensor:
        if self.synchronized and training and mask is not None:
            raise SystemExit("--sync-batchnorm takes no masks, which leave out rows")
        if not (training and self.trainable) or mask is not None:
            return super().call(inputs, training=training, mask=mask)
        channels_last = inputs.movedim(self.axis, -1)
        x, like = channels_last.flatten(0, -2), self.moving_mean.value
        gamma = self.gamma.value if self.scale else torch.ones_like(like)
        beta = self.beta.value if self.center else torch.zeros_like(like)
        normalize = GlobalBatchNorm.apply if self.synchronized else batch_norm
        y, mean, variance = normalize(x, gamma, beta, self.epsilon)
        for moving, batch in (self.moving_mean, mean), (self.moving_variance, variance):
            moving.assign(moving * self.momentum + batch * (1.0 - self.momentum))
        return y.reshape(channels_last.shape).movedim(-1, self.axis)


def batch_norm(x: Any, gamma: Any, beta: Any, epsilon: float) -> tuple[torch.Tensor, ...]:
    """Normalizes (rows, channels); returns the mean and the biased variance of the rows, too."""
    mean, variance = torch.zeros_like(gamma), torch.zeros_like(gamma)
    if len(x) == 1:  # which torch refuses
        return (x - x) * gamma + beta, x[0].detach().to(gamma.dtype), variance
    # With a momentum of 1 the running statistics are the batch's; the variance is unbiased.
    y = torch.nn.functional.batch_norm(x, mean, variance, gamma, beta, True, 1.0, epsilon)
    return y, mean, variance * ((len(x) - 1) / len(x))


def gather(local: torch.Tensor) -> torch.Tensor:
    """Returns the tensors of all replicas: in 0.4 ms with gloo, where `all_reduce` takes 2."""
    gathered = [torch.empty_like(local) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, local)
    return torch.stack(gathered)


class GlobalBatchNorm(torch.autograd.Function):
    """Is `batch_norm` over the rows of all replicas."""

    @staticmethod
    def forward(ctx: Any, x: Any, gamma: Any, beta: Any, epsilon: float) -> tuple:
        wide, size = x.to(torch.promote_types(x.dtype, torch.float32)), len(gamma)
        ones, zeros = wide.new_ones(size), wide.new_zeros(size)
        local, mean, variance = batch_norm(wide, ones, zeros, epsilon)
        # Means and centred squares are combined: E[x²] - E[x]² would lose three digits.
        sums = torch.cat([mean, variance * len(x), mean.new_tensor([len(x)])])
        means, squares, rows = gather(sums).split([size, size, 1], dim=1)
        global_mean = (rows * means).sum(0) / rows.sum()
        global_variance = (squares + rows * (means - global_mean).square()).sum(0) / rows.sum()
        inverse = (global_variance + epsilon).rsqrt()
        ratio, shift = inverse * (variance + epsilon).sqrt(), inverse * (mean - global_mean)
        ctx.mark_non_differentiable(global_mean, global_variance)
        y = torch.addcmul(shift, local, ratio)
        ctx.save_for_backward(y, gamma, inverse, rows.sum())
        return torch.addcmul(beta, y, gamma).to(x.dtype), global_mean, global_variance

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor, *_: Any) -> tuple:
        y, gamma, inverse, rows = ctx.saved_tensors
        dbeta, dgamma = dy.sum(0, dtype=y.dtype), (dy * y).sum(0)
        # These two stay this replica's: DDP averages gradients.
        means, scale = gather(torch.stack([dbeta, dgamma])).sum(0) / rows, gamma * inverse
        dx = torch.addcmul(-means[0] * scale, y, -means[1] * scale).addcmul_(dy, scale)
        return dx.to(dy.dtype), dgamma, dbeta, None


def swap_layers(model: keras.Model, synchronized: bool, compiled: bool) -> tuple:
    """Clones a model with the layers above in it, which shares all others; returns it and new by old.

    A model that can't be cloned is returned as it is; SystemExit if it was to be `synchronized`.
    """
    conv, norm = keras.layers.Conv2D, keras.layers.BatchNormalization
    swapped, why = {}, "its own `call`, or a layer in two places"

    def clone_layer(layer: keras.Layer) -> keras.Layer:
        config = layer.get_config() if type(layer) in (conv, norm) else {}
        if type(layer) is conv and not compiled:
            swapped[layer] = ReplicaConv2D.from_config(config | {"activation": layer.activation})
        elif type(layer) is norm and not layer.renorm:
            swapped[layer] = ReplicaBatchNormalization.from_config(config)
            swapped[layer].synchronized = synchronized
        return swapped.get(layer, layer)

    def is_plain(model: keras.Model) -> bool:  # a clone leaves out a `call` of one's own
        inner = [layer for layer in model.layers if isinstance(layer, keras.Model)]
        return type(model).call.__module__.startswith("keras.") and all(map(is_plain, inner))

    try:
        clone = keras.models.clone_model(model, clone_function=clone_layer, recursive=True)
        for old, new in swapped.items():
            new.set_weights(old.get_weights())
            for variable, other in zip(new.variables, old.variables):
                variable.trainable = other.trainable
        kept = {id(variable) for variable in clone.variables}
        tied = any(id(variable) in kept for old in swapped for variable in old.variables)
        swapped = swapped if is_plain(model) and not tied else {}
    except Exception as error:  # noqa: BLE001 - whatever a user's layers raise
        swapped, why = {}, repr(error)[:200]
    batch_norms = sum(isinstance(new, ReplicaBatchNormalization) for new in swapped.values())
    if synchronized and batch_norms < sum(v.name == "moving_variance" for v in model.variables):
        normal = "BatchNormalization without renorm in a Functional or Sequential model"
        raise SystemExit(f"--sync-batchnorm needs keras.layers.{normal}; here is other, or {why}")
    return clone if swapped else model, swapped


# ---- One process a device ----
def setup_device(
    current_gpu_index: int, num_gpus: int, device: str = "auto", **group: Any
) -> torch.device:
    """Takes the device of this process and its share of the cores, and joins the process group.

    The device is "auto", "cpu", "cuda" for the GPU of the local rank, or one as "cuda:3". `group` is
    for `init_process_group`: a backend, which is else nccl on CUDA and gloo on the CPU, a store, ...
    """
    local_rank, local_world_size = current_gpu_index, num_gpus
    if dist.is_torchelastic_launched():  # there may be other machines
        local_rank, local_world_size = (
            int(os.environ[f"LOCAL_{x}"]) for x in ("RANK", "WORLD_SIZE")
        )
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(f"cuda:{local_rank}" if device == "cuda" else device)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # before anything is built
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    torch.set_num_threads(max(1, cores // local_world_size))
    group = {"backend": "nccl" if device.type == "cuda" else "gloo", **group}
    group |= {"rank": current_gpu_index, "world_size": num_gpus, "timeout": COLLECTIVE_TIMEOUT}
    dist.init_process_group(device_id=device if group["backend"] == "nccl" else None, **group)
    return device


def cleanup() -> None:
    """Leaves the process group, when no DDP wrapper is left that holds it.

    With gloo a wrapper that is freed later can hang for ever: its reducer drops the last reference
    to the group and waits for a thread that waits for the GIL (torch issues 56297 and 190489).
    """
    gc.collect()
    dist.destroy_process_group()


def prepare_dataloader(
    dataset: Dataset,
    current_gpu_index: int,
    num_gpus: int,
    batch_size: int,
    training: bool = True,
    seed: int = 0,
    num_workers: int = 0,
) -> DataLoader:
    """Returns a loader of this replica's local batches, of `batch_size` samples.

    For evaluation not padded: that would count samples twice (pytorch issue 25162).
    """
    sampler = range(current_gpu_index, len(dataset), num_gpus)
    if training:
        sampler = DistributedSampler(dataset, num_gpus, current_gpu_index, seed=seed)
    options = {"num_workers": num_workers, "persistent_workers": num_workers > 0}
    options["pin_memory"] = torch.cuda.is_initialized()
    return DataLoader(dataset, batch_size, sampler=sampler, collate_fn=collate, **options)


def collate(samples: Any) -> Any:
    """Stacks a list of samples; what `ArrayDataset` read at once is a tuple, and ready."""
    return samples if isinstance(samples, tuple) else default_collate(samples)


def per_device_launch_fn(
    current_gpu_index: int, num_gpus: int, args: Any, datasets: Sequence, get_model: Any, store: Any
) -> None:
    """Trains one replica: what each process does, from set-up to teardown."""
    # Set up the process group
    device = setup_device(current_gpu_index, num_gpus, args.device, store=store)
    place, first = (current_gpu_index, num_gpus, args.batch_size), current_gpu_index == 0

    # Without this scope Keras puts tensors on cuda:0 in every process, and on CUDA even when the
    # CPU was asked for (keras issues 20415 and 19392).
    with keras.device(str(device)):
        keras.utils.set_random_seed(args.seed)  # the same initial weights everywhere
        model = get_model()

        # Prepare the dataloaders
        dataloader = prepare_dataloader(datasets[0], *place, seed=args.seed)
        test_dataloader = prepare_dataloader(datasets[1], *place, training=False)

        # Build what is built when it is called first: DDP would never see those weights.
        inputs, _ = to_device(next(iter(dataloader)), device)
        with torch.no_grad():
            model(inputs, training=False)
            replica, swapped = swap_layers(model, args.sync_batchnorm, args.compile)
        seen = {id(parameter) for parameter in replica.parameters()}
        if unseen := [v.path for v in replica.variables if id(v.value) not in seen]:
            raise SystemExit(f"DDP can't see {unseen}: build them in build(), each name once")
        parameters = [variable.value for variable in replica.trainable_variables]
        if not parameters:
            raise SystemExit("the model has nothing to train: no weight is trainable")

        # Instantiate the torch optimizer and loss function
        optimizer = torch.optim.Adam(parameters, lr=args.learning_rate, fused=True)
        loss_fn = torch.nn.CrossEntropyLoss()
        history = restore(args, replica, optimizer) if args.resume else []

        # Wrap the model
        device_ids = [device.index] if device.type == "cuda" else None
        ddp_model = DistributedDataParallel(replica, device_ids, gradient_as_bucket_view=True)
        if args.precision == "bfloat16":
            ddp_model.forward = torch.autocast(device.type, torch.bfloat16)(ddp_model.forward)
        if args.compile:
            ddp_model.compile(dynamic=False)
        warm_up(ddp_model, inputs)
        if args.compile:  # a smaller last batch would compile once more: it runs eagerly
            torch.compiler.set_stance("eager_on_recompile")
        models = model, replica, swapped
        if first:
            batches = f"local batch {args.batch_size}, global batch {num_gpus * args.batch_size}"
            samples = f"{len(datasets[0]):,} training and {len(datasets[1]):,} test samples"
            text = f"{num_gpus} replicas on {device.type} ({dist.get_backend()}), {batches}"
            print(f"{text}, {args.data}: {samples}", flush=True)
        if first and len(history) >= args.epochs:
            print(f"nothing to do: all {args.epochs} epochs are done already")
            if not (args.output_dir / FILES[0]).exists():
                save(args, *models, optimizer, history)
        job = ddp_model, dataloader, args.epochs, optimizer, loss_fn, test_dataloader
        train_model(*job, history, partial(report, args, models, optimizer))
        if first and not args.output_dir:
            print("nothing was written: there is no --output-dir", flush=True)
        del ddp_model, optimizer, job
    cleanup()


def warm_up(model: DistributedDataParallel, inputs: Any) -> None:
    """Takes a step that changes nothing, in which torch.compile compiles."""
    # DDP orders its buckets anew after the first, and 3 or more replicas sum in another order then:
    # a resumed run would have other bits.
    state = [(v, v.value.clone()) for v in model.module.non_trainable_variables]
    outputs = model(inputs, training=True)
    (outputs.float().sum() + sum(model.module.losses)).backward()
    model.zero_grad()
    for variable, value in state:
        variable.assign(value)


# ---- What a run leaves: each file is written whole, then moved into place ----
def report(args: Any, models: tuple, optimizer: torch.optim.Optimizer, history: list) -> None:
    """Saves and prints the last epoch."""
    if args.output_dir:
        save(args, *models, optimizer, history)
    epoch, *means, seconds, speed = history[-1]
    text = ", ".join(f"{name} {mean:.4f}" for name, mean in zip(COLUMNS[1:], means))
    text = f"epoch {epoch}/{args.epochs} on {args.data}: {text}, {seconds:.1f} s"
    print(f"{text}, {speed:,.0f} samples/s", flush=True)


def save(args: Any, model: Any, replica: Any, swapped: dict, optimizer: Any, history: list) -> None:
    """Writes the files; the checkpoint, which counts the epoch, comes last."""
    for old, new in swapped.items():
        old.set_weights(new.get_weights())
    checkpoint = {
        "history": history,
        "flags": {name: str(value) for name, value in vars(args).items()},
        "optimizer": optimizer.state_dict(),
        # By position: Keras numbers the names of variables per process.
        "variables": [variable.value.detach() for variable in replica.variables],
    }
    table = "".join(",".join(map(str, row)) + "\n" for row in (COLUMNS, *history))
    buffer = io.BytesIO()
    torch.save(checkpoint, buffer)  # to a path it would not say why it failed
    for name, content in zip(FILES, (None, table.encode(), buffer.getbuffer())):
        path, temporary = args.output_dir / name, args.output_dir / f".new-{name}"
        try:
            temporary.write_bytes(content) if content else model.save(temporary)
            os.replace(temporary, path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise SystemExit(f"can't write {path}: {error}") from error


def load_checkpoint(path: Path) -> dict:
    """Reads a checkpoint, and runs nothing that it may hold."""
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        return {name: checkpoint[name] for name in ("history", "flags", "optimizer", "variables")}
    except Exception as error:  # noqa: BLE001 - whatever zip, pickle or the file system raises
        refuse(f"{path} is cut off, or no checkpoint of this script ({type(error).__name__})")


def restore(args: Any, replica: keras.Model, optimizer: torch.optim.Optimizer) -> list:
    """Takes up the checkpoint that rank 0 has, if there is one; returns its history."""
    path, first = args.output_dir / FILES[-1], dist.get_rank() == 0
    box = [load_checkpoint(path) if first and path.exists() else None]
    dist.broadcast_object_list(box)
    if not (checkpoint := box[0]):
        return []
    try:
        for variable, value in zip(replica.variables, checkpoint["variables"], strict=True):
            variable.assign(value)
        optimizer.load_state_dict(checkpoint["optimizer"])
    except (KeyError, ValueError) as error:
        raise SystemExit(f"{path} is the checkpoint of another model") from error
    for group in optimizer.param_groups:
        group["lr"] = args.learning_rate  # not the checkpoint's
    if first:
        same, flags = ("epochs", "output_dir", "resume", "start_method"), checkpoint["flags"]
        new = {k: v for k, v in vars(args).items() if k not in same and flags.get(k) != str(v)}
        note = f" with other flags, so the result is another run's: {new}" if new else ""
        print(f"resumed after epoch {len(checkpoint['history'])}{note}", flush=True)
    return checkpoint["history"]


# ---- The command line, and starting the processes ----
def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Reads and checks the command line, and fills in what depends on the machine."""
    formatter = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], formatter_class=formatter)
    parser.error, add = refuse, parser.add_argument
    add("--data", help="mnist, synthetic, or a path; None: mnist, synthetic if it can't be had")
    add("--epochs", type=int, default=2, help="in all, with those before --resume")
    add("--batch-size", type=int, default=64, help="samples of a step and replica")
    add("--learning-rate", type=float, default=1e-3, help="of Adam")
    add("--seed", type=int, default=0, help="of weights, order and noise")
    add("--nproc", type=int, help="processes; None: one for each GPU, 2 on the CPU")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: cuda if there is")
    add("--precision", choices=("float32", "bfloat16"), default="float32", help="of forward passes")
    add("--sync-batchnorm", action="store_true", help="take statistics of the global batch")
    add("--compile", action="store_true", help="compile the training step with torch.compile")
    methods = torch.multiprocessing.get_all_start_methods()  # on Windows spawn alone
    add("--start-method", choices=methods, default="spawn", help="Python's")
    add("--output-dir", type=Path, help="for model.keras, history.csv and checkpoint.pt")
    add("--resume", action="store_true", help="go on with the run in --output-dir if there is one")
    args = parser.parse_args(argv)
    for name in "epochs", "batch_size", "learning_rate", "nproc":
        value = getattr(args, name)
        if value is not None and not 0 < value < np.inf:
            refuse(f"--{name.replace('_', '-')} must be a finite number above 0, it is {value}")
    if not 0 <= args.seed < 2**32:
        refuse(f"--seed must be 0 to 4294967295, it is {args.seed}")
    if args.resume and not args.output_dir:
        refuse("--resume needs the --output-dir of the run")
    gpus, launched = torch.cuda.device_count(), dist.is_torchelastic_launched()
    if launched and args.nproc:
        refuse("--nproc is not for torchrun, which has --nproc-per-node")
    if args.device == "auto":
        args.device = "cuda" if gpus else "cpu"
    here = args.nproc or (max(1, gpus) if args.device == "cuda" else 2)
    here = int(os.environ["LOCAL_WORLD_SIZE"]) if launched else here
    if args.device == "cuda" and not 0 < here <= gpus:
        refuse(f"--device cuda: {here} processes need as many GPUs, there are {gpus}")
    args.nproc = int(os.environ["WORLD_SIZE"]) if launched else here
    return args


def hold_interrupts(hold: bool) -> None:
    """Keeps Ctrl-C waiting, here and in processes that are started, or takes it again."""
    if hasattr(signal, "pthread_sigmask"):  # not on Windows
        if hold:
            resource_tracker.ensure_running()  # starting it later would take Ctrl-C again
        signal.pthread_sigmask(signal.SIG_BLOCK if hold else signal.SIG_UNBLOCK, {signal.SIGINT})


def run_replica(current_gpu_index: int, folder: str, job: tuple, store: Any = None) -> None:
    """Runs `per_device_launch_fn`; whichever replica fails first leaves its report in `folder`."""
    for number in signal.SIGINT, signal.SIGTERM:
        signal.signal(number, signal.SIG_DFL)  # end at once, without a traceback
    hold_interrupts(False)
    if folder and not parent_process().is_alive():
        os._exit(1)
    try:
        store = store or dist.FileStore(f"{folder}/store", job[0].nproc)
        per_device_launch_fn(current_gpu_index, job[0].nproc, *job, store)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - reported, then the process ends
        text = f"rank {current_gpu_index}: {traceback.format_exc()}"
        text = str(error) if isinstance(error, SystemExit) else text
        sys.stdout.flush()
        out = f"{folder}/report" if folder else 2  # the standard error
        with contextlib.suppress(FileExistsError), open(out, "x" if folder else "w") as file:
            print(text, file=file)
        os._exit(1)  # only now are its connections closed, of which the others fail


def start_replicas(job: tuple) -> None:
    """Starts the processes and waits for them; leaves none behind, whatever ends the run."""
    args, before, handlers = job[0], active_children(), {}
    hint = "--resume goes on after the last whole epoch" if args.output_dir else "nothing was kept"

    def stop(number: int, _: Any) -> None:
        for each in handlers:
            signal.signal(each, signal.SIG_IGN)  # once is enough
        print(f"stopped by {signal.Signals(number).name}; {hint}", file=sys.stderr)
        raise SystemExit(128 + number)

    with tempfile.TemporaryDirectory() as folder:
        try:
            with contextlib.suppress(ValueError):  # in a thread, which can't set handlers
                handlers = {n: signal.signal(n, stop) for n in (signal.SIGINT, signal.SIGTERM)}
            hold_interrupts(True)  # else each process prints a traceback of its imports
            options = {"join": False, "start_method": args.start_method}
            start = torch.multiprocessing.start_processes
            processes = start(run_replica, (folder, job), args.nproc, **options).processes
            hold_interrupts(False)
            codes = [None] * args.nproc
            while None in codes and not any(codes):
                connection.wait([p.sentinel for p, code in zip(processes, codes) if code is None])
                codes = [p.exitcode for p in processes]
        finally:
            for process in set(active_children()).difference(before):
                process.kill()
                process.join()
            for number, handler in handlers.items():
                signal.signal(number, handler)
            hold_interrupts(False)
        if any(codes):
            # Whoever was killed is the cause: the others fail as its connections are closed.
            ends = [f"rank {r} ended by signal {-c}" for r, c in enumerate(codes) if (c or 0) < 0]
            text = Path(folder, "report")
            text = text.read_text().strip() if text.exists() else f"exit codes {codes}"
            raise SystemExit(f"{(ends or [text])[0]}\n{hint}")


def main(
    argv: list | None = None, get_model: Callable = get_model, get_dataset: Callable = get_dataset
) -> None:
    """Checks what was given, loads the data once, and starts a process a device.

    Args:
        argv: the command line; by default that of the process.
        get_model: returns a Keras model; called in each process.
        get_dataset: takes what `--data` says, or None, and returns a training and a test set:
            map-style datasets of (inputs, target), where the target is a class number, int64.
    """
    launched = dist.is_torchelastic_launched()
    if launched:
        store, rank, _ = next(dist.rendezvous("env://"))
        # All attempts share torchrun's store: a restarted rank must not read an old one's address.
        # On several machines the counts can differ; the README says what to set there.
        if os.environ["GROUP_WORLD_SIZE"] == "1":
            store = dist.PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], store)
        checked = f"machine {os.environ['GROUP_RANK']} is checked"
        if os.environ["LOCAL_RANK"] != "0":  # the first loads first, and alone refuses
            store.wait([checked], COLLECTIVE_TIMEOUT)
    args = parse_args(argv)
    datasets = get_dataset(args.data)
    pair = isinstance(datasets, Sequence) and len(datasets) == 2
    if not pair or not all(hasattr(each, "__len__") and len(each) for each in datasets):
        refuse("get_dataset must return a training and a test set, map-style and with samples")
    args.data = getattr(datasets[0], "source", type(datasets[0]).__name__)
    if folder := args.output_dir:
        try:
            found = [name for name in FILES if (folder / name).exists()]
            if found and not args.resume:
                refuse(f"--output-dir {folder} holds {', '.join(found)}: add --resume, or another")
            if FILES[-1] in found:
                load_checkpoint(folder / FILES[-1])
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            refuse(f"--output-dir must be a folder that can be written: {error}")
    job = args, datasets, get_model
    if launched:
        store.set(checked, "")
        run_replica(rank, "", job, store)
    else:
        start_replicas(job)


if __name__ == "__main__":
    main()
