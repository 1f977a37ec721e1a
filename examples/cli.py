"""LightningCLI: model, data and callback from a configuration file.

python examples/cli.py fit --config examples/config.yaml
"""

from lightning.pytorch.cli import LightningCLI
from torchvision.datasets import ImageFolder

from demo.photos import Cut, cut_photographs
from demo.training import PhotoClassifier, train_augmentation, val_augmentation
from lightning_fastdata import FastDataModule


class Photos(FastDataModule):
    """Crops of photographs.

    Args:
        folder: Where to put the JPEG files.
        crops: Training crops of each photograph.
        image_px: Width and height of the images that the model sees.
        batch_size: Samples per batch.
    """

    def __init__(
        self,
        folder: str = "demo_data/photos",
        crops: int = 192,
        image_px: int = 112,
        batch_size: int = 64,
    ):
        augment = {"train": train_augmentation(image_px), "val": val_augmentation(image_px)}
        super().__init__(batch_size, augment=augment)
        self.folder = folder
        self.crops = crops

    def prepare_data(self):
        cut_photographs(self.folder, Cut(train_per_class=self.crops))

    def train_dataset(self):
        return ImageFolder(f"{self.folder}/train")

    def val_dataset(self):
        return ImageFolder(f"{self.folder}/val")


if __name__ == "__main__":
    LightningCLI(PhotoClassifier, Photos, save_config_callback=None)
