"""`perseus.torch.nn`: torch.nn, with `perseus.torch.nn.parallel`."""

import sys

import torch.nn
import torch.nn.parallel

sys.modules[__name__] = torch.nn
sys.modules[f"{__name__}.parallel"] = torch.nn.parallel
