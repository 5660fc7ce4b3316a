"""The norm that a decoder's options describe."""

from torch import nn

from spbench.impls.kernels.layer_norm import LayerNorm
from spbench.impls.kernels.rms_norm import RMSNorm
from spbench.impls.models.blocks.decoder_options import DecoderOptions


def norm_of(model: DecoderOptions, features: int, *, weighted: bool = True) -> nn.Module:
    """A new norm of the model's kind for tensors [..., features]."""
    if model.norm == "layer":
        return LayerNorm(features, model.norm_epsilon, weighted=weighted)
    return RMSNorm(features, weighted=weighted, eps=model.norm_epsilon, way=model.rms_norm)
