"""DeepSeek-V2 (arXiv 2405.04434) and V3 (arXiv 2412.19437), and Moonlight (arXiv 2502.16982), which has V3's
layers: latent attention, routed and shared experts, and multi-token prediction.

DeepSeek-V3.2 (arXiv 2512.02556) and GLM-5 (arXiv 2602.15763) have V3's layers, and an indexer that chooses
the positions to attend to.
"""

from spbench.impls.models.blocks.decoder import TINY_SIZES
from spbench.impls.models.blocks.softmax_options import TINY_INDEX, TINY_LATENT
from spbench.impls.models.causal_transformer import CausalTransformerModel
from spbench.impls.models.presets import published

PRESETS = {
    **published("deepseek", CausalTransformerModel),
    # for verification: latent attention, and a module of multi-token prediction
    "mla-tiny": CausalTransformerModel(**TINY_SIZES, **TINY_LATENT, mtp_layers=1),
    # the same, with an indexer
    "indexer-tiny": CausalTransformerModel(**TINY_SIZES, **TINY_LATENT, **TINY_INDEX, mtp_layers=1),
}
