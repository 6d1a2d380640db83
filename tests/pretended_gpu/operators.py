"""Compares what kernels.py computes with the CPU's operators, or with a plain formula. For test_kernels.py.

python tests/pretended_gpu/run.py tests/pretended_gpu/operators.py
"""

import torch
import torch.nn.functional as F
import torchvision
from torch.testing import assert_close

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def random(*shape, dtype=torch.float64, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def shared_batch_norm(dtype):
    """Merged statistics of two unequal parts give the forward and backward pass of one batch norm over both."""
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


def attention(dtype):
    """Fused attention, with a bias, causal and with neither, equals the formula, forward and backward."""
    inputs = [random(2, 3, 5, 8, dtype=dtype, seed=seed) for seed in range(3)]
    bias = random(2, 1, 5, 5, dtype=dtype, seed=3)
    for mask, is_causal in ((None, False), (None, True), (bias, False)):
        on_gpu = [x.cuda().requires_grad_() for x in inputs]
        wide = [x.double().clone().requires_grad_() for x in inputs]
        y = F.scaled_dot_product_attention(*on_gpu, None if mask is None else mask.cuda(), is_causal=is_causal)
        query, key, value = wide
        scores = query @ key.mT / 8**0.5 + (0 if mask is None else mask.double())
        scores = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), float("-inf")) if is_causal else scores
        expected = scores.softmax(-1) @ value
        assert_close(y.cpu(), expected.to(dtype), **tolerance(dtype))
        gradient = random(2, 3, 5, 8, dtype=dtype, seed=4)
        y.backward(gradient.cuda())
        expected.backward(gradient.double())
        for one, other in zip(on_gpu, wide, strict=True):
            assert_close(one.grad.cpu(), other.grad.to(dtype), **tolerance(dtype))


def half_to_float(dtype):
    """A softmax of half precision inputs in float32, as under autocast, which the CPU refuses."""
    for softmax in (F.softmax, F.log_softmax):
        x, wide = random(4, 6, dtype=dtype).cuda().requires_grad_(), random(4, 6, dtype=dtype).double().requires_grad_()
        y, expected = softmax(x, 1, dtype=torch.float32), softmax(wide, 1)
        (y * y).sum().backward()
        (expected * expected).sum().backward()
        assert_close(y.cpu(), expected.float())
        assert_close(x.grad.cpu(), wide.grad.to(dtype))


def fused_optimizers(dtype):
    """Fused optimizer steps equal the loops on the CPU."""
    for name, options in (("AdamW", {}), ("Adam", {"weight_decay": 0.1}), ("SGD", {"momentum": 0.9, "nesterov": True})):
        states = []
        for device, fused in (("cuda", True), ("cpu", False)):
            weights = [torch.nn.Parameter(random(3, 4, dtype=dtype, seed=seed).to(device)) for seed in range(2)]
            optimizer = getattr(torch.optim, name)(weights, lr=0.1, fused=fused, **options)
            for step in range(3):
                for seed, weight in enumerate(weights):
                    weight.grad = random(3, 4, dtype=dtype, seed=10 * step + seed).to(device)
                optimizer.step()
            states.append([weight.detach().cpu() for weight in weights])
        for one, other in zip(*states, strict=True):
            assert_close(one, other)


def scaled_gradients(dtype):
    """The gradient scaler divides finite gradients; for infinite ones it skips the step and halves its scale."""
    scaler, weight = torch.amp.GradScaler("cuda", init_scale=8.0), torch.nn.Parameter(torch.ones(3, device="cuda"))
    optimizer = torch.optim.AdamW([weight], fused=True)
    for value, scale in ((4.0, 8.0), (float("inf"), 4.0)):
        before = weight.detach().clone()
        scaler.scale(weight.sum()).backward()
        weight.grad.fill_(value)
        scaler.unscale_(optimizer)
        assert weight.grad[0].item() == value / 8
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert torch.equal(before, weight) == (value == float("inf")) and scaler.get_scale() == scale


def draws(dtype):
    """Dropout and other random operators repeat with the same seed, differ otherwise, and do not touch the host's generator."""
    x, drawn = torch.ones(64, device="cuda", dtype=dtype), []
    torch.manual_seed(1)
    of_host = torch.default_generator.get_state()
    for seed in (0, 0, 1):
        torch.cuda.manual_seed(seed)
        drawn.append(torch.cat([F.dropout(x), F.dropout(x), torch.rand_like(x), torch.randn(64, device="cuda")]))
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])
    assert not torch.equal(drawn[0][:64], drawn[0][64:128]), "the generator must move on"
    assert torch.equal(of_host, torch.default_generator.get_state())


def masks(dtype):
    """Operators whose output shape depends on values, and writes under a mask."""
    x = random(4, 3, dtype=dtype)
    y, mask = x.cuda(), x > 0
    assert torch.equal(y[mask.cuda()].cpu(), x[mask]) and torch.equal(mask.cuda().nonzero().cpu(), mask.nonzero())
    y[mask.cuda()] = 7
    y[mask.cuda().any(1), 1] += 1
    x[mask] = 7
    x[mask.any(1), 1] += 1
    assert torch.equal(y.cpu(), x) and not torch.equal(y, y + 1)
    counts = torch.tensor([1, 0, 2, 3])
    assert torch.equal(counts.cuda().repeat_interleave(counts.cuda()).cpu(), counts.repeat_interleave(counts))


def boxes(dtype):
    """torchvision's operators on boxes and regions."""
    corners = random(40, 2, dtype=dtype).abs() * 10
    of_boxes, scores = torch.cat([corners, corners + 5], 1), random(40, dtype=dtype, seed=1)
    kept = torchvision.ops.nms(of_boxes.cuda(), scores.cuda(), 0.3).cpu()
    assert torch.equal(kept, torchvision.ops.nms(of_boxes, scores, 0.3)) and 0 < len(kept) < 40
    maps, regions = random(1, 4, 16, 16, dtype=dtype), F.pad(of_boxes, (1, 0))
    inputs = [maps.cuda().requires_grad_(), maps.requires_grad_()]
    outputs = [torchvision.ops.roi_align(x, regions.to(x.device), 7, sampling_ratio=2, aligned=True) for x in inputs]
    for y in outputs:
        y.square().sum().backward()
    assert_close(outputs[0].cpu(), outputs[1])
    assert_close(inputs[0].grad.cpu(), inputs[1].grad)


def tolerance(dtype):
    """The default for operators that compute in float32 and round once; 1e-12 for float64."""
    return {} if dtype != torch.float64 else {"rtol": 1e-12, "atol": 1e-12}


def run(name, dtype, *arguments):
    globals()[name](dtype, *arguments)
    print(name, dtype, *arguments)


if __name__ == "__main__":
    for dtype in DTYPES:
        run("shared_batch_norm", dtype)
        run("attention", dtype)
        run("draws", dtype)
        run("masks", dtype)
    for dtype in DTYPES[:2]:
        run("fused_optimizers", dtype)
        run("boxes", dtype)
    for dtype in DTYPES[2:]:
        run("half_to_float", dtype)
    run("scaled_gradients", torch.float32)
