"""The largest vocabulary: rows of the word embedding, of which each rank may have a part."""

import spbench


class Vocabulary(spbench.Quantity):
    """The model's option ``vocabulary``; the bytes of tables and logits are affine in it."""

    name = "vocabulary"
    degree = 1

    def at(self, cell, value):
        options = {**cell.model_options, "vocabulary": value}
        return cell.model_copy(update={"model_options": options, "search": None})
