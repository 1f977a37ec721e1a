"""``fastdata show-augment`` draws a pipeline beside Albumentations, or says what is wrong."""

from __future__ import annotations

import albumentations as A
import numpy as np
import pytest
from augment.parity import photographs
from PIL import Image

from lightning_fastdata.augment.show.pictures import (
    DIFFERENCE_GAIN,
    as_picture,
    draw_grid,
    load_pipeline,
    own_ways,
    read_mask,
    show_draws,
)
from lightning_fastdata.cli import main

PIPELINES = """
import albumentations as A
from lightning_fastdata.augment.mixing import CutMix, mixed
from lightning_fastdata.augment.transform import as_batch_transform

train = A.Compose([A.Resize(60, 80), A.Rotate(p=1), A.Normalize(), A.ToTensorV2()])
noisy = A.Compose([A.Resize(60, 80), A.GaussNoise(p=1)])
single = A.HorizontalFlip(p=1)
mixing = mixed(train, CutMix(), num_classes=3)
alone = mixed(CutMix(), num_classes=3)
made = as_batch_transform(train)
masked = A.Compose([A.CropNonEmptyMaskIfExists(60, 80), A.HorizontalFlip(p=1), A.Normalize()])
large = A.Compose([A.RandomCrop(4000, 4000)])


class Config:
    boxes = A.Compose([A.Resize(60, 80), A.VerticalFlip(p=1)],
                      bbox_params=A.BboxParams("coco", label_fields=["kinds"]))


def make():
    return train
"""


def disc():
    """Return a mask of a photograph: classes 0, 1 and 7."""
    y, x = np.mgrid[:130, :170]
    return (((y - 60) ** 2 + (x - 80) ** 2 < 50**2) + 6 * ((x > 75) & (x < 85))).astype(np.uint8)


@pytest.fixture
def file(tmp_path):
    (tmp_path / "recipes.py").write_text(PIPELINES)
    (tmp_path / "broken.py").write_text("1 / 0\n")
    Image.fromarray(photographs(130, 170)[0]).save(tmp_path / "photo.png")
    Image.fromarray(disc()).save(tmp_path / "mask.png")
    Image.fromarray(disc()[:9]).save(tmp_path / "small.png")
    return tmp_path / "recipes.py"


@pytest.mark.cases(3)
@pytest.mark.parametrize("name", ["train", "noisy", "single", "Config.boxes", "mixing", "made"])
def test_the_picture_has_a_row_per_draw_and_the_text_says_where_things_run(file, name, capsys):
    photo, out = file.parent / "photo.png", file.parent / "out.png"
    arguments = ["--image", str(photo), "--out", str(out), "--draws", "3", "--seed", "5"]
    main(["show-augment", f"{file}:{name}", *arguments])
    text = capsys.readouterr().out
    assert [line[:6] for line in text.splitlines() if line.startswith("draw ")] == [
        f"draw {draw}" for draw in range(3)
    ]
    assert "on the batch" in text
    assert ("The same distribution, not the same pixels: GaussNoise" in text) == (name == "noisy")
    with Image.open(out) as picture:
        assert picture.format == "PNG"
        pixels = np.asarray(picture.convert("RGB"))
    image = photographs(130, 170)[0]
    one_row = draw_grid(image, show_draws(load_pipeline(f"{file}:{name}"), image, draws=1))
    assert pixels.shape[1] == one_row.size[0]
    assert pixels.shape[0] > 2 * one_row.size[1]


def test_a_row_holds_the_same_picture_twice_and_what_is_different(file):
    image = photographs(130, 170)[0]
    for one in show_draws(load_pipeline(f"{file}:train"), image, seed=2, draws=3):
        assert one.ours.shape == one.theirs.shape == (60, 80, 3)
        assert one.on_device == ("Rotate", "Normalize", "ToTensorV2")
        levels = np.abs(one.ours.astype(int) - one.theirs)
        assert np.array_equal(one.difference, (levels * DIFFERENCE_GAIN).clip(0, 255))
        assert one.largest <= 1.01
        assert one.equal == pytest.approx((levels == 0).mean(), abs=1e-9)
        # Rotated by chance alone: it is the resized photograph, seen through Normalize.
        resized = A.Resize(60, 80)(image=image)["image"]
        assert abs(one.ours[20:40, 30:50].mean() - resized[20:40, 30:50].mean()) < 40


def test_draws_are_those_of_a_run_with_this_seed(file):
    image, pipeline = photographs(130, 170)[0], load_pipeline(f"{file}:train")
    first, again, other = (show_draws(pipeline, image, seed=seed) for seed in (1, 1, 2))
    assert all(np.array_equal(a.ours, b.ours) for a, b in zip(first, again, strict=True))
    assert not any(np.array_equal(a.ours, b.ours) for a, b in zip(first, other, strict=True))
    assert not np.array_equal(first[0].ours, first[1].ours)


@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_normalized_tensors_are_shown_as_the_photographs_they_were(channels, dtype):
    image = photographs(40, 50, channels, dtype)[0]
    mean, std = [0.4] * channels, [0.2] * channels
    scale = {"max_pixel_value": 255.0 if dtype == np.uint8 else 1.0}
    compose = A.Compose([A.Normalize(mean, std, **scale), A.ToTensorV2()])
    picture = as_picture(compose(image=image)["image"].numpy(), compose)
    wanted = image if dtype == np.uint8 else (image * 255).round().astype(np.uint8)
    wanted = wanted[..., :3] if channels >= 3 else wanted.repeat(3, 2)
    assert np.array_equal(picture, wanted)


def test_only_what_draws_in_its_own_way_on_the_device_is_named():
    compose = A.Compose([A.GaussNoise(), A.Resize(9, 9), A.GaussNoise(), A.ISONoise(), A.Blur()])
    assert own_ways(compose) == ("GaussNoise", "ISONoise")


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("recipes", "MODULE:NAME"),
        ("{}/nowhere.py:train", "There is no file"),
        ("no_such_module:train", "there is no module 'no_such_module'"),
        ("{}/broken.py:train", "raised ZeroDivisionError: division by zero"),
        ("{}/recipes.py:trian", "It holds: train, noisy, masked, large"),
        ("{}/recipes.py:make", "is function, not an albumentations Compose"),
        ("{}/recipes.py:alone", "is MixedTransform, not an albumentations Compose"),
        ("{}/recipes.py:Config", "is type, not an albumentations Compose"),
    ],
)
def test_a_pipeline_that_cannot_be_had_is_told_with_its_name(file, spec, said):
    with pytest.raises(SystemExit, match=said):
        main(["show-augment", spec.format(file.parent)])


@pytest.mark.parametrize(
    ("name", "said"), [("masked", "give one with --mask"), ("large", "a larger image with --image")]
)
def test_a_pipeline_that_needs_more_than_this_image_says_so(file, name, said):
    with pytest.raises(SystemExit, match=said):
        main(["show-augment", f"{file}:{name}", "--image", str(file.parent / "photo.png")])


def test_a_mask_is_transformed_both_ways_and_outlined(file, capsys):
    photo, mask, out = (str(file.parent / name) for name in ("photo.png", "mask.png", "out.png"))
    arguments = ["--image", photo, "--mask", mask, "--out", out, "--draws", "2"]
    main(["show-augment", f"{file}:masked", *arguments])
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("draw ")]
    assert len(told) == 2
    assert all("equal; mask equal; on device: HorizontalFlip" in line for line in told)
    pixels = np.asarray(Image.open(out))
    outlined = (pixels == (255, 0, 255)).all(-1)
    # In the first three columns, and never on the difference.
    assert [bool(outlined[:, left : left + 240].any()) for left in (8, 256, 504, 752)] == [
        True,
        True,
        True,
        False,
    ]


def test_masks_of_a_draw_are_albumentations_own_and_ours(file):
    image, mask = photographs(130, 170)[0], read_mask(file.parent / "mask.png", (130, 170))
    assert np.array_equal(mask, disc())
    compose = A.Compose([A.Rotate((30, 40), p=1), A.RandomCrop(60, 80)])
    for one in show_draws(compose, image, mask=mask, draws=3):
        theirs, ours = one.masks
        assert theirs.shape == ours.shape == (60, 80)
        assert np.array_equal(theirs, ours)
        assert set(np.unique(theirs)) <= {0, 1, 6, 7}
        assert not np.array_equal(theirs, mask[:60, :80])


def test_a_row_says_equal_or_by_how_much_or_why_not():
    image = photographs(130, 170)[0]
    flip = A.Compose([A.HorizontalFlip(p=1)])
    assert show_draws(flip, image, draws=1)[0].caption() == "equal; on device: HorizontalFlip"
    noise = show_draws(A.Compose([A.GaussNoise(p=1)]), image, draws=1)[0]
    assert noise.caption() == (
        "other pixels: GaussNoise drew its own numbers; on device: GaussNoise"
    )
    jitter = show_draws(A.Compose([A.ColorJitter(hue=(0.1, 0.2), p=1)]), image, draws=8)
    told = {one.caption().split(";")[0] for one in jitter}
    for one, said in ((one, one.caption()) for one in jitter if one.largest > 0):
        levels = "1 level off" if one.largest == 1 else "levels off"
        assert levels in said
        assert f"{one.equal:.4%} equal" in said
    assert any("off" in one for one in told)


def test_long_texts_stay_on_the_page():
    def pipeline(count):
        return A.Compose([A.RandomBrightnessContrast(p=1) for _ in range(count)])

    image = photographs(130, 170)[0]
    short = draw_grid(image, show_draws(pipeline(1), image, draws=1))
    long = draw_grid(image, show_draws(pipeline(12), image, draws=1))
    assert long.size[0] == short.size[0]
    assert long.size[1] > short.size[1]
    pixels = np.asarray(long)
    # Nothing touches the right edge, as cut off text would.
    assert (pixels[:, -4:] == 255).all()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--image", "{}/recipes.py"], "is not an image that Pillow can read"),
        (["--image", "{}/none.png"], "cannot be read"),
        (["--mask", "{}/small.png"], "9 x 170 pixels, and the image 300 x 451"),
        (["--mask", "{}/recipes.py"], "is not an image that Pillow can read"),
        (["--mask", "{}/none.png"], "cannot be read"),
        (["--out", "{}/no/folder/out.png"], "cannot be written"),
        (["--draws", "0"], "draws is 0"),
    ],
)
def test_files_and_numbers_that_cannot_be_are_told(file, arguments, said):
    arguments = [one.format(file.parent) for one in arguments]
    with pytest.raises(SystemExit, match=said):
        main(["show-augment", f"{file}:single", *arguments])
