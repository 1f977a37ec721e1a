"""What replaying asks of a GPU, seen without one: nothing.

torch carries out operations on tensors that claim to lie on a GPU and have no memory. Whoever wants
a value of such a tensor, which on a GPU is to wait for it, gets an error. ``test_asks_nothing.py``
runs this in a process of its own.
"""

from __future__ import annotations

import itertools
import warnings

import numpy as np
import pytest
import torch
from augment.batches import keys
from augment.oracle_cases import USUAL
from augment.parity import encoded_by, photographs
from augment.pipelines import RECIPES
from augment.test_pipelines import samples
from kernels.test_launches import drawn as drawn_batch
from thoroughness import some
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_fastdata.augment.albumentations.plan import takes_dtype
from lightning_fastdata.augment.mixing import CutMix, MixUp, mixed
from lightning_fastdata.augment.ops import DEVICE_OPS
from lightning_fastdata.augment.replay.program import Draws
from lightning_fastdata.augment.replay.torch import replay

fake = pytest.importorskip("torch._subclasses.fake_tensor")
ORDERS_DIFFER = {
    *("aten.put_", "aten.histc", "aten.bincount", "aten.median.dim", "aten.kthvalue"),
    *("aten.grid_sampler_2d_backward", "aten.upsample_bilinear2d_backward"),
}
"""What torch refuses on CUDA while ``torch.use_deterministic_algorithms(True)``, as does cumsum of
floats."""


DEMANDS = (fake.DataDependentOutputException, fake.DynamicOutputShapeException)


class Watch(TorchDispatchMode):
    """Notes what copies between host and device, and what Trainer(deterministic=True) refuses."""

    def __init__(self):
        super().__init__()
        self.copies, self.refused, self.count = [], [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.count += 1
        given = [one for one in torch.utils._pytree.tree_leaves(args) if is_array(one)]
        made = [one for one in torch.utils._pytree.tree_leaves(out) if is_array(one)]
        places = {one.device.type for one in (*given, *made)}
        if len(places) > 1:
            self.copies.append(str(func))
        name = str(func)
        summed = name.startswith("aten.cumsum") and made[0].is_floating_point()
        if "cuda" in places and (summed or any(name.startswith(one) for one in ORDERS_DIFFER)):
            self.refused.append(name)
        return out


def is_array(value):
    return isinstance(value, torch.Tensor) and value.ndim > 0


@pytest.fixture(scope="module")
def pretended():
    """A GPU for the whole module, as constants stay on it."""
    mode = fake.FakeTensorMode()
    try:
        with mode:
            torch.empty(1, device="cuda")[:, None].cpu()
    except RuntimeError as error:
        told = str(error).splitlines()[0]
        pytest.skip(f"torch {torch.__version__} pretends no GPU without a driver: {told}")
    return mode


def there(array):
    return torch.empty(array.shape, dtype=torch.as_tensor(array).dtype, device="cuda")


def watched(pretended, act):
    """Return what is noted when something is done on the device for the second time."""
    with pretended:
        act()  # makes constants
        with Watch() as watch:
            out = act()
    assert out.device.type == "cuda"
    return watch


@pytest.mark.parametrize("name", list(USUAL))
def test_an_operation_copies_nothing_between_host_and_device(pretended, name):
    for dtype in (np.dtype(np.uint8), np.dtype(np.float32)):
        image = photographs(131, 170, dtype=dtype)[0]
        op, encoded, _ = encoded_by(USUAL[name], image)
        if not takes_dtype(op, dtype):
            continue
        numbers = {key: np.stack([array] * 2) for key, array in encoded.arrays.items()}

        def act(op=op, encoded=encoded, numbers=numbers, image=image):
            arrays = {key: there(array) for key, array in numbers.items()}
            return op.image(there(np.stack([image] * 2)), dict(encoded.static), arrays)

        seen = watched(pretended, act)
        assert seen.count
        assert seen.copies == []
        assert seen.refused == []


@pytest.mark.parametrize("name", some(RECIPES, 3))  # of operations that were seen above
def test_a_real_pipeline_is_replayed_without_asking_the_device(pretended, name):
    recipe = RECIPES[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        given = list(itertools.islice(itertools.cycle(samples(recipe)), 8))
        images, draws = drawn_batch(recipe.compose, given)
    if len({image.shape for image in images}) > 1:
        pytest.skip("its images differ in size until the worker has made them one size")
    assert draws.programs
    for program in draws.programs.values():
        shape = np.stack(images).shape
        batch = np.zeros(shape if program.role == "image" else shape[:3], np.uint8)

        def act(batch=batch, program=program):
            return replay(program, there(draws.blob), there(batch), DEVICE_OPS, kernels=False)

        seen = watched(pretended, act)
        assert seen.copies == []
        assert seen.refused == []


@pytest.mark.parametrize("step", [MixUp(), CutMix()])
def test_mixing_asks_the_device_for_nothing(pretended, step):
    transform = mixed(step, num_classes=4)
    worker = transform.in_worker(on_device=True)
    pixels = np.zeros((6, 3, 32, 40), np.uint8)
    pairs = [worker((pixels[i], i % 4), key) for i, key in enumerate(keys(6))]
    draws = worker.collate([drawn for _, drawn in pairs])

    def act():
        on_device = Draws(6, draws.programs, there(draws.blob), draws.beside)
        batch = there(pixels), torch.empty(6, dtype=torch.long, device="cuda")
        return transform.apply(batch, on_device)[0]

    seen = watched(pretended, act)
    assert seen.copies == []
    assert seen.refused == []


def test_a_device_without_float64_leaves_the_computing_to_the_cpu(pretended):
    recipe = RECIPES["satellite: eight symmetries"]
    images, draws = drawn_batch(recipe.compose, list(itertools.islice(samples(recipe), 4)))
    shape = np.stack(images).shape
    with pretended, Arguments() as seen:
        blob = torch.empty(draws.blob.shape, dtype=torch.uint8, device="mps")
        batch = torch.empty(shape, dtype=torch.uint8, device="mps")
        out = replay(draws.programs["image"], blob, batch, DEVICE_OPS)
    assert out.device == batch.device
    assert "mps" not in seen.float64_on


def test_draws_come_back_to_the_host_whole(pretended):
    """A copy for which nobody waits would be read before it is there."""
    draws = Draws(1, {}, torch.zeros(64, dtype=torch.uint8))
    with pretended, Arguments() as seen:
        on_device = Draws(1, {}, torch.empty(64, dtype=torch.uint8, device="cuda"))
        assert on_device.to("cpu", non_blocking=True).blob.device.type == "cpu"
    assert draws.to("cpu", non_blocking=True).blob is draws.blob
    assert seen.non_blocking == [False]


class Arguments(TorchDispatchMode):
    """Notes whether copies are waited for, and where float64 is computed with."""

    def __init__(self):
        super().__init__()
        self.non_blocking, self.float64_on = [], set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if str(func).startswith("aten._to_copy"):
            self.non_blocking.append((kwargs or {}).get("non_blocking", False))
        out = func(*args, **(kwargs or {}))
        made = [one for one in torch.utils._pytree.tree_leaves(out) if is_array(one)]
        self.float64_on |= {one.device.type for one in made if one.dtype == torch.float64}
        return out


def test_the_watch_sees_a_question_a_copy_and_what_is_refused(pretended):
    questions = [
        lambda numbers: numbers[0].item(),
        lambda numbers: numbers.nonzero(),
        lambda numbers: numbers[numbers > 0],
        lambda numbers: bool(numbers.any()),
        lambda numbers: numbers.tolist(),
    ]
    for ask in questions:
        with pretended, pytest.raises((RuntimeError, *DEMANDS)):
            ask(torch.empty(3, device="cuda"))
    with pretended, Watch() as watch:
        torch.zeros(3).to("cuda").cumsum(0)
    assert watch.copies
    assert watch.refused
