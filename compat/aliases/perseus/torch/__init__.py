"""The folder of `perseus.torch.horovod`."""
