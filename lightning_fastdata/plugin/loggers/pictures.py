"""Pictures of training batches for the loggers: what the training step gets, to be looked at."""

from __future__ import annotations

import inspect
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np

from lightning_fastdata.augment import BatchImages
from lightning_fastdata.errors import (
    BatchError,
    FastDataWarning,
    MissingPackageError,
    OptionsError,
    require,
)
from lightning_fastdata.plugin.loggers.boards import log_image
from lightning_fastdata.plugin.seams.loaders import flattened
from lightning_fastdata.plugin.seams.trainer import own_datamodule
from lightning_fastdata.types import Batch

if TYPE_CHECKING:
    import torch
    from lightning.pytorch import Trainer
    from lightning.pytorch.loggers import Logger


TAG: Final = "data/batch"
"""What the picture is called on a board."""
_USUAL_IMAGES: Final = 16
_PAGE_PX: Final = 400
_LARGEST_SCALE: Final = 8
_LINE_PX: Final = 18
_FONT_PX: Final = 13
_LETTER_PX: Final = 6.6


def images_shown(log_images: bool | int) -> int:
    """Return how many images of a training batch the user wants to see at most; 0: none.

    Raises:
        OptionsError: It is no number of images.
    """
    if not isinstance(log_images, int) or log_images < 0:
        raise OptionsError(
            f"log_images={log_images!r} has to be True, False, or a number of images."
        )
    return _USUAL_IMAGES if log_images is True else int(log_images)


def pictures_of(
    trainer: Trainer, most: int, augment: object, image: int | str | None
) -> BatchPicture | None:
    """Return what logs the picture of a fit; None on ranks that log none, or if none is wanted.

    ``most`` is the number of images in it at most, ``augment`` the transform of a callback, for
    batches of loaders that are not ours, and ``image`` the key or index of the images that the user
    gave with it.
    """
    if not most or not trainer.is_global_zero:
        return None
    module = trainer.lightning_module
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        warnings.warn(
            f"log_images shows nothing: {type(module).__name__}.training_step(dataloader_iter) "
            "fetches its batches itself. Use training_step(batch, batch_idx).",
            FastDataWarning,
            stacklevel=2,
        )
        return None
    known = own_datamodule(trainer)
    form = BatchImages.behind([augment], image) if known is None else known.image_form("train")
    if form.normalized is None:
        loaders = flattened(trainer.train_dataloader)
        datasets = [loader.dataset for loader in loaders if hasattr(loader, "dataset")]
        form = form.normalized_by(datasets)
    return BatchPicture(most, form if image is None else replace(form, image=image))


class BatchPicture:
    """Logs the picture of the first batch of one fit."""

    def __init__(self, most: int, form: BatchImages) -> None:
        self._most, self._form = most, form
        self._due = True

    def batch_began(
        self, loggers: Sequence[Logger], batch: Batch, *, epoch: int, step: int
    ) -> None:
        """Show the first batch on every logger that takes images; say so if none does.

        The batch is as the training step gets it, None where a loader gave none; epochs count from
        0, and ``step`` is the position on the step axis.
        """
        if batch is None or not self._due:
            return
        self._due = False
        # Lightning puts this in the place of a logger where nothing is to be logged.
        own = [one for one in loggers if type(one).__name__ != "DummyLogger"]
        if loggers and not own:
            return
        why = self._log(own, batch, epoch, step)
        if why is not None:
            warnings.warn(f"log_images shows nothing: {why}", FastDataWarning, stacklevel=2)

    def _log(self, loggers: Sequence[Logger], batch: Batch, epoch: int, step: int) -> str | None:
        """Show a batch, and return why no logger does; None if one does."""
        try:
            require("PIL", extra="images", what="A picture of a batch")
            images = self._form.find(_of_one_loader(batch, self._form))
            grid = self._form.grid(images, self._most)
        except (BatchError, MissingPackageError) as error:
            return str(error)
        when = f"Epoch {epoch}, step {step}"
        caption = describe_picture(images, self._most, self._form, when)
        if log_image(loggers, TAG, captioned(grid, caption), caption, step):
            return None
        names = ", ".join(type(one).__name__ for one in loggers)
        have = f"{names} takes no images" if loggers else "the trainer has no logger"
        return f"{have}. Use a TensorBoardLogger, WandbLogger or MLFlowLogger."


def describe_picture(images: torch.Tensor, most: int, form: BatchImages, when: str) -> str:
    """Return what a picture shows, in a sentence; ``when`` says which batch it is of."""
    how_many, how = f"{min(most, len(images))} of {len(images)}", ""
    if images.is_floating_point():
        how = ", Normalize undone" if form.normalized else ", contrast stretched if not in [0, 1]"
    dtype = str(images.dtype).removeprefix("torch.")
    height, width = images.shape[1:3]
    return (
        f"Training batch as the training step gets it: {how_many} images, {height} x {width}, "
        f"{dtype}{how}. {when}."
    )


def captioned(grid: np.ndarray, caption: str) -> np.ndarray:
    """Return a grid, uint8 ``[H, W, 3]``, in the lower left corner below its wrapped caption.

    Small grids are enlarged by a whole number.
    """
    from PIL import Image, ImageDraw, ImageFont

    scale = min(_LARGEST_SCALE, max(1, _PAGE_PX // max(grid.shape[:2])))
    grid = grid.repeat(scale, 0).repeat(scale, 1)
    width = max(_PAGE_PX, grid.shape[1])
    lines = textwrap.wrap(caption, int(width / _LETTER_PX))
    top = _LINE_PX * len(lines)
    page = Image.new("RGB", (width, top + grid.shape[0]), "white")
    pen, font = ImageDraw.Draw(page), ImageFont.load_default(_FONT_PX)
    for number, line in enumerate(lines):
        pen.text((2, _LINE_PX * number), line, fill="black", font=font)
    page.paste(Image.fromarray(grid), (0, top))
    return np.asarray(page)


def _of_one_loader(batch: Batch, form: BatchImages) -> Batch:
    """Return a batch that holds images; of combined loaders, that of the first that has some."""
    parts = batch.values() if isinstance(batch, Mapping) else batch
    combined = isinstance(batch, Mapping | list | tuple)
    nested = [one for one in parts if isinstance(one, Mapping | list | tuple)] if combined else []
    for one in (batch, *nested):
        try:
            form.find(one)
        except BatchError:
            continue
        return one
    return batch
