"""Loops of Hugging Face's Trainer and of Accelerate, with the lines that the docs give."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import Dataset

from lightning_fastdata import FastDataLoader, StepTimer, prefetch


class Texts(Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, index):
        words = torch.arange(8) + index % 50
        return {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": index % 2}


def test_the_trainer_takes_the_loader_and_the_timer(tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    timer = StepTimer("cpu")

    class FastTrainer(transformers.Trainer):
        def get_train_dataloader(self):
            rows = self.args.train_batch_size
            return timer.batches(
                FastDataLoader(
                    self.train_dataset, rows, shuffle=True, collate_fn=self.data_collator
                )
            )

    config = transformers.BertConfig(
        vocab_size=100,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
    )
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        num_train_epochs=2,
        per_device_train_batch_size=8,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = FastTrainer(
        model=transformers.BertForSequenceClassification(config),
        args=arguments,
        train_dataset=Texts(),
        data_collator=transformers.default_data_collator,
    )
    trainer.train()
    assert trainer.state.global_step == 12
    assert " steps in " in str(timer.report())


def test_accelerate_takes_what_prefetch_returns():
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(8, 2))
    timer, seen = StepTimer(accelerator.device), []
    loader = prefetch(FastDataLoader(Texts(), 8, shuffle=True), accelerator.device)
    for batch in timer.batches(loader):
        accelerator.backward(model(batch["input_ids"].float()).sum())
        seen += (batch["input_ids"][:, 0]).tolist()
    assert sorted(seen) == sorted(int(Texts()[i]["input_ids"][0]) for i in range(48))
    assert " steps in " in str(timer.report())
