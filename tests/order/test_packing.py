"""Packs hold every token once, waste little, and train as the documents one by one do."""

from __future__ import annotations

import copy
import pickle
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from misses import Misses
from ragged import Sequences, stopped_epoch
from thoroughness import max_examples
from torch import nn
from torch.utils.data import DataLoader

from benchmarks.lengths import LAWS, MOST, drawn
from lightning_fastdata import FastDataLoader, FastDataModule, Mixture, pack
from lightning_fastdata.errors import DatasetError, OptionsError
from lightning_fastdata.order.lengths import IGNORED, best_fit
from lightning_fastdata.order.samplers import ShuffleSampler

VOCABULARY = 50
LENGTHS = st.lists(st.integers(0, 20), max_size=40)


def document(index, length):
    """Return ids that tell of which document and place they are; half of the labels are ignored."""
    ids = torch.arange(length) + 1000 * index
    return {"input_ids": ids, "labels": ids.masked_fill(torch.arange(length) < length // 2, -100)}


def documents(lengths):
    return Sequences(lengths, document)


def pieces_of(one):
    """Return ids, positions and labels of each document of a pack, or part of one."""
    starts = one["cu_seqlens"].tolist()
    for begin, end in pairwise(starts):
        yield tuple(
            one[name].reshape(-1)[begin:end] for name in ("input_ids", "position_ids", "labels")
        )


@max_examples(100)
@given(lengths=LENGTHS, tokens=st.integers(20, 60), split=st.booleans(), epoch=st.integers(0, 3))
def test_packs_hold_every_token_once_in_whole_pieces(lengths, tokens, split, epoch) -> None:
    data = documents(lengths)
    packs = pack(data, tokens, split=split)
    packs.set_epoch(epoch)
    seen = []
    for number in range(len(packs)):
        one = packs[number]
        assert 0 < len(one["input_ids"]) == one["cu_seqlens"][-1] <= tokens
        assert one["cu_seqlens"].dtype == torch.int32
        for ids, positions, labels in pieces_of(one):
            document, at = divmod(int(ids[0]), 1000)
            own = data[document]
            assert split or len(ids) == lengths[document]
            assert ids.tolist() == own["input_ids"][at : at + len(ids)].tolist()
            assert positions.tolist() == list(range(len(ids)))
            assert labels.tolist() == [IGNORED, *own["labels"][at + 1 : at + len(ids)].tolist()]
            seen += ids.tolist()
    assert sorted(seen) == [int(i) for at in range(len(data)) for i in data[at]["input_ids"]]
    if split:
        assert len(packs) == -(-sum(lengths) // tokens)


@pytest.mark.parametrize(("split", "most"), [(True, 0.02), (False, 0.05)])
def test_little_is_wasted(split, most) -> None:
    with Misses() as misses:
        for name in LAWS:
            lengths = drawn(name, 10_000)
            waste = pack(range(10_000), MOST, lengths=lengths, split=split).waste
            misses.check(0 <= waste <= most, name, waste)


@max_examples(100)
@given(lengths=st.lists(st.integers(1, 20), max_size=40), tokens=st.integers(20, 50))
def test_best_fit_is_that_of_one_document_after_the_other(lengths, tokens) -> None:
    lengths = sorted(lengths, reverse=True)
    rooms: list[int] = []
    for length in lengths:
        fits = [at for at, room in enumerate(rooms) if room >= length]
        at = min(fits, key=rooms.__getitem__, default=len(rooms))
        rooms += [tokens] * (at == len(rooms))
        rooms[at] -= length
    held = np.bincount(best_fit(np.array(lengths, int), tokens), weights=lengths)
    assert sorted((tokens - held).tolist()) == sorted(rooms)


@pytest.mark.parametrize("split", [True, False])
def test_epochs_and_seeds_pack_anew_and_a_key_always_the_same(split) -> None:
    data = documents(np.random.default_rng(0).integers(1, 9, 200))
    packs = pack(data, 64, split=split)

    def ids(of, epoch):
        of.set_epoch(epoch)
        return [of[number]["input_ids"].tolist() for number in range(len(of))]

    first, second = ids(packs, 0), ids(packs, 1)
    assert len(first) == len(second)
    assert first != second
    assert ids(packs, 0) == first
    assert ids(pickle.loads(pickle.dumps(packs)), 1) == second
    assert ids(copy.deepcopy(packs), 1) == second
    assert ids(pack(data, 64, split=split, seed=1), 0) != first


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_tells_the_epoch_and_goes_on_in_the_middle(workers) -> None:
    packs = pack(documents(np.random.default_rng(0).integers(1, 9, 100)), 32)

    def loader_of():
        how = {"num_workers": workers, "executor": "workers" if workers else "inline"}
        sampler = ShuffleSampler(packs, 3)
        return FastDataLoader(packs, 2, sampler=sampler, collate_fn=packs.collate, **how)

    def ids(batches):
        return [batch["input_ids"].tolist() for batch in batches]

    loader = loader_of()
    epochs = [ids(loader), ids(loader)]
    loader.close()
    assert sorted(map(str, epochs[0])) != sorted(map(str, epochs[1]))
    assert ids(stopped_epoch(loader_of, 3, epoch=1)) == epochs[1]


class Transformer(nn.Module):
    """One layer of attention with learned positions, in float64."""

    def __init__(self, width=16, heads=2):
        super().__init__()
        torch.manual_seed(0)
        self.heads = heads
        self.ids, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(64, width)
        self.mixed, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)
        self.double()

    def forward(self, ids, positions, mask):
        x = self.ids(ids) + self.positions(positions)
        parts = self.mixed(self.norm(x)).view(*ids.shape, 3, self.heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return self.head(self.norm(x))


def loss_of(logits, labels):
    """Return the loss as transformers has it: labels are shifted there; summed."""
    return nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100, reduction="sum"
    )


def block_mask(ends):
    """Return where one token may look at another: in its own document, and not ahead."""
    document = torch.repeat_interleave(ends.diff())
    same = document[:, None] == document
    return same & torch.ones_like(same).tril()


@pytest.mark.parametrize("split", [True, False])
def test_the_loss_of_packs_is_that_of_the_documents(split) -> None:
    rng = np.random.default_rng(1)
    texts = [rng.integers(0, VOCABULARY, size) for size in rng.integers(2, 30, 40)]
    packs = pack(texts, 48, split=split)
    model, packed, alone = Transformer(), torch.zeros(()).double(), torch.zeros(()).double()
    for batch in DataLoader(packs, 3, collate_fn=packs.collate):
        assert batch["input_ids"].shape == batch["position_ids"].shape == batch["labels"].shape
        assert batch["max_seqlen"] == int(batch["cu_seqlens"].diff().max())
        mask = block_mask(batch["cu_seqlens"])
        logits = model(batch["input_ids"], batch["position_ids"], mask)
        packed = packed + loss_of(logits, batch["labels"])
    pieces = [torch.from_numpy(one) for one in texts]
    if split:  # a part of a document is a document of its own
        pieces = [ids for at in range(len(packs)) for ids, _, _ in pieces_of(packs[at])]
    for ids in pieces:
        mask = torch.ones(len(ids), len(ids)).tril().bool()
        alone = alone + loss_of(model(ids[None], torch.arange(len(ids))[None], mask), ids[None])
    assert packed.item() == pytest.approx(alone.item(), abs=1e-6)
    grads = [torch.autograd.grad(each, [*model.parameters()]) for each in (packed, alone)]
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-9)


def test_documents_in_torchs_own_loader_and_as_plain_rows() -> None:
    packs = pack([[1, 2], [3], [4, 5, 6]], 4, lengths=[2, 1, 3], split=False)
    batch = next(iter(DataLoader(packs, 2, collate_fn=packs.collate)))
    assert batch["input_ids"].tolist() == [[4, 5, 6, 3, 1, 2]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 0, 1]]
    assert batch["labels"].tolist() == [[-100, 5, 6, -100, -100, 2]]
    assert batch["cu_seqlens"].tolist() == [0, 3, 4, 6]
    assert batch["max_seqlen"] == 3
    assert packs[-1]["input_ids"].tolist() == [1, 2]
    with pytest.raises(IndexError):
        packs[2]
    without = pack([{"input_ids": [4, 5, 6], "labels": None}], 8)
    assert without[0]["labels"].tolist() == [-100, 5, 6]


@pytest.mark.parametrize(
    ("given", "how", "error", "match"),
    [
        ([[1] * 9], {"split": False}, DatasetError, "Sample 0 has the length 9, above tokens=8"),
        ([[1]], {"tokens": 0}, OptionsError, "tokens is 0"),
        ([[1]], {"seed": 0.5}, OptionsError, "seed is 0.5"),
        ([[1]], {"tokens": None}, OptionsError, "tokens is None"),
        ([[1]], {"split": "no"}, OptionsError, "split is 'no'"),
        ([[1]], {"lengths": [1, 2]}, DatasetError, "lengths has 2 numbers for 1 documents"),
        ([[1]], {"lengths": [-1]}, DatasetError, r"lengths\[0\] is -1"),
        (iter([[1]]), {}, DatasetError, "has no length"),
        ([{"ids": [1]}], {}, DatasetError, "has the keys 'ids'"),
        ([{"input_ids": [1], "labels": [1, 2]}], {}, DatasetError, "labels of document 0"),
        ([[0.5]], {}, DatasetError, "float32"),
        (["ab"], {}, DatasetError, "input_ids of document 0 is text, which is to be tokenized"),
        ([[1], b"ab"], {}, DatasetError, "input_ids of document 1 is text"),
        ([[1], [None]], {}, DatasetError, "document 1 is a list of which torch makes no tensor"),
        ([[1], np.array([1], ">i4")], {}, DatasetError, "document 1 is a ndarray .*byte"),
        (Mixture({"a": [[1]]}), {}, DatasetError, "Pack its parts, and mix the packs"),
        ([[1]], {"lengths": [2]}, DatasetError, "Document 0 has 1 tokens, and lengths says 2"),
    ],
)
def test_what_cannot_be_packed_is_refused(given, how, error, match) -> None:
    with pytest.raises(error, match=match):
        pack(given, **{"tokens": 8, **how})[0]


def test_a_data_module_keeps_the_order_of_packs_which_each_epoch_draws() -> None:
    packs = pack(documents([9] * 10 + [3] * 40), 10, split=False)
    data = FastDataModule.from_datasets(packs, batch_size=1, collate_fn=packs.collate)
    own = [packs.collate([packs[at]])["input_ids"].tolist() for at in range(len(packs))]
    assert [batch["input_ids"].tolist() for batch in data.train_dataloader()] == own
    seen = set()
    for epoch in range(3):
        packs.set_epoch(epoch)
        seen.add(tuple(len(packs[at]["cu_seqlens"]) for at in range(len(packs))))
    assert len(seen) == 3


def test_nothing_to_pack_is_no_pack() -> None:
    assert len(pack([], 8)) == 0
    assert len(pack([], 8, split=False)) == 0
    assert len(pack([[]], 8)) == 0
