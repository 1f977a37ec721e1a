"""What FastDataModule does, for either of Lightning's two package names.

``lightning.pytorch`` and ``pytorch_lightning`` are separate class trees; this module imports
neither, and :mod:`lightning_fastdata.plugin.bindings` joins it to one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Self, TypedDict, Unpack, get_args

from lightning_fastdata.caches.folders import CacheFolder, check_folder
from lightning_fastdata.device.backend import DeviceStreams, device_streams
from lightning_fastdata.device.prefetch import drawn_under
from lightning_fastdata.errors import OptionsError
from lightning_fastdata.loading.loader import FastDataLoader
from lightning_fastdata.planning.options import (
    Auto,
    LoaderOptions,
    NeedsConstruction,
    checked_seed,
    refuses_unknown_names,
)
from lightning_fastdata.plugin.data.arguments import (
    LOADER_ARGUMENTS,
    check_batches,
    check_choice,
    checked_batch_size,
    checked_shuffle,
    joined_options,
    remembers_given,
    take_batch_size,
    take_over_hyperparameters,
)
from lightning_fastdata.plugin.data.datasets import of_datasets, of_loaders
from lightning_fastdata.plugin.data.module_loaders import ModuleLoaders
from lightning_fastdata.plugin.data.training_run import KEY
from lightning_fastdata.plugin.guard.callback import attach_guard
from lightning_fastdata.plugin.guard.prediction import GuardPolicy
from lightning_fastdata.plugin.placing.stage_transforms import (
    StageTransforms,
    carry_out_draws,
    finish,
    inside,
)
from lightning_fastdata.plugin.placing.transfer import Prefetching, PrefetchName
from lightning_fastdata.plugin.placing.trial import AugmentOn, Placing
from lightning_fastdata.plugin.seams.hooks import HOOKS, choose_own_hooks, overridden_hook
from lightning_fastdata.plugin.seams.trainer import refuse_other_tree, training_place
from lightning_fastdata.types import STAGES, Shuffle, Stage

if TYPE_CHECKING:
    import torch
    from lightning.pytorch import Trainer
    from torch.utils.data import Dataset

    from lightning_fastdata.augment import BatchImages
    from lightning_fastdata.types import Batch


class ModuleArguments(TypedDict, total=False):
    """What the constructor takes besides ``batch_size``, ``num_workers`` and ``shuffle``."""

    options: LoaderOptions | Mapping[str, LoaderOptions] | None
    pin_memory: bool | Auto | None
    persistent_workers: bool | Auto | None
    prefetch_factor: int | Auto | None
    augment: Callable[..., Any] | Mapping[str, Callable[..., Any]] | None
    augment_on: AugmentOn
    image: str | int | None
    mask: str | int | None
    guard: GuardPolicy
    prefetch: PrefetchName
    cache: CacheFolder | None
    collate_fn: Callable[[list[Any]], Any] | None
    drop_last: bool
    seed: int | None


_OF_THE_CLASS: Any = object()  # an argument that was not given: the constructor's default holds


@refuses_unknown_names
@remembers_given
class DataModuleHooks(NeedsConstruction):
    """Builds tuned loaders for every stage from the datasets that a subclass returns.

    A subclass writes ``train_dataset()``, ``val_dataset()`` and, if wanted, ``test_dataset()`` and
    ``predict_dataset()``. Each returns a dataset; a dict or list of datasets becomes one loader per
    dataset, combined by Lightning. A dataset in the place of its method, as ``setup()`` puts it by
    ``self.train_dataset = ...``, does as well.

    A subclass with a constructor of its own passes on what it takes of these arguments. Of
    ``batch_size``, ``drop_last`` and ``seed`` that it does not pass on, what it saves by
    ``save_hyperparameters()`` is used; whatever else stops there is warned of.

    Args:
        batch_size: Samples per batch and rank, for all stages. ``"auto"``: on a CUDA GPU the
            smallest that trains 95 % of the most samples a second of all that fit, by training
            steps that are tried and undone before the fit; elsewhere 32.
        options: How to load; every ``"auto"`` is chosen for this machine. See
            :class:`LoaderOptions`. For all stages, or a dict with stages as keys.
        num_workers: Processes that read samples, for all stages; short for the option of this name.
        pin_memory: Copy batches to page-locked memory; short for the option of this name.
        persistent_workers: Keep the workers between epochs; short for the option of this name.
        prefetch_factor: Batches each worker is ahead; short for the option of this name.
        shuffle: Whether training is shuffled, by ``seed`` and epoch; or a dict with stages as keys.
            ``"blocks"``: as :class:`BlockShuffleSampler` does. Default: training is, nothing else.
        augment: What runs on the batches: an ``albumentations.Compose`` or a torchvision
            ``v2.Compose``, which draw for each sample, or any callable or ``nn.Module`` that takes
            a batch and returns it. For training only, or a dict with stages (``train``, ``val``,
            ``test``, ``predict``) as keys.
        augment_on: Where the pixels of a pipeline in ``augment`` are computed. ``"gpu"``: on the
            trainer's device, in ``on_after_batch_transfer``; ``"cpu"``: in the workers, by the
            pipeline's own library; ``"auto"``: where it is measured to be faster before the
            training. The random draws are the same. A pipeline that the dataset calls itself
            runs in the workers.
        image: Where the image is in a sample: a key of a dict or a position of a tuple. Default:
            ``"image"`` in a dict, else the first element that is an image.
        mask: Where the mask is, if there is one. Default: ``"mask"`` in a dict, else none. Anything
            else of the image's size is an error beside operations that move pixels;
            :func:`as_batch_transform` says how to name it, or to leave it.
        guard: What to do if the batch is predicted not to fit the GPU's free memory: ``"warn"``;
            ``"accumulate"`` smaller batches to the same effective size; ``"raise"`` an error;
            ``"off"``: nothing. All but the last two train in parts what does not fit all the same.
        prefetch: On a CUDA GPU, move batches beside the computing. ``"stream"``: when it is their
            turn, for a host that runs ahead of the device; ``"lookahead"``: one batch ahead, for
            one that waits for it in each step; ``"auto"``: what fits; ``"off"``: not. What
            a pipeline drew runs there, too. The batches are the same in any case.
        cache: Keep the samples of training and validation, so that later epochs and runs need not
            make them again: ``"disk"``, ``"ram"`` or a folder; ``"auto"``: on disk, where some
            samples show that it pays and a cache can be used. See :class:`CachedDataset`.
        collate_fn: Samples to batch. Default: torch's collation, extended to dataclasses.
        drop_last: Leave out the last training batch if it is not full.
        seed: Seed of order and augmentation. Default: the one of ``seed_everything``, else 0.

    Raises:
        OptionsError: An argument has an impossible value.
        TransformError: ``augment`` is not a transform, or names a stage that does not exist.
    """

    batch_size: int
    chooses_batch_size: bool
    """No batch size was asked for; that of now is one to begin with."""
    part_begin = 0
    """Sample of a training batch that is transferred in parts, with which the next part begins."""

    def __init__(
        self,
        batch_size: int | Auto = 32,
        *,
        options: LoaderOptions | Mapping[str, LoaderOptions] | None = None,
        num_workers: int | Auto | None = None,
        pin_memory: bool | Auto | None = None,
        persistent_workers: bool | Auto | None = None,
        prefetch_factor: int | Auto | None = None,
        shuffle: Shuffle | Mapping[str, Shuffle] | None = None,
        augment: Callable[..., Any] | Mapping[str, Callable[..., Any]] | None = None,
        augment_on: AugmentOn = "auto",
        image: str | int | None = None,
        mask: str | int | None = None,
        guard: GuardPolicy = "warn",
        prefetch: PrefetchName = "off",
        cache: CacheFolder | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        drop_last: bool = False,
        seed: int | None = None,
    ) -> None:
        self._constructed = True
        self._trainer: Trainer | None = None
        super().__init__()
        check_choice("guard", guard, get_args(GuardPolicy))
        check_choice("augment_on", augment_on, get_args(AugmentOn))
        check_batches(collate_fn, drop_last=drop_last, image=image, mask=mask)
        self.guard: GuardPolicy = guard
        take_batch_size(self, batch_size)
        given = (num_workers, pin_memory, persistent_workers, prefetch_factor)
        self.options = joined_options(options, dict(zip(LOADER_ARGUMENTS, given, strict=True)))
        self.shuffle = checked_shuffle(shuffle)
        if cache is not None:
            check_folder(cache, ("auto", "disk", "ram"))
        self.cache = cache
        self.collate_fn = collate_fn
        self.drop_last = drop_last
        self.seed = None if seed is None else checked_seed(seed)
        self._transforms = StageTransforms(augment, image=image, mask=mask)
        self._prefetching = Prefetching(prefetch)
        self.placing = Placing(augment_on)
        self._loaders = ModuleLoaders(self._transforms, self._prefetching)
        self.notes: list[str] = []

    _guard_callback: type | None = None

    @property
    def augment(self) -> Any:
        """What was given as ``augment``. To set it holds for loaders that are made afterwards.

        Raises:
            OptionsError: A trainer has made the loaders already. A pipeline may be changed in
                place; its next epoch is as the pipeline is then.
        """
        return self._transforms.given

    @augment.setter
    def augment(
        self, augment: Callable[..., Any] | Mapping[str, Callable[..., Any]] | None
    ) -> None:
        if self._trainer is not None and self._trainer.training:
            raise OptionsError(
                "augment= was set while the training runs, whose loaders were made with what it "
                "was before. Change the pipeline itself in place (its transforms, or their p), "
                "which the next epoch sees, or set augment before trainer.fit()."
            )
        self._transforms.assign(augment)

    @property
    def augment_on(self) -> AugmentOn:
        """Where the pixels of a pipeline are computed, as it was asked for."""
        return self.placing.asked

    @augment_on.setter
    def augment_on(self, asked: AugmentOn) -> None:
        self.placing.asked = asked

    @property
    def trainer(self) -> Trainer | None:
        """The trainer that uses this data module; None before the first fit."""
        return self._trainer

    @trainer.setter
    def trainer(self, trainer: Trainer | None) -> None:
        self._trainer = trainer
        if trainer is None:
            return
        refuse_other_tree(self, trainer)
        take_over_hyperparameters(self)
        self.placing.attached()
        # Attaching is the one moment that no subclass overrides.
        if self.guard != "off" and self._guard_callback is not None:
            attach_guard(trainer, self._guard_callback, always=self.chooses_batch_size)
        # A subclass's own hook may leave out super(), and then Lightning's warning is right.
        choose_own_hooks(self, trainer, set(HOOKS) - self.written_hooks())

    def train_dataset(self) -> Any:
        """Return the dataset to train on."""
        return None

    def val_dataset(self) -> Any:
        """Return the dataset to validate on; None to train without validation."""
        return None

    def test_dataset(self) -> Any:
        """Return the dataset to test on."""
        return None

    def predict_dataset(self) -> Any:
        """Return the dataset to predict."""
        return None

    @classmethod
    def from_datasets(
        cls,
        train_dataset: object = None,
        val_dataset: object = None,
        test_dataset: object = None,
        predict_dataset: object = None,
        batch_size: int | Auto = _OF_THE_CLASS,
        num_workers: int | Auto | None = None,
        *,
        shuffle: Shuffle | Mapping[str, Shuffle] | None = None,
        **arguments: Unpack[ModuleArguments],
    ) -> Self:
        """Return a data module of datasets that exist already.

        Args:
            train_dataset: Dataset to train on.
            val_dataset: Dataset to validate on.
            test_dataset: Dataset to test on.
            predict_dataset: Dataset to predict.
            batch_size: Samples per batch and rank. Default: the constructor's.
            num_workers: Processes that read samples. Default: chosen for this machine.
            shuffle: As the constructor has it.
            **arguments: The other arguments of the constructor.
        """
        datasets = (train_dataset, val_dataset, test_dataset, predict_dataset)
        given = {"num_workers": num_workers, "shuffle": shuffle, **arguments}
        if batch_size is not _OF_THE_CLASS:
            # Checked here, too: the constructor of a subclass may not look at it.
            auto = batch_size == "auto"
            given["batch_size"] = "auto" if auto else checked_batch_size(batch_size)
        return of_datasets(cls, datasets, given)

    @classmethod
    def from_loaders(
        cls,
        train: object = None,
        val: object = None,
        test: object = None,
        predict: object = None,
        *,
        keep_workers: bool = False,
        num_workers: int | Auto | None = None,
        **arguments: Unpack[ModuleArguments],
    ) -> Self:
        """Return a data module of the datasets of DataLoaders, in the same batches.

        Each is a ``torch.utils.data.DataLoader``, a list or dict of them, Lightning's
        ``CombinedLoader``, or none. Of a loader are kept: dataset, sampler or batch sampler, batch
        size, ``drop_last``, ``collate_fn``, ``worker_init_fn``, ``generator``, ``timeout``,
        ``multiprocessing_context`` and ``in_order``. A plain ``shuffle=True`` becomes this
        package's shuffle by seed and epoch. ``batch_size`` of the data module is that of the first
        training loader; setting it, as ``Tuner.scale_batch_size`` and the guard do, scales those of
        all loaders in proportion.

        Args:
            train: To train on.
            val: To validate on.
            test: To test on.
            predict: To predict.
            keep_workers: Keep ``num_workers``, ``prefetch_factor``, ``persistent_workers`` and
                ``pin_memory`` too. Otherwise they are chosen for this machine, except for a loader
                without workers, which is read in the training process, and for the workers of a
                stream, whose number decides its batches: ``num_workers="auto"`` has these chosen,
                too.
            num_workers: Processes that read samples.
            **arguments: The other arguments of the constructor, except ``batch_size`` and
                ``shuffle``.

        Raises:
            OptionsError: Something is no DataLoader, or one that makes its batches in its own way.
        """
        loaders = dict(zip(STAGES, (train, val, test, predict), strict=True))
        given = {"num_workers": num_workers, **arguments}
        return of_loaders(cls, loaders, given, keep_workers=keep_workers)

    def register_transform(
        self, transform: object, *, stage: Stage = "train"
    ) -> Callable[[], None]:
        """Add a transform that runs on every batch of a stage, on the device.

        Transforms run in the order of their registration. A pipeline starts in the
        workers, so there can be one per stage, and it comes first.

        Args:
            transform: An ``albumentations.Compose``, or a callable or ``nn.Module`` on batches.
            stage: The stage to run in; Lightning's sanity check counts as ``val``.

        Returns:
            A function that removes the transform again.

        Raises:
            TransformError: The stage does not exist, the transform is of no known kind, or it
                would be a second pipeline or one that comes too late.
        """
        return self._transforms.register(transform, stage)

    def train_dataloader(self) -> Any:
        """Return the loader of ``train_dataset()``; Lightning calls it."""
        return self._loaders.of_stage(self, "train")

    def val_dataloader(self) -> Any:
        """Return the loader of ``val_dataset()``; Lightning calls it."""
        return self._loaders.of_stage(self, "val")

    def test_dataloader(self) -> Any:
        """Return the loader of ``test_dataset()``; Lightning calls it."""
        return self._loaders.of_stage(self, "test")

    def predict_dataloader(self) -> Any:
        """Return the loader of ``predict_dataset()``; Lightning calls it."""
        return self._loaders.of_stage(self, "predict")

    def make_loader(
        self, dataset: Dataset[Any], *, stage: Stage, name: str | None = None, **overrides: Any
    ) -> FastDataLoader:
        """Return the loader for a dataset, as the ``*_dataloader`` methods build it.

        Args:
            dataset: Any map-style or iterable dataset.
            stage: Decides shuffling, transforms and the number of workers.
            name: How messages and :meth:`explain` call it. Default: the stage's dataset method.
            **overrides: Arguments of :class:`FastDataLoader` that win over the chosen ones, such as
                ``sampler`` or ``batch_size``.

        Raises:
            DatasetError: The dataset is empty, or its first sample cannot be read.
            BatchError: A transform for images was registered and the samples hold none.
        """
        return self._loaders.make(self, dataset, stage, name, overrides)

    def run_seed(self) -> int:
        """Return the seed of order and draws."""
        return self._loaders.seed(self)

    def state_dict(self) -> dict[str, Any]:
        """Return how far the training has come; Lightning puts it into its checkpoints."""
        return {KEY: self._loaders.progress.state_dict(self._trainer)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on behind the batch after which a checkpoint was written; Lightning calls it.

        Raises:
            OptionsError: The state is none of this class, or of a later version.
        """
        if KEY in state_dict:
            self._loaders.progress.load_state_dict(state_dict[KEY], self._trainer)

    def explain(self) -> str:
        """Return every choice that was made, its value and its reason, as text.

        Loaders that were not built yet are planned for, which calls the dataset methods.
        """
        return self._loaders.explain(self)

    def augments_on_device(self, stage: Stage) -> bool:
        """Return whether :meth:`on_after_batch_transfer` transforms the batches of a stage."""
        pipeline = self.placing.may_use_device(stage, self._trainer)
        return self._transforms.run_on_device(stage, pipeline=pipeline)

    def augmentation_settled(self, stage: Stage) -> bool:
        """Return whether it was found out in this run where pixels of a stage are best computed."""
        return self.placing.choice(stage) is not None

    def image_form(self, stage: Stage) -> BatchImages:
        """Return what is known of the images that the steps of a stage get."""
        return self._transforms.image_form(stage)

    # -- the transfer of a batch; each hook calls that of the LightningModule ----------------------

    def on_before_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Run the LightningModule's hook of this name, if it has one."""
        hook = self._hook_of_module("on_before_batch_transfer")
        return batch if hook is None else inside(batch, lambda b: hook(b, dataloader_idx))

    def transfer_batch_to_device(
        self, batch: Batch, device: torch.device, dataloader_idx: int
    ) -> Batch:
        """Move the batch and what was drawn for its transform to the device."""
        hook = self._hook_of_module("transfer_batch_to_device")
        move = super().transfer_batch_to_device if hook is None else hook  # type: ignore[misc]
        return self._prefetching.transfer(
            batch, lambda b: move(b, device, dataloader_idx), device, self._transforms
        )

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Run the stage's transforms, then the LightningModule's hook of this name."""
        batch, transformed = finish(batch, self._transforms, self._drawing)
        hook = self._hook_of_module("on_after_batch_transfer")
        if hook is not None:
            batch = hook(batch, dataloader_idx)
        if transformed and self._trainer is not None:
            # Lightning converts to the precision's dtype before the transfer; uint8 images became
            # floating point only now.
            batch = self._trainer.precision_plugin.convert_input(batch)
        return batch

    def _drawing(self, stage: Stage) -> AbstractContextManager[None]:
        """Return a block whose draws are keyed by the batch of the training, if it is one."""
        trainer = self._trainer
        if stage != "train" or trainer is None:
            return nullcontext()
        # What one batch draws rests on no other, so that a run may go on from any of them.
        place = training_place(trainer)
        device = trainer.strategy.root_device
        number: tuple[int, ...] = trainer.global_rank, place.taken
        if self.part_begin:
            number += (self.part_begin,)
        return drawn_under(self.run_seed(), place.epoch, number, device)

    def batches_ahead(self) -> int:
        """Return how many batches are on the device beside the one that is trained on, at most."""
        self._prefetching.decide(self)
        return self._prefetching.batches_ahead

    def drop_ahead(self) -> bool:
        """Let go of what was sent ahead, and send no more; return whether there was a batch."""
        return self._prefetching.drop_ahead()

    def carried_out(self, batch: Batch) -> Batch:
        """Return a batch with what the workers drew for it carried out, where it is."""
        return carry_out_draws(batch, self._transforms)

    def device_streams(self, device: torch.device) -> DeviceStreams | None:
        """Return the streams of a device on which ``prefetch`` moves batches; None: it has none."""
        return device_streams(device)

    def written_hooks(self) -> frozenset[str]:
        """Return the transfer hooks that the class itself overrides."""
        cls = type(self)
        return frozenset(n for n in HOOKS if getattr(cls, n) is not getattr(DataModuleHooks, n))

    def _hook_of_module(self, name: str) -> Callable[..., Batch] | None:
        trainer = self._trainer
        return None if trainer is None else overridden_hook(trainer.lightning_module, name)
