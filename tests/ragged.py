"""Samples of different length, how they become a batch, and an epoch that stops and goes on."""

from __future__ import annotations

from itertools import islice

import torch
from torch.nn.utils.rnn import pad_sequence


def numbered(index, length):
    """Return a row that tells of which sample it is."""
    return torch.full((length,), index)


class Sequences(torch.utils.data.Dataset):
    """Samples of these lengths, each of which a function makes of its index and its length."""

    def __init__(self, lengths, make=numbered):
        self.lengths, self.make = lengths, make

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        return self.make(index, int(self.lengths[index]))


def pad(rows, value=-1):
    return pad_sequence(rows, batch_first=True, padding_value=value)


def stopped_epoch(loader_of, stop, epoch=0):
    """Return the batches of an epoch that stops behind so many, and goes on in another loader."""
    loader, again = loader_of(), loader_of()
    for _ in range(epoch):
        list(loader)
    begun = list(islice(iter(loader), stop))
    again.load_state_dict(loader.state_dict())
    loader.close()
    rest = list(again)
    again.close()
    return begun + rest
