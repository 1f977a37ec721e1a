"""Loops of Hugging Face's Trainer and of Accelerate, with the lines that the docs give."""

from __future__ import annotations

import pytest
import torch
from samples import Samples

from lightning_fastdata import FastDataLoader, StepTimer, prefetch


def text(index):
    words = torch.arange(8) + index % 50
    return {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": index % 2}


TEXTS = Samples(text, 48)


def test_the_trainer_takes_the_loader_and_the_timer(tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    timer = StepTimer("cpu")

    class FastTrainer(transformers.Trainer):
        def get_train_dataloader(self):
            rows, how = self.args.train_batch_size, {"collate_fn": self.data_collator}
            return timer.batches(FastDataLoader(self.train_dataset, rows, shuffle=True, **how))

    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.BertConfig(vocab_size=100, intermediate_size=16, **small)
    quiet = {"report_to": [], "save_strategy": "no", "use_cpu": True, "disable_tqdm": True}
    arguments = transformers.TrainingArguments(
        str(tmp_path), num_train_epochs=2, per_device_train_batch_size=8, **quiet
    )
    trainer = FastTrainer(
        model=transformers.BertForSequenceClassification(config),
        args=arguments,
        train_dataset=TEXTS,
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
    loader = prefetch(FastDataLoader(TEXTS, 8, shuffle=True), accelerator.device)
    for batch in timer.batches(loader):
        accelerator.backward(model(batch["input_ids"].float()).sum())
        seen += (batch["input_ids"][:, 0]).tolist()
    assert sorted(seen) == sorted(int(TEXTS[i]["input_ids"][0]) for i in range(48))
    assert " steps in " in str(timer.report())
