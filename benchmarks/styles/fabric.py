"""A loop of one's own with Fabric: no Trainer, so that the loop is measured by StepTimer."""

from lightning.fabric import Fabric, seed_everything
from pieces import HOW, Model, Photos, loader, result

if __name__ == "__main__":
    seed_everything(1)
    fabric = Fabric(accelerator="cpu")
    net = Model()
    model, optimizer = fabric.setup(net, net.configure_optimizers())
    model.mark_forward_method("training_step")
    if HOW == "module":
        from lightning_fastdata import FastDataLoader

        train = FastDataLoader(Photos(), 16, shuffle=True)
    else:
        train = fabric.setup_dataloaders(loader())
    timer = None
    if HOW != "plain":
        from lightning_fastdata import StepTimer

        timer = StepTimer(fabric.device)
    for _ in range(2):
        for number, batch in enumerate(train if timer is None else timer.batches(train)):
            optimizer.zero_grad()
            fabric.backward(model.training_step(batch, number))
            optimizer.step()
    if timer is not None:
        print(timer.report())
    result(net)
