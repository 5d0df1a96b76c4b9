"""A wrong implementation that many tests let through: the scores are rounded to the input dtype before the softmax."""


def attention(q, k, v, *, scale=None):
    """q, k, v (B, H, L, D). `q @ k.mT` is rounded to fp16 or bf16, and so is its product with the scale."""
    scores = (q @ k.mT) * (q.shape[-1] ** -0.5 if scale is None else scale)
    return (scores.float().softmax(-1) @ v.float()).to(q.dtype)
