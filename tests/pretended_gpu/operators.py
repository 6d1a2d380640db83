"""run.py tests/pretended_gpu/operators.py: compares what the kernels compute with the CPU's, or with a plain formula."""

import torch
import torch.nn.functional as F
from torch.testing import assert_close

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def random(*shape, dtype=torch.float64, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def shared_batch_norm(dtype):
    """Statistics of two unequal parts, merged: forward and backward pass are those of one batch norm over both."""
    wide = torch.promote_types(dtype, torch.float32)
    x, gradient = random(6, 5, 4, 3, dtype=dtype), random(6, 5, 4, 3, dtype=dtype, seed=1)
    weight, bias = random(5, dtype=wide, seed=2), random(5, dtype=wide, seed=3)
    running = [torch.zeros(5, dtype=torch.float64), torch.ones(5, dtype=torch.float64)]
    inputs = [tensor.double().clone().requires_grad_() for tensor in (x, weight, bias)]
    y = F.batch_norm(inputs[0], *running, *inputs[1:], True, 0.1)
    y.backward(gradient.double())
    parts, gradients, weight, bias = x.cuda().split(4), gradient.cuda().split(4), weight.cuda(), bias.cuda()
    means, deviations = map(torch.stack, zip(*(torch.batch_norm_stats(part, 1e-5) for part in parts), strict=True))
    counts, moved = torch.tensor([48.0, 24.0], device="cuda"), [torch.zeros_like(bias), torch.ones_like(bias)]
    merged = torch.batch_norm_gather_stats_with_counts(parts[0], means, deviations, *moved, 0.1, 1e-5, counts.to(wide))
    result = torch.cat([torch.batch_norm_elemt(part, weight, bias, *merged, 1e-5) for part in parts])
    sums = [
        torch.batch_norm_backward_reduce(gradient, part, *merged, weight, True, True, True)
        for gradient, part in zip(gradients, parts, strict=True)
    ]
    total, slope, of_weight, of_bias = (sum(of_parts) for of_parts in zip(*sums, strict=True))
    of_x = torch.cat(
        [
            torch.batch_norm_backward_elemt(gradient, part, *merged, weight, total, slope, counts.int())
            for gradient, part in zip(gradients, parts, strict=True)
        ]
    )
    assert result.dtype == of_x.dtype == dtype and of_weight.dtype == total.dtype == wide
    expected = (y, *(tensor.grad for tensor in inputs), *running)
    for one, other in zip((result, of_x, of_weight, of_bias, *moved), expected, strict=True):
        assert_close(one.cpu(), other.to(one.dtype), **tolerance(dtype))


def tolerance(dtype):
    """Of operators that compute in float32 and round once; of float64, to 1e-12."""
    return {} if dtype != torch.float64 else {"rtol": 1e-12, "atol": 1e-12}


def run(name, dtype, *arguments):
    globals()[name](dtype, *arguments)
    print(name, dtype, *arguments)


if __name__ == "__main__":
    for dtype in DTYPES:
        run("shared_batch_norm", dtype)
