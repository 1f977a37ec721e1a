"""Without the packages of the extras a training runs; what needs one says which extra has it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from missing_packages import environment_without

ALONE = {
    "albumentations": {"albumentations", "albucore", "cv2"},
    "matplotlib": {"matplotlib", "mpl_toolkits"},
    # Matplotlib and torchvision do not work without it.
    "pillow": {"PIL", "matplotlib", "mpl_toolkits", "torchvision"},
    "simplejpeg": {"simplejpeg", "turbojpeg"},
    "tensorboard": {"tensorboard", "tensorboardX"},
    "torchvision": {"torchvision"},
}
OTHERS = {"datasets", "h5py", "lmdb", "obstore", "pyarrow", "skimage", "sklearn", "zarr"}
ALL = {*OTHERS, *(name for names in ALONE.values() for name in names)}

SCRIPT = '''
import json, os, sys, warnings

import IMPORTED as pl
import torch
from torch.utils.data import TensorDataset

import lightning_fastdata
from lightning_fastdata import FastImageFolder, LoaderOptions, MixUp
from lightning_fastdataTWIN import DataThroughputCallback, FastDataModule
from lightning_fastdata.augment.mixing import mixed
from lightning_fastdata.cli import main
from lightning_fastdata.data import decode_crop
from lightning_fastdata.sources import ObjectSource


class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.LazyLinear(1)
        self.seen = 0

    def training_step(self, batch, _):
        self.seen += len(batch[0])
        return self.layer(batch[0].flatten(1).float()).mean()

    def validation_step(self, batch, _):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def said(call, *args, **kwargs):
    """Return the error of this package that a call raises; None: another one, or none."""
    try:
        call(*args, **kwargs)
    except lightning_fastdata.FastDataError as error:
        return str(error)
    except SystemExit as error:
        return str(error.__cause__)
    except Exception:
        return None


if __name__ == "__main__":
    images = torch.arange(16 * 8 * 8 * 3).reshape(16, 8, 8, 3).to(torch.uint8)
    data = TensorDataset(images, torch.arange(16) % 4)
    module = FastDataModule.from_datasets(
        data, data, batch_size=4, augment=mixed(MixUp(), num_classes=4),
        options=LoaderOptions(num_workers=1, executor="workers"),
    )
    model = Model()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer = pl.Trainer(
            max_epochs=2, accelerator="cpu", devices=1, logger=True, enable_checkpointing=False,
            log_every_n_steps=1, default_root_dir=".", enable_model_summary=False,
            callbacks=[DataThroughputCallback(report="report.json")],
        )
        trainer.fit(model, datamodule=module)
    print()
    print(json.dumps({
        "packages": [one for one in ("lightning", "pytorch_lightning") if one in sys.modules],
        "names": [name for name in dir(lightning_fastdata) if not name.startswith("_")
                  and getattr(lightning_fastdata, name, None) is None],
        "seen": model.seen,
        "report": os.path.exists("report.json"),
        "logger": type(trainer.logger).__name__,
        "warnings": [str(one.message) for one in told
                     if issubclass(one.category, lightning_fastdata.FastDataWarning)],
        "folder": said(FastImageFolder, "nowhere", size=8),
        "crop": said(decode_crop, b"", (0, 0, 1, 1)),
        "objects": said(ObjectSource, "s3://bucket"),
        "command": said(main, ["doctor"]),
    }))
'''


def train_without(hidden, tmp_path, package="lightning.pytorch"):
    twin = ".pytorch_lightning" if package == "pytorch_lightning" else ""
    script = SCRIPT.replace("IMPORTED", package).replace("TWIN", twin)
    (tmp_path / "train.py").write_text(script)
    done = subprocess.run(
        [sys.executable, "-S", "train.py"],
        capture_output=True,
        text=True,
        timeout=280,
        cwd=tmp_path,
        env={
            **environment_without(tmp_path / "site-packages", hidden),
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
        },
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "fastdata · train · 8 steps" in done.stdout
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["packages"] == [package.partition(".")[0]]
    assert told["names"] == []
    assert told["seen"] == 32
    assert told["report"]
    return told


def hint(extra):
    return f'pip install "lightning-fastdata[{extra}]"'


@pytest.mark.cases(1)
@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_a_training_runs_without_any_extra_and_without_the_other_lightning(tmp_path, package):
    told = train_without(ALL, tmp_path, package)
    assert told["logger"] == "CSVLogger"
    assert told["warnings"] == []
    assert hint("images") in told["folder"]
    assert hint("images") in told["crop"]
    assert hint("objects") in told["objects"]
    assert told["command"] is None


@pytest.mark.slow
@pytest.mark.parametrize("name", ALONE)
def test_a_training_runs_without_one_package(tmp_path, name):
    told = train_without(ALONE[name], tmp_path)
    assert told["logger"] == ("CSVLogger" if name == "tensorboard" else "TensorBoardLogger")
    # Pictures and figures on TensorBoard were asked for.
    extras = {"matplotlib": ["tensorboard"], "pillow": ["images", "tensorboard"]}.get(name, [])
    assert len(told["warnings"]) == len(extras)
    for extra in extras:
        assert any(hint(extra) in warning for warning in told["warnings"])
    missing = {
        "albumentations": ("folder", "images"),
        "torchvision": ("folder", "images"),
        "pillow": ("crop", "images"),
    }
    if name in missing:
        key, extra = missing[name]
        assert hint(extra) in told[key]
