"""ring-flash-attention (https://github.com/zhuzilin/ring-flash-attention): rings of three placements."""

from spbench.impls.peers.peer import RingPeer


class RingFlashAttention(RingPeer):
    """The three rings of ring-flash-attn, one for each placement."""

    name = "ring_flash_attention"
    summary = "Ring Attention by the package ring-flash-attn"
    source = "github.com/zhuzilin/ring-flash-attention"
    requires = ("ring-flash-attn",)
    functions = {
        "contiguous": "ring_flash_attn.ring_flash_attn:ring_flash_attn_func",
        "zigzag": "ring_flash_attn.zigzag_ring_flash_attn:zigzag_ring_flash_attn_func",
        "striped": "ring_flash_attn.stripe_flash_attn:stripe_flash_attn_func",
    }
