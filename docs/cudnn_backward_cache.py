"""torch's cuDNN attention: the gradients of one call depend on how an earlier call's grad_out lay in memory."""

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as attention

torch.manual_seed(0)
q, k, v, g = (torch.randn(2, 16, 1024, 64, device="cuda", dtype=torch.bfloat16) for _ in range(4))
inputs = [x.requires_grad_() for x in (q, k, v)]
right = torch.autograd.grad(attention(*(x.float() for x in inputs)), inputs, g.float())
for name, grad_out in (("tokens outermost", g.transpose(1, 2).contiguous().transpose(1, 2)), ("heads outermost", g)):
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        grads = torch.autograd.grad(attention(*inputs), inputs, grad_out)
    print(name, [f"{(a - b).abs().max().item():.4f}" for a, b in zip(grads, right, strict=True)])
