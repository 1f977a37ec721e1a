"""A trainer as small as can be, which several tests give their batches to."""

import lightning as L


def quiet_trainer(folder, **options):
    """Return a trainer on the CPU for one epoch, which logs, keeps and shows nothing.

    Args:
        folder: where it may write.
        **options: arguments of ``Trainer`` that win over these.
    """
    silent = {
        "max_epochs": 1,
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": folder,
    }
    return L.Trainer(**silent | options)
