"""Real text for language models to learn from: the reference topics that Python's own help() prints.

`pydoc_data.topics` comes with every Python: half a megabyte of English about the language, so training needs
no download and no file. The text is of the running Python's version; runs that are compared share it.

Everything follows from the seed and the step alone, so every rank of every strategy makes the same global
batch and takes its part of it.

Shape letters: B batch, L sequence.
"""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pydoc_data.topics import topics

import torch
from torch import Tensor

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
PAD, UNKNOWN, CLS, SEP, MASK = range(len(SPECIAL))

#: of the tokens that are not special; of the chosen, what becomes [MASK] and what another token (BERT's)
CHOSEN, MASKED, REPLACED = 0.15, 0.8, 0.1
#: part of the pairs that are shorter than the sequence, as in BERT
SHORT = 0.1

_CHARACTERS = 100
_WORD = re.compile(r"\w+|([^\w\s])\1*")  # a word, or a run of one sign such as the line under a title
_SENTENCE_END = re.compile(r"\n\s*\n|(?<=[.!?])\s+")


class WordPieces:
    """Lower-case text to token ids: frequent words whole, others by the longest pieces that are known.

    The vocabulary is the special tokens, the most frequent characters (each alone and, written ``##x``,
    within a word), then the most frequent words until ``size`` tokens are there.
    """

    def __init__(self, texts: Sequence[str], size: int):
        words = Counter(word for text in texts for word in _words(text))
        characters = Counter("".join(words.elements()))
        known = [*SPECIAL]
        for character, _ in _most_common(characters, _CHARACTERS):
            known += [character, f"##{character}"]
        if size < len(known):
            raise ValueError(f"a vocabulary of {size} is too small for this text; use at least {len(known)}")
        known += [word for word, _ in _most_common(words, len(words)) if len(word) > 1][: size - len(known)]
        self.tokens = known
        self.ids: Mapping[str, int] = {token: i for i, token in enumerate(known)}
        self._pieces: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        """The token ids of a text."""
        return [piece for word in _words(text) for piece in self._of_word(word)]

    def _of_word(self, word: str) -> list[int]:
        if word not in self._pieces:
            pieces: list[int] = []
            start = 0
            while start < len(word):
                mark = "##" if start else ""
                ends = range(len(word), start, -1)
                end = next((end for end in ends if mark + word[start:end] in self.ids), 0)
                if not end:
                    pieces = [UNKNOWN]
                    break
                pieces.append(self.ids[mark + word[start:end]])
                start = end
            self._pieces[word] = pieces
        return self._pieces[word]


@dataclass(frozen=True)
class Corpus:
    """Sentences of all documents, one after another.

    Attributes:
        sentences: token ids of each.
        documents: the number of the document that each belongs to.
    """

    sentences: Sequence[Sequence[int]]
    documents: Sequence[int]

    def take(self, start: int, room: int) -> tuple[list[int], int]:
        """At most ``room`` tokens of sentence ``start`` and those that follow in its document, the last
        one cut; and the number of the sentence after them."""
        tokens: list[int] = []
        at = start
        while at < len(self.sentences) and len(tokens) < room and self.documents[at] == self.documents[start]:
            tokens += self.sentences[at]
            at += 1
        return tokens[:room], at


@cache
def corpus(vocabulary: int) -> Corpus:
    """The text in tokens of a vocabulary of that size."""
    texts = [topics[name] for name in sorted(topics)]
    pieces = WordPieces(texts, vocabulary)
    sentences, documents = [], []
    for number, text in enumerate(texts):
        for sentence in _SENTENCE_END.split(text):
            if tokens := pieces.encode(sentence):
                sentences.append(tokens)
                documents.append(number)
    return Corpus(sentences, documents)


def masked_language_batches(
    vocabulary: int, batch: int, seq_len: int, seed: int
) -> Iterator[dict[str, Tensor]]:
    """Endless whole batches with the inputs of :class:`BertModel`.

    A sequence is [CLS] A [SEP] B [SEP]: runs of sentences that follow each other in a document, in half of
    the sequences in the wrong order (``order_labels`` 1), as ALBERT's sentence-order prediction. The weights
    of each loss sum to one over the batch.
    """
    if seq_len < 8:
        raise ValueError(f"a pair of sentences needs a sequence length of at least 8, not {seq_len}")
    text, step = corpus(vocabulary), 0
    while True:
        generator = _generator(seed, step)
        pairs = [_pair(text, seq_len, generator) for _ in range(batch)]
        yield _batch(pairs, vocabulary, seq_len, generator)
        step += 1


def causal_language_batches(
    vocabulary: int, batch: int, seq_len: int, seed: int
) -> Iterator[dict[str, Tensor]]:
    """Endless whole batches with the inputs of :class:`DecoderModel`.

    A sequence is a run of the text from anywhere, each document closed by [SEP]; after the last comes the
    first again. The label of a token is the one that follows it.
    """
    text, step = _stream(vocabulary), 0
    offsets, shape = torch.arange(seq_len + 1), (batch, seq_len)
    while True:
        starts = torch.randint(len(text), (batch, 1), generator=_generator(seed, step))
        run = text[(starts + offsets) % len(text)]
        yield {
            "tokens": run[:, :-1].contiguous(),
            "labels": run[:, 1:].contiguous(),
            "loss_weights": torch.full(shape, 1 / (batch * seq_len)),
        }
        step += 1


@cache
def _stream(vocabulary: int) -> Tensor:
    """All documents, one after another."""
    text = corpus(vocabulary)
    tokens: list[int] = []
    for number, (sentence, document) in enumerate(zip(text.sentences, text.documents, strict=True)):
        tokens += sentence
        if number + 1 == len(text.documents) or text.documents[number + 1] != document:
            tokens.append(SEP)
    return torch.tensor(tokens)


def _generator(seed: int, step: int) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(f"text {seed} {step}".encode()))


_Pair = tuple[list[int], list[int], int]


def _pair(text: Corpus, seq_len: int, generator: torch.Generator) -> _Pair:
    """Tokens of A and of B, and whether they are swapped."""
    room = seq_len - 3
    if torch.rand((), generator=generator) < SHORT:
        room = _integer(seq_len // 2, room, generator)
    # cut anywhere in the middle, or else the place of the [SEP] would reveal the order
    cut = _integer(room // 4, room - room // 4, generator)
    while True:
        first, following = text.take(_integer(0, len(text.sentences) - 1, generator), cut)
        # the text goes on in the same document, or else there is no second half
        if following < len(text.sentences) and text.documents[following] == text.documents[following - 1]:
            break
    second, _ = text.take(following, room - len(first))
    swapped = _integer(0, 1, generator)
    return (second, first, swapped) if swapped else (first, second, swapped)


def _batch(
    pairs: Sequence[_Pair], vocabulary: int, seq_len: int, generator: torch.Generator
) -> dict[str, Tensor]:
    shape = (len(pairs), seq_len)
    labels, types = torch.full(shape, PAD), torch.zeros(shape, dtype=torch.int64)
    chosen = torch.zeros(shape, dtype=torch.bool)
    for row, (first, second, _) in enumerate(pairs):
        tokens = torch.tensor([CLS, *first, SEP, *second, SEP])
        labels[row, : len(tokens)] = tokens
        types[row, len(first) + 2 : len(tokens)] = 1
        words = (tokens >= len(SPECIAL)).nonzero().flatten()
        count = max(1, round(CHOSEN * len(words)))
        chosen[row, words[torch.randperm(len(words), generator=generator)[:count]]] = True
    way = torch.rand(shape, generator=generator)
    others = torch.randint(len(SPECIAL), vocabulary, shape, generator=generator)
    seen = torch.where(chosen & (way < MASKED), torch.full_like(labels, MASK), labels)
    seen = torch.where(chosen & (way >= 1 - REPLACED), others, seen)
    return {
        "tokens": seen,
        "token_types": types,
        "positions": torch.arange(seq_len),
        "labels": labels,
        "loss_weights": chosen / chosen.sum(),
        "padding": (labels == PAD).long(),
        "order_labels": torch.tensor([swapped for _, _, swapped in pairs]),
        "order_weights": torch.full((len(pairs),), 1 / len(pairs)),
    }


def _integer(low: int, high: int, generator: torch.Generator) -> int:
    """From ``low`` to ``high``, both included."""
    return int(torch.randint(low, high + 1, (), generator=generator))


def _words(text: str) -> list[str]:
    return [match.group() for match in _WORD.finditer(text.lower())]


def _most_common(counts: Counter[str], n: int) -> list[tuple[str, int]]:
    """Ties by name, so that the vocabulary depends on nothing but the text."""
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:n]
