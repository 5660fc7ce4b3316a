"""Real text for language models to learn from: the reference topics that Python's own help() prints.

`pydoc_data.topics` comes with every Python: half a megabyte of English about the language, so training needs
no download and no file. The text is of the running Python's version; compared runs share this version.

A batch follows from the seed and the step alone, so every rank of every strategy makes the same global batch
and takes its part of the batch.

Shape letters: B batch, L sequence.
"""

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

#: BERT's shares: of tokens that are predicted; of predicted ones that become [MASK], or a random token
CHOSEN, MASKED, REPLACED = 0.15, 0.8, 0.1
#: the share of pairs of sentences that are shorter than the sequence, as in BERT
SHORT = 0.1

_CHARACTERS = 100
_WORD = re.compile(r"\w+|([^\w\s])\1*")  # a word, or a run of one sign, such as the line under a title
_SENTENCE_END = re.compile(r"\n\s*\n|(?<=[.!?])\s+")


class WordPieces:
    """A tokenizer of lower-case text: frequent words are one token, other words their longest known pieces.

    The vocabulary is the special tokens, the most frequent characters (each as a word and, written ``##x``,
    within a word), then the most frequent words, ``size`` tokens in all.
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
    """The sentences of all documents, one after another.

    Attributes:
        sentences: the token ids of each sentence.
        documents: for each sentence, the number of its document.
    """

    sentences: Sequence[Sequence[int]]
    documents: Sequence[int]

    def take(self, start: int, room: int) -> tuple[list[int], int]:
        """Up to ``room`` tokens, from sentence ``start`` to its document's end, with the last sentence cut to
        fit; and the number of the sentence after these tokens."""
        tokens: list[int] = []
        at = start
        while at < len(self.sentences) and len(tokens) < room and self.documents[at] == self.documents[start]:
            tokens += self.sentences[at]
            at += 1
        return tokens[:room], at


@cache
def corpus(vocabulary: int) -> Corpus:
    """The text as tokens of a vocabulary of ``vocabulary`` tokens."""
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

    A sequence is [CLS] A [SEP] B [SEP], where A and B are runs of sentences that follow each other in a
    document; half of the sequences have A and B in the wrong order (``order_labels`` 1), for ALBERT's
    sentence-order prediction. The weights of each loss sum to one over the batch."""
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

    A sequence is a run of the text from a random place, with [SEP] after each document; after the last
    document the first one begins again. The label of a token is the next token.
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
    """The token ids of all documents in one tensor, with [SEP] after each document."""
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
    """The tokens of the first and of the second run of sentences, and 1 if their order is swapped, else 0."""
    room = seq_len - 3
    if torch.rand((), generator=generator) < SHORT:
        room = _integer(seq_len // 2, room, generator)
    # the cut is anywhere in the middle, because the place of [SEP] would otherwise reveal the order
    cut = _integer(room // 4, room - room // 4, generator)
    while True:
        first, following = text.take(_integer(0, len(text.sentences) - 1, generator), cut)
        # a second run exists only if the document goes on behind the first
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
    """A random integer from ``low`` to ``high``, both included."""
    return int(torch.randint(low, high + 1, (), generator=generator))


def _words(text: str) -> list[str]:
    return [match.group() for match in _WORD.finditer(text.lower())]


def _most_common(counts: Counter[str], n: int) -> list[tuple[str, int]]:
    """The n largest counts; ties are sorted by name, so that the vocabulary depends only on the text."""
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:n]
