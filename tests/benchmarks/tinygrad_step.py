"""A training step of BERT-Base's size on tinygrad's NULL device, which runs nothing: DEV=NULL python FILE

Only tinygrad is imported. Twelve layers, hidden 768, 12 heads, vocabulary 30522, 16 sequences of 512, Adam.
"""

from tinygrad import Context, Tensor, nn

LAYERS, HIDDEN, HEADS, VOCABULARY, BATCH, LENGTH = 12, 768, 12, 30522, 16, 512


class Layer:
    """Attention and two linear maps, each with a norm behind it, as BERT has them."""

    def __init__(self) -> None:
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.wide, self.narrow = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)
        self.norms = [nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)]

    def __call__(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).reshape(BATCH, LENGTH, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        attended = parts[0].scaled_dot_product_attention(parts[1], parts[2]).transpose(1, 2)
        x = self.norms[0](x + self.out(attended.reshape(BATCH, LENGTH, HIDDEN)))
        return self.norms[1](x + self.narrow(self.wide(x).gelu()))


class Bert:
    """Embeddings, layers, and logits of the whole vocabulary."""

    def __init__(self) -> None:
        self.words, self.places = nn.Embedding(VOCABULARY, HIDDEN), nn.Embedding(LENGTH, HIDDEN)
        self.layers = [Layer() for _ in range(LAYERS)]
        self.logits = nn.Linear(HIDDEN, VOCABULARY)

    def __call__(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.places(Tensor.arange(LENGTH))
        return self.logits(x.sequential(self.layers))


def step() -> None:
    """Forward, backward and update, once."""
    model = Bert()
    optimizer = nn.optim.Adam(nn.state.get_parameters(model))
    tokens = Tensor.randint(BATCH, LENGTH, high=VOCABULARY)
    optimizer.zero_grad()
    loss = model(tokens).flatten(0, 1).sparse_categorical_crossentropy(tokens.flatten())
    loss.backward()
    optimizer.step()


if __name__ == "__main__":
    with Context(TRAINING=1):
        step()
