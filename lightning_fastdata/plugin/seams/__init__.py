"""Everything that is asked of Lightning beyond its documented hooks, and nothing anywhere else.

Private names that are read, all of them in :mod:`~lightning_fastdata.plugin.seams.internals`:

- ``_data_source`` of a loop: to see loaders before their workers start
- ``_loaded_from_state_dict`` of the fit loop: which epoch a resumed fit begins with
- ``_batches_that_stepped`` of the epoch loop: Lightning's own x axis
- ``_combined_loader`` of the fit loop: to ask again for a loader of another batch size
- ``_accelerator_connector`` of a trainer: whether Lightning spreads samples over the ranks
- ``_data_connector`` of a trainer, with ``_datahook_selector`` and ``_prepare_dataloader``: where
  Lightning warns of what a FastDataModule does not do
- ``_mode`` of a CombinedLoader: to combine loaders again in the same way
- ``_prefix`` of a TensorBoardLogger: to write all scalars of a step at once
- ``_compiler_ctx`` of a LightningModule: whether its step was compiled

Attributes that are replaced on one object, never on a class, until the run of its trainer ends:

- ``trainer.profiler``: :mod:`~lightning_fastdata.plugin.seams.profiler_tee`
- ``dataloader`` of a loop's data source: :mod:`~lightning_fastdata.plugin.seams.sources`
- ``on_after_batch_transfer`` of a module:
  :mod:`~lightning_fastdata.plugin.seams.hook_on_instance`
- ``reduce`` of the strategy, ``_prepare_dataloader`` of the data connector:
  :mod:`~lightning_fastdata.plugin.seams.sharing`
- ``get_instance`` of the hook selector: :mod:`~lightning_fastdata.plugin.seams.hooks`
- ``teardown`` of the strategy, which puts back what the last two lines name:
  :mod:`~lightning_fastdata.plugin.seams.for_one_run`
- ``callbacks``, ``loggers``, ``profiler`` of the trainer, ``log`` and ``log_dict`` of the module,
  for the steps that the batch-size guard tries:
  :mod:`~lightning_fastdata.plugin.seams.unseen_steps`

``tests/plugin/test_seams.py`` pins each of them against the installed Lightning, and
``docs/seams.md`` says what happens where one is gone.
"""
